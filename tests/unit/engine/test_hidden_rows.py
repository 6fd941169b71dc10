"""Hidden rows that are rounded or left out on their way to the proposer: fewer bytes, other drafts, the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from driver import Driver, Stream
from engines import MTP, TARGET, config, proposer, request, seeded, target

from seqmtp_serve import oracle
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.hidden_rows import HiddenPolicy, num_bytes, pack, unpack
from seqmtp_serve.engine.proposer import ProposerEngine, Refusal
from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import FeedRows, StepPlan
from seqmtp_serve.request import Ref, Request


class Recording(DirectProposer):
    """Keeps what it was fed, and its drafts by version."""

    def __init__(self, engine: ProposerEngine) -> None:
        super().__init__(engine)
        self.fed: list[FeedRows] = []
        self.drafted: dict[int, tuple[int, ...]] = {}

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        self.fed += feeds
        super().feed(feeds, closed)
        self.drafted |= {draft.ref.version: draft.tokens for draft in self._drafts.values()}


def run(*requests: Request, chunk: int = 1000, **hidden: object) -> tuple[list[Stream], Recording]:
    link = Recording(ProposerEngine(config(), TINY, MtpConfig(), MTP))
    return Driver(target(link, **hidden), chunk=chunk).run(*requests), link


def rows(num_rows: int = 6) -> torch.Tensor:
    return 50 * torch.randn(num_rows, TINY.hidden_size, generator=torch.Generator().manual_seed(1))


def test_a_row_comes_back_as_near_as_its_form_allows() -> None:
    sent = rows()
    assert torch.equal(unpack(*pack(sent, "fp32")), sent)
    assert torch.equal(unpack(*pack(sent, "fp16")), sent.half().float())
    assert torch.equal(unpack(*pack(sent, "bf16")), sent.bfloat16().float())
    codes, scales = pack(sent, "int8")
    assert (unpack(codes, scales) - sent).abs().amax(1).le(sent.abs().amax(1) / 254 * 1.001).all()
    sizes = {form: num_bytes(*pack(sent, form)) for form in ("fp32", "fp16", "bf16", "int8")}  # type: ignore[arg-type]
    d = TINY.hidden_size
    assert sizes == {"fp32": 6 * d * 4, "fp16": 6 * d * 2, "bf16": 6 * d * 2, "int8": 6 * (d + 4)}


def test_rows_of_nothing_and_rows_beyond_the_range_survive() -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(unpack(*pack(zeros, "int8")), zeros)
    beyond = torch.tensor([[1e6, -1e6, 1.0]])
    assert unpack(*pack(beyond, "fp16")).isfinite().all()
    torch.testing.assert_close(unpack(*pack(beyond, "int8"))[0, :2], beyond[0, :2])


@pytest.mark.parametrize("form", ["fp16", "bf16", "int8"])
def test_text_is_the_same_in_every_form_and_fewer_bytes_travel(form: str) -> None:
    requests = [request(1), seeded(2)]
    exact, full = run(*requests)
    rounded, link = run(*requests, hidden_dtype=form)
    assert [one.output for one in rounded] == [one.output for one in exact]
    assert sum(row.accepted for one in rounded for row in one.rows) > 0
    sent = [sum(num_bytes(feed.hidden, feed.hidden_scales) for feed in each.fed) for each in (full, link)]
    assert sent[1] < 0.6 * sent[0]
    assert link.refusals == []


@pytest.mark.parametrize("chunk", [1000, 5], ids=["at once", "in chunks"])
def test_of_a_prompt_only_the_window_is_fed_and_then_every_row(chunk: int) -> None:
    one = request(4, prompt_len=28, max_tokens=40)  # a prompt of 40
    (whole,), _ = run(one)
    (stream,), link = run(one, chunk=chunk, hidden_window=12)
    assert stream.output == whole.output
    first, *later = link.fed
    assert (first.first_base, first.reset) == (28, True)
    assert not any(feed.reset for feed in later)
    ends = [feed.first_base + len(feed.next_ids) for feed in link.fed]
    assert [feed.first_base for feed in later] == ends[:-1], "without a gap"
    assert link.refusals == []


def test_drafts_in_a_window_are_those_of_a_module_that_sees_no_more() -> None:
    """The first drafts after a prompt; `test_proposer.py` shows that rows before the first fed one are masked."""
    one = request(4, prompt_len=28, max_tokens=6)
    (stream,), link = run(one, hidden_window=2)
    text = [*one.prompt_ids, stream.output[0]]
    feed = next(feed for feed in link.fed if feed.depth)
    hidden = oracle.forward(TARGET, TINY, text[:-1])[1][38:]
    torch.testing.assert_close(feed.hidden, hidden, rtol=1e-4, atol=1e-4)
    late = replace(feed, hidden=hidden, depth=3, request=one, reset=True)
    (draft,) = proposer().engine.propose([late])
    assert not isinstance(draft, Refusal)
    assert link.drafted[1] == draft.tokens


def test_a_proposer_that_was_replaced_is_given_the_window_of_the_text_so_far() -> None:
    one = request(4, prompt_len=28, max_tokens=60)
    link = Recording(ProposerEngine(config(), TINY, MtpConfig(), MTP))
    driver, stream = Driver(target(link, hidden_window=12)), Stream.open(one)
    while len(stream.output) < 30:
        driver.step([stream])
    link.fed.clear()
    link.replace(ProposerEngine(config(), TINY, MtpConfig(), MTP))
    driver.resume([stream])
    opening = next(feed for feed in link.fed if feed.reset)
    assert opening.first_base >= 40 + 29 - 12, "not where the prompt ended"
    assert len(opening.next_ids) == 12
    assert stream.output == run(one)[0][0].output
    assert link.refusals == []


def test_a_prompts_rows_are_on_their_way_while_the_next_chunk_is_computed() -> None:
    link = Recording(ProposerEngine(config(), TINY, MtpConfig(), MTP))
    driver, stream = Driver(target(link), chunk=10), Stream.open(request(4, prompt_len=28))
    fed = []
    for _ in range(3):
        driver.step([stream])
        fed.append(sum(len(feed.next_ids) for feed in link.fed))
    assert fed == [10, 20, 30], "with each chunk, before the prompt is done"
    assert not stream.output
    driver.target.step(StepPlan(step_id=0))


@pytest.mark.parametrize(
    ("hidden", "scales"),
    [
        (torch.zeros(2, TINY.hidden_size, dtype=torch.int8), None),
        (torch.zeros(2, TINY.hidden_size, dtype=torch.int8), torch.ones(3)),
        (torch.zeros(2, TINY.hidden_size, dtype=torch.int8), torch.ones(2, dtype=torch.float16)),
        (torch.zeros(2, TINY.hidden_size), torch.ones(2)),
        (torch.zeros(2, TINY.hidden_size, dtype=torch.float64), None),
    ],
    ids=["no scales", "too many", "of another type", "of rows that need none", "no form of ours"],
)
def test_a_form_that_contradicts_itself_is_refused(hidden: torch.Tensor, scales: torch.Tensor | None) -> None:
    with pytest.raises(ProtocolError):
        unpack(hidden, scales)
    ref = Ref(request_id="r0", epoch=1, version=1, digest=bytes(16))
    feed = FeedRows(
        ref=ref,
        first_base=0,
        hidden=hidden,
        hidden_scales=scales,
        next_ids=(1, 2),
        depth=1,
        reset=True,
        request=request(),
    )
    engine = proposer().engine
    (answer,) = engine.propose([feed])
    assert isinstance(answer, Refusal)
    assert answer.code == ProtocolError.code
    assert engine.num_sequences == 0


def test_where_a_window_begins() -> None:
    assert HiddenPolicy().first_base(100, 120) == 0
    window = HiddenPolicy(window=32)
    assert [window.first_base(prefix, known) for prefix, known in ((20, 5), (100, 0), (100, 99), (100, 140))] == [
        0, 68, 68, 108,
    ]  # fmt: skip
