"""Many continuations at once are those of one whole pass a token, and the chains drafted on them a server's."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3

from seqmtp_serve.errors import TrainingError
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.acceptance import best
from seqmtp_serve.training.joint.continuations import EOS, best_next, continued, kept_len, plain_reply
from seqmtp_serve.training.joint.self_fed import drafted, next_token, plainly_drafted
from seqmtp_serve.training.packing import compile_stream, main_tensors, pack
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.v3.chained import ChainedLayer
from seqmtp_serve.training.v3.model import V3Model

PROMPTS = random_documents([7, 7, 7], seed=4)
REPLY = 12


@pytest.fixture(scope="module")
def model() -> V3Model:
    return tiny_v3(mtp=MtpConfig(fed_hidden="post", recycled_hidden="post")).eval()


@pytest.mark.covers(54)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replies_together_are_the_plain_ones(model: V3Model, temperature: float) -> None:
    """Seeded ones too: the noise of a token is keyed by its position and choice."""
    found = continued(model, PROMPTS, next_token(temperature, 5, [0, 1, 2]), reply_len=REPLY, stop_loops=False)
    for choice, (prompt, (tokens, states)) in enumerate(zip(PROMPTS, found, strict=True)):
        with torch.no_grad():
            plain = plain_reply(model, prompt, next_token(temperature, 5, [choice]), REPLY)
            expected = model.main_states(main_tensors(pack([tokens.tolist()])))
        assert tokens.tolist() == [*prompt, *plain[: kept_len(plain, stop_loops=False)]]
        torch.testing.assert_close(states[:-1], expected[:-1], rtol=1e-4, atol=1e-4)
    if temperature:
        other = continued(model, PROMPTS, next_token(temperature, 6, [0, 1, 2]), reply_len=REPLY, stop_loops=False)
        assert [tokens.tolist() for tokens, _ in other] != [tokens.tolist() for tokens, _ in found]


def test_a_reply_ends_with_its_end_token_or_where_it_only_repeats_itself() -> None:
    assert kept_len([5, 6, EOS, 7], stop_loops=False) == 3
    assert kept_len([5, 6, 7], stop_loops=True) == 3
    assert kept_len(list(range(2, 22)) + [3, 4] * 80, stop_loops=False) == 180
    assert kept_len(list(range(2, 22)) + [3, 4] * 80, stop_loops=True) == 20 + 96


@pytest.mark.covers(15, 16, 18, 21, 92, 93)
@pytest.mark.parametrize("hidden", ["pre", "post"])
@torch.no_grad()
def test_chains_in_bulk_are_the_plain_references(hidden: Literal["pre", "post"]) -> None:
    model = tiny_v3(mtp=MtpConfig(fed_hidden=hidden, recycled_hidden=hidden), seed=8).eval()
    for tokens, states in continued(model, PROMPTS, best_next, reply_len=REPLY, stop_loops=False):
        document = Document(tokens=tokens, hidden=states, prompt_len=len(PROMPTS[0]), greedy=True)
        assert drafted(model, document, 4, best) == plainly_drafted(model, document, 4)


@pytest.mark.covers(17, 24, 26)
@torch.no_grad()
def test_a_first_step_is_what_joint_training_computes(model: V3Model) -> None:
    """Every base but the last, whose next token nobody knows; only some are wanted."""
    (text,) = random_documents([11], seed=2)
    stream = compile_stream(pack([text]), 1)
    states = model.main_states(stream.main)
    expected = model.mtp_states(1, states, stream.depths[0])
    wanted = torch.tensor([[1, 4, 9]])
    embed = model.model.embed_tokens.weight[torch.tensor(text[1:])]
    found, _ = ChainedLayer(model).first_step(states[None, :-1], embed[None], wanted)
    torch.testing.assert_close(found[0], expected[wanted[0]], rtol=1e-4, atol=1e-4)


def test_a_chained_layer_holds_the_layer_and_nothing_else(model: V3Model) -> None:
    own = dict(ChainedLayer(model).named_parameters())
    prefix = f"model.layers.{CONFIG.num_layers}."
    shared = ("embed_tokens", "shared_head")
    expected = {
        name.removeprefix(prefix): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(shared)
    }
    assert own.keys() == expected.keys()
    assert all(own[name] is parameter for name, parameter in expected.items())
    with pytest.raises(TrainingError, match="one MTP module"):
        ChainedLayer(tiny_v3(2))
