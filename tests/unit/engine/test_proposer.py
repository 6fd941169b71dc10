"""The proposer engine against the plain rollout, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import MTP, TARGET, config, proposer, request

from seqmtp_serve import oracle
from seqmtp_serve.engine.proposer import ProposerEngine, Refusal
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref


def tokens_and_hidden(length: int = 40, seed: int = 3) -> tuple[list[int], torch.Tensor]:
    ids = torch.randint(TINY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids, oracle.forward(TARGET, TINY, ids)[1]


def ref(version: int = 1, name: str = "r0", epoch: int = 1) -> Ref:
    return Ref(request_id=name, epoch=epoch, version=version, digest=bytes([version]) * 16)


def feed(
    ids: list[int], hidden: torch.Tensor, start: int, stop: int, *, depth: int = 3, version: int = 1, name: str = "r0"
) -> FeedRows:
    """Bases start .. stop - 1; the first feed opens the sequence."""
    return FeedRows(
        ref=ref(version, name),
        first_base=start,
        hidden=hidden[start:stop],
        next_ids=tuple(ids[start + 1 : stop + 1]),
        depth=depth,
        reset=start == 0,
        request=replace(request(), request_id=name) if start == 0 else None,
    )


def expected(ids: list[int], hidden: torch.Tensor, num_rows: int, depth: int = 3) -> tuple[int, ...]:
    chain = oracle.draft_greedily(MTP, TINY, MtpConfig(), ids[: num_rows + 1], hidden[:num_rows], depth)
    return tuple(chain)


@pytest.mark.covers(54, 93, 94)
@pytest.mark.parametrize("cuts", [[30], [1, 29], [10, 3, 1, 4, 2, 10]], ids=str)
def test_drafts_are_the_recurrent_rollout(cuts: list[int]) -> None:
    """Whatever was drafted in between: provisional rows are overwritten, never kept."""
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    start = 0
    for version, num_rows in enumerate(cuts, 1):
        stop = start + num_rows
        (draft,) = engine.propose([feed(ids, hidden, start, stop, version=version)])
        assert isinstance(draft, Draft)
        assert draft.ref == ref(version)
        assert draft.tokens == expected(ids, hidden, stop)
        assert draft.draft_probs == ()
        engine.check()
        start = stop


@pytest.mark.covers(31)
def test_feeds_of_many_sequences_share_a_pass() -> None:
    engine = proposer().engine
    texts = {f"r{index}": tokens_and_hidden(seed=index) for index in range(5)}
    lengths = {name: 5 + 6 * index for index, name in enumerate(texts)}
    feeds = [feed(*texts[name], 0, lengths[name], name=name, depth=index % 4) for index, name in enumerate(texts)]
    drafts = engine.propose(feeds)
    assert [draft.ref.request_id for draft in drafts] == ["r1", "r2", "r3"], "depth 0 asks for nothing"
    for index, draft in enumerate(drafts, 1):
        name = draft.ref.request_id
        assert draft.tokens == expected(*texts[name], lengths[name], depth=index)


def test_a_long_prompt_takes_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqmtp_serve.engine.depths.PASS_ROWS", 7)
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    chunks = [feed(ids, hidden, 0, 18, depth=0), feed(ids, hidden, 18, 39)]
    (draft,) = engine.propose(chunks)
    assert draft.tokens == expected(ids, hidden, 39)


def test_a_reset_in_the_middle_masks_what_is_missing() -> None:
    """Only the last rows were given: earlier ones do not exist for the drafts."""
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    late = replace(feed(ids, hidden, 10, 30), reset=True, request=request())
    (draft,) = engine.propose([late])
    with_all = expected(ids, hidden, 30)
    module = MtpConfig()
    rows = hidden[10:30]
    output = oracle.block(
        MTP,
        f"model.layers.{TINY.num_layers}.",
        TINY,
        _fused(rows, ids[11:31]),
        torch.arange(10, 30),
    )[-1]
    draft_ids = MTP[f"model.layers.{TINY.num_layers}.draft_token_ids"].long()
    best = draft_ids[oracle.logits(MTP, TINY, output[None])[0][draft_ids].argmax()]
    assert module.recycled_hidden == "pre"
    assert draft.tokens[0] == int(best)
    assert len(draft.tokens) == len(with_all) == 3


def _fused(hidden: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
    prefix = f"model.layers.{TINY.num_layers}."
    embedded = oracle.rms_norm(MTP["model.embed_tokens.weight"][next_ids], MTP[f"{prefix}enorm.weight"], TINY)
    normed = oracle.rms_norm(hidden, MTP[f"{prefix}hnorm.weight"], TINY)
    return torch.cat((embedded, normed), -1) @ MTP[f"{prefix}eh_proj.weight"].T


@pytest.mark.covers(86, 131)
@pytest.mark.parametrize(
    "change",
    [
        {"first_base": 11},
        {"first_base": 9},
        {"ref": ref(2, epoch=2)},
        {"ref": ref(0)},
        {"ref": ref(2, name="stranger")},
        {"hidden": torch.zeros(3, TINY.hidden_size)},
        {"next_ids": (TINY.vocab_size,)},
        {"next_ids": (), "hidden": torch.zeros(0, TINY.hidden_size)},
    ],
    ids=["gap", "overlap", "epoch", "version", "stranger", "shape", "token", "empty"],
)
def test_a_feed_that_does_not_follow_is_refused(change: dict[str, object]) -> None:
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    other, other_hidden = tokens_and_hidden(seed=8)
    engine.propose([feed(ids, hidden, 0, 10), feed(other, other_hidden, 0, 10, name="r9")])
    wrong = replace(feed(ids, hidden, 10, 11, version=2), **change)  # type: ignore[arg-type]
    draft, refusal = engine.propose([wrong, feed(other, other_hidden, 10, 12, version=2, name="r9")])
    assert isinstance(refusal, Refusal)
    assert (refusal.ref, refusal.code) == (wrong.ref, refusal.code)
    assert refusal.code in ("stale_version", "protocol_error")
    assert draft.tokens == expected(other, other_hidden, 12), "a neighbour must not notice"
    engine.check()


def test_a_refused_sequence_can_be_opened_anew() -> None:
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    engine.propose([feed(ids, hidden, 0, 10)])
    (refusal,) = engine.propose([feed(ids, hidden, 12, 13, version=2)])
    (again,) = engine.propose([feed(ids, hidden, 10, 11, version=2)])
    assert isinstance(refusal, Refusal)
    assert isinstance(again, Refusal), "a closed sequence stays closed"
    (draft,) = engine.propose([feed(ids, hidden, 0, 11, version=2)])
    assert draft.tokens == expected(ids, hidden, 11)


def test_out_of_pages_is_refused_and_closing_makes_room() -> None:
    engine = ProposerEngine(config(num_pages=5), TINY, MtpConfig(), MTP)
    ids, hidden = tokens_and_hidden()
    engine.propose([feed(ids, hidden, 0, 20)])
    (refusal,) = engine.propose([feed(ids, hidden, 0, 20, name="r1")])
    assert refusal.code == "overloaded"
    (draft,) = engine.propose([feed(ids, hidden, 0, 20, name="r1")], closed=["r0"])
    assert draft.tokens == expected(ids, hidden, 20)
    engine.propose([], closed=["r1", "unknown"])
    engine.check()
    assert engine._cache.pool.num_free == 5


def test_drafts_stop_at_the_end_of_the_context() -> None:
    engine = ProposerEngine(config(max_model_len=32), TINY, MtpConfig(), MTP)
    ids, hidden = tokens_and_hidden(33)
    (draft,) = engine.propose([feed(ids, hidden, 0, 30)])
    assert draft.tokens == expected(ids, hidden, 30, depth=2)
    (draft,) = engine.propose([feed(ids, hidden, 30, 32, version=2)])
    assert draft.tokens == ()


@pytest.mark.covers(70)
def test_sampled_drafts_declare_what_they_were_drawn_from() -> None:
    engine = proposer(draft_top_n=5).engine
    ids, hidden = tokens_and_hidden()
    sampled = replace(request(temperature=0.9, seed=3), request_id="r0")
    (draft,) = engine.propose([replace(feed(ids, hidden, 0, 20), request=sampled)])
    assert len(draft.tokens) == len(draft.draft_probs) == 3
    for token, pairs in zip(draft.tokens, draft.draft_probs, strict=True):
        assert len(pairs) <= 5
        assert dict(pairs)[token] > 0
        assert sum(prob for _, prob in pairs) == pytest.approx(1.0, abs=1e-12)


def test_rows_that_are_not_finite_close_their_sequence_only() -> None:
    engine = proposer().engine
    ids, hidden = tokens_and_hidden()
    broken = hidden.clone()
    broken[5] = float("nan")
    answers = engine.propose([feed(ids, broken, 0, 10), feed(ids, hidden, 0, 10, name="r1")])
    draft = next(each for each in answers if isinstance(each, Draft))
    refusal = next(each for each in answers if isinstance(each, Refusal))
    assert (draft.ref.request_id, draft.tokens) == ("r1", expected(ids, hidden, 10))
    assert (refusal.ref.request_id, refusal.code) == ("r0", "internal_error")
    engine.check()
    assert bool(torch.isfinite(engine._cache.kv_LSE).all())
