"""The model that ships: SmolLM2-135M-Instruct out of its GGUF."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint

CASES = json.loads((Path(__file__).parent / "fixtures" / "smollm2_tokens.json").read_text())


@pytest.fixture(scope="module")
def builtin() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


@pytest.mark.covers(62)
def test_it_passes_its_target_gate(builtin: Checkpoint) -> None:
    assert builtin.gates(deep=False).target.problems == ()
    config = builtin.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rms_eps, config.rope_theta, config.max_position, config.vocab_size) == (1e-5, 1e5, 8192, 49152)


def test_ends_and_template_are_the_files_own(builtin: Checkpoint) -> None:
    tokenizer = builtin.tokenizer()
    assert [tokenizer.id_to_token(token) for token in builtin.eos_token_ids] == ["<|im_end|>"]
    assert builtin.bos_token_id is not None
    assert tokenizer.id_to_token(builtin.bos_token_id) == "<|im_start|>"
    assert not builtin.add_bos
    assert "add_generation_prompt" in builtin.chat_template


@pytest.mark.parametrize("case", CASES["transformers"], ids=lambda case: repr(case["text"])[:30])
def test_tokens_equal_transformers(builtin: Checkpoint, case: dict[str, object]) -> None:
    assert_tokens(builtin, case)


@pytest.mark.parametrize("case", CASES["digits_alone"], ids=lambda case: repr(case["text"])[:30])
def test_each_digit_is_split_off_before_the_spaces_are(builtin: Checkpoint, case: dict[str, object]) -> None:
    assert_tokens(builtin, case)
    tokenizer = builtin.tokenizer()
    pieces = ["".join(run) for _, run in groupby(str(case["text"]), key=lambda char: char if char.isnumeric() else "")]
    assert [token for piece in pieces for token in tokenizer.encode(piece).ids] == case["ids"]


def assert_tokens(builtin: Checkpoint, case: dict[str, object]) -> None:
    tokenizer = builtin.tokenizer()
    assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_special_tokens_stay_whole_and_can_be_left_out(builtin: Checkpoint) -> None:
    tokenizer = builtin.tokenizer()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
