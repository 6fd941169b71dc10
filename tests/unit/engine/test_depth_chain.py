"""Drafting with several modules: the chain of training and the recurrent rollout, against the plain reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engines import config, request

from seqmtp_serve import oracle
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.mtp import MtpModule
from seqmtp_serve.model.mtp_families import FAMILIES
from seqmtp_serve.model.synthetic import TINY, TINY_V3, mtp_tensors, target_tensors
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref

LEN = 34
FAMILY = {"deepseek": TINY_V3, "llama": TINY}
TARGETS = {name: target_tensors(model) for name, model in FAMILY.items()}
MODULES = {
    name: mtp_tensors(TARGETS[name], model, num_modules=3, noise=1.0, draft_vocab_size=80)
    for name, model in FAMILY.items()
}
RELEASED = replace(FAMILIES["deepseek_v3"].contract, num_modules=2, rollout="chain")


class Feeding:
    """One sequence whose rows are fed in pieces."""

    def __init__(self, name: str, mtp: MtpConfig, *, max_depth: int = 5) -> None:
        self.model: LlamaConfig | DeepseekConfig = FAMILY[name]
        self.mtp, self.tensors = mtp, MODULES[name]
        self.engine = ProposerEngine(config(max_depth=max_depth), self.model, mtp, self.tensors)
        self.ids = torch.randint(96, (LEN + 1,), generator=torch.Generator().manual_seed(3)).tolist()
        self.hidden = oracle.forward(TARGETS[name], self.model, self.ids)[1]
        self.stop = self.version = 0

    def feed(self, num_rows: int, depth: int = 5) -> tuple[int, ...]:
        start, self.stop, self.version = self.stop, self.stop + num_rows, self.version + 1
        rows = FeedRows(
            ref=Ref(request_id="r0", epoch=1, version=self.version, digest=b""),
            first_base=start,
            hidden=self.hidden[start : self.stop],
            next_ids=tuple(self.ids[start + 1 : self.stop + 1]),
            depth=depth,
            reset=start == 0,
            request=request() if start == 0 else None,
        )
        answers = self.engine.propose([rows])
        self.engine.check()
        assert all(isinstance(answer, Draft) for answer in answers)
        return answers[0].tokens if answers else ()

    def expected(self, depth: int = 5) -> tuple[int, ...]:
        known, hidden = self.ids[: self.stop + 1], self.hidden[: self.stop]
        return tuple(oracle.draft_greedily(self.tensors, self.model, self.mtp, known, hidden, depth))


def contract(name: str, modules: int, rollout: str) -> MtpConfig:
    base = RELEASED if name == "deepseek" else MtpConfig()
    return replace(base, num_modules=modules, rollout=rollout)  # type: ignore[arg-type]


@pytest.mark.covers(84, 92, 93, 94, 97, 98)
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("rollout", ["chain", "recurrent"])
@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.parametrize("cuts", [[30], [1, 1, 1, 2, 5, 1, 3, 1], [2, 9, 1, 4, 2]], ids=str)
def test_drafts_are_the_references(name: str, rollout: str, modules: int, cuts: Sequence[int]) -> None:
    """Whatever was drafted in between: rows that consumed drafts are computed again from true tokens."""
    feeding = Feeding(name, contract(name, modules, rollout))
    for num_rows in cuts:
        drafts = feeding.feed(num_rows)
        assert drafts == feeding.expected()
        assert len(drafts) == (min(5, modules) if rollout == "chain" else 5)


@pytest.mark.covers(139)
@pytest.mark.parametrize("modules", [1, 2])
def test_a_chunk_that_ends_with_the_wrong_token_shows(modules: int) -> None:
    """The shipped bug of several runtimes: the row at a chunk's end is given the token that was sampled, not the next
    one of the prompt. No text changes, only the drafts do."""
    right, wrong = (Feeding("deepseek", contract("deepseek", modules, "recurrent")) for _ in range(2))
    true = wrong.ids[16]
    wrong.ids[16] = (true + 1) % 96
    right.feed(16, depth=0)
    wrong.feed(16, depth=0)
    wrong.ids[16] = true
    pairs = [(right.feed(1), wrong.feed(1), right.expected()) for _ in range(16)]
    assert all(drafts == expected for drafts, _, expected in pairs)
    assert any(drafts != expected for _, drafts, expected in pairs)


@pytest.mark.covers(93, 132)
def test_a_recurrent_rollout_is_not_a_chain() -> None:
    """One module drafts one token in a chain, however many are asked for; and two modules draft another second token
    than one module twice."""
    chain, recurrent = (Feeding("deepseek", contract("deepseek", 1, rollout)) for rollout in ("chain", "recurrent"))
    two = Feeding("deepseek", contract("deepseek", 2, "chain"))
    seconds = set()
    for _ in range(12):
        one_draft, drafts, pair = chain.feed(2), recurrent.feed(2), two.feed(2)
        assert one_draft == drafts[:1] == pair[:1]
        assert len(drafts) == 5
        assert len(pair) == 2
        seconds.add(drafts[1] == pair[1])
    assert False in seconds


@pytest.mark.covers(92)
def test_prompts_run_depth_after_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []
    forward = MtpModule.forward

    def spy(self: MtpModule, hidden: torch.Tensor, *args: object) -> torch.Tensor:
        ran.append((self.depth, len(hidden)))
        return forward(self, hidden, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MtpModule, "forward", spy)
    monkeypatch.setattr("seqmtp_serve.engine.depths.PASS_ROWS", 12)
    feeding = Feeding("deepseek", contract("deepseek", 3, "chain"))
    drafts = feeding.feed(20)
    assert ran == [(1, 12), (1, 8), (2, 12), (2, 7), (3, 12), (3, 6), (2, 1), (3, 2)]
    assert drafts == feeding.expected()


@pytest.mark.covers(97)
def test_rows_that_consumed_drafts_are_computed_again() -> None:
    """After one true token each depth computes one canonical row, over the slot of its own newest provisional one."""
    feeding = Feeding("deepseek", contract("deepseek", 3, "chain"))
    feeding.feed(10)
    cache, lease = feeding.engine._cache, feeding.engine._sequences["r0"].lease
    slots = cache.pool.slots(lease, 0, 14)
    before = cache.kv_LSE[:, slots].clone()
    feeding.feed(1, depth=0)
    changed = (cache.kv_LSE[:, slots] != before).any(-1)
    assert changed.nonzero().tolist() == [[0, 11], [1, 11], [2, 11]]
    provisional = [bool((before[depth, 11] != 0).any()) for depth in range(3)]
    assert provisional == [False, True, True]


def test_a_sequence_shorter_than_the_chain_drafts_all_the_same() -> None:
    feeding = Feeding("deepseek", contract("deepseek", 3, "chain"))
    assert feeding.feed(1) == feeding.expected()
    assert len(feeding.expected()) == 3
