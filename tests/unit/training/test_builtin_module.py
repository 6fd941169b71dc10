"""The module that ships: its gate, and its acceptance on prompts written for this test (the card has Spec-Bench's)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import seqmtp_serve.builtin
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.training.acceptance import measure, total
from seqmtp_serve.training.benchmark_text import own_replies
from seqmtp_serve.training.chat import USER_OPENS, encoder
from seqmtp_serve.training.commands import frozen_parts, module_of_part
from seqmtp_serve.training.target import FrozenTarget
from seqmtp_serve.training.texts import read_texts, with_rows

PROMPTS = (
    "Why do leaves change colour in autumn?",
    "A baker sells 12 loaves at 3 dollars each and 7 cakes at 9 dollars each. How much money does she take?",
    "Write a short story about a lamp that could not sleep.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the largest number of a list.",
    "Give me five tips for learning to swim.",
)


@pytest.fixture(scope="module")
def builtin() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


@pytest.mark.covers(7, 61, 62, 63)
def test_it_passes_both_gates_and_is_small(builtin: Checkpoint) -> None:
    assert builtin.gates(deep=True).mtp.problems == ()
    folder = Path(seqmtp_serve.builtin.__file__).parent / "smollm2-135m-mtp"
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    assert "fit train" in (folder / "MODEL_CARD.md").read_text()


@pytest.mark.covers(54, 93, 95, 157)
def test_its_greedy_acceptance_has_not_been_lost(builtin: Checkpoint, tmp_path: Path) -> None:
    documents = own_replies(builtin, PROMPTS, tmp_path / "replies.safetensors", max_reply=80)
    module, draft_ids = module_of_part(builtin)
    result = total(measure(module, documents, frozen_parts(builtin, draft_ids, torch.float32), draft_ids))
    assert result.num_rounds > 100
    assert result.by_position[0] >= 0.40
    assert result.expected_progress >= 1.55


@pytest.mark.covers(54)
def test_texts_of_its_last_fit_are_kept_and_the_target_writes_them(builtin: Checkpoint) -> None:
    """Greedy replies are what a pass over them chooses, up to near ties: batches round differently."""
    (path,) = (Path(seqmtp_serve.builtin.__file__).parent / "smollm2-135m-mtp" / "texts").glob("*.safetensors")
    texts = read_texts(path)
    opening = encoder(builtin)(USER_OPENS)
    assert sum(len(text.tokens) for text in texts) > 400_000
    assert all(text.tokens[: len(opening)].tolist() == opening for text in texts)
    greedy = [text for text in texts if text.greedy and len(text.tokens) < 200][::60]
    target = FrozenTarget(builtin.dense_config, builtin.target_tensors(), numerics="rotated")
    num_rows = num_equal = 0
    for document in with_rows(greedy, target, torch.float32):
        first = document.prompt_len - 1
        chosen = target.logits(document.hidden[first:-1]).argmax(-1)
        num_rows += len(chosen)
        num_equal += int((chosen == document.tokens[first + 1 :]).sum())
    assert num_rows > 200
    assert num_equal / num_rows > 0.97
