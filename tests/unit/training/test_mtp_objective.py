"""The objective's numbers by hand: both denominators, empty depths, the schedule, and what a manifest says of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmtp_serve.training.loss_weight import DEEPSEEK_V3_SCHEDULE, DEEPSEEK_V3_TOKENS, LossWeightSchedule
from seqmtp_serve.training.mtp_objective import (
    Counts,
    EmptyDepth,
    ObjectiveContract,
    Reduction,
    Term,
    counts_of,
    denominators,
    mtp_loss,
    objective,
    term,
)
from seqmtp_serve.training.packing import CompiledStream, compile_stream, main_tensors, pack
from seqmtp_serve.training.ranks import Alone

PAPER = ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3),)))
VALID = replace(PAPER, reduction=Reduction.VALID_ROW_MEAN)
LN2 = math.log(2)


def two_segments(depths: int) -> CompiledStream:
    return compile_stream(pack([[1, 2, 3, 4], [5, 6, 7, 8]]), depths)


def loss(contract: ObjectiveContract, stream: CompiledStream, nll: list[list[float]], weight: float = 0.3) -> float:
    """The weighted MTP loss for given values of each counted row."""
    totals = counts_of([stream], Alone())
    assert [len(rows) for rows in nll] == list(totals.depths)
    return float(mtp_loss([torch.tensor(rows).sum() for rows in nll], totals, contract, weight))


def per_depth(contract: ObjectiveContract, stream: CompiledStream, nll: list[list[float]]) -> list[float]:
    by = denominators(counts_of([stream], Alone()), contract.reduction)
    return [sum(rows) / count if count else math.nan for rows, count in zip(nll, by, strict=True)]


@pytest.mark.covers(36, 37, 39, 119, 143)
def test_equal_losses_on_two_segments() -> None:
    stream, nll = two_segments(2), [[LN2] * 4, [LN2] * 2]
    assert per_depth(PAPER, stream, nll) == pytest.approx([0.3465735903, 0.1732867951], abs=1e-9)
    assert per_depth(VALID, stream, nll) == pytest.approx([0.6931471806, 0.6931471806], abs=1e-9)
    assert loss(PAPER, stream, nll, 1.0) == pytest.approx(0.2599301927, abs=1e-6)
    assert loss(PAPER, stream, nll, 0.3) == pytest.approx(0.0779790578, abs=1e-6)
    assert loss(PAPER, stream, nll, 0.1) == pytest.approx(0.0259930193, abs=1e-6)
    assert loss(VALID, stream, nll, 0.3) == pytest.approx(0.2079441542, abs=1e-6)


@pytest.mark.covers(36, 37, 98, 119, 143)
def test_unequal_losses_tell_the_two_forms_apart() -> None:
    stream, nll = two_segments(2), [[1.0, 2.0, 3.0, 4.0], [5.0, 7.0]]
    assert per_depth(PAPER, stream, nll) == [1.25, 1.5]
    assert per_depth(VALID, stream, nll) == [2.5, 6.0]
    assert loss(PAPER, stream, nll) == pytest.approx(0.4125)
    assert loss(VALID, stream, nll) == pytest.approx(1.275)


@pytest.mark.covers(36, 37)
def test_six_tokens_of_unit_loss() -> None:
    stream, nll = compile_stream(pack([list(range(6))]), 2), [[1.0] * 4, [1.0] * 3]
    assert per_depth(PAPER, stream, nll) == pytest.approx([0.6666667, 0.5], abs=1e-6)
    assert loss(PAPER, stream, nll) == pytest.approx(0.175)
    assert loss(VALID, stream, nll) == pytest.approx(0.3)


@pytest.mark.covers(37)
def test_the_forms_differ_by_rows_over_length() -> None:
    stream, nll = two_segments(2), [[0.3, 0.9, 2.0, 0.1], [4.0, 0.5]]
    totals = counts_of([stream], Alone())
    for paper, valid, rows in zip(
        per_depth(PAPER, stream, nll), per_depth(VALID, stream, nll), totals.depths, strict=True
    ):
        assert paper == pytest.approx(rows / totals.length * valid)


@pytest.mark.covers(38, 137, 143)
def test_an_empty_depth_keeps_its_place_unless_declared_otherwise() -> None:
    stream, nll = two_segments(3), [[LN2] * 4, [LN2] * 2, []]
    renormalised = replace(PAPER, empty_depth=EmptyDepth.RENORMALISED)
    assert loss(PAPER, stream, nll, 1.0) == pytest.approx(0.1732867951, abs=1e-6)
    assert loss(renormalised, stream, nll, 1.0) == pytest.approx(0.2599301927, abs=1e-6)
    assert math.isnan(per_depth(VALID, stream, nll)[2])  # undefined: it is never divided
    assert loss(VALID, stream, nll, 1.0) == pytest.approx(2 * LN2 / 3, abs=1e-6)
    nothing = compile_stream(pack([[1, 2]]), 2)
    assert loss(replace(VALID, empty_depth=EmptyDepth.RENORMALISED), nothing, [[], []]) == 0.0


@pytest.mark.covers(38, 56, 137)
@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_term_without_a_counted_row_is_a_zero_of_the_graph(num_rows: int) -> None:
    """No state rows at all, or rows none of which has a label: the gradient is exactly 0, and it is there."""
    stream = compile_stream(pack([[1, 2]]), 2)
    rows = stream.depths[1] if num_rows == 0 else stream.depths[0]
    logits = torch.randn(num_rows, 5, requires_grad=True)
    empty = term(logits, rows)
    assert empty.nll_sum.requires_grad
    (gradient,) = torch.autograd.grad(empty.nll_sum, logits)
    assert torch.equal(gradient, torch.zeros(num_rows, 5))


@pytest.mark.covers(45)
def test_the_main_loss_has_its_own_mask_and_denominator() -> None:
    stream = two_segments(1)
    totals = counts_of([stream], Alone())
    assert (totals.main, totals.depths, totals.length) == (6, (4,), 8)
    main, zero = Term(nll_sum=torch.tensor(12.0), hits=0), Term(nll_sum=torch.tensor(0.0), hits=0)
    assert float(objective(main, [zero], totals, PAPER, 0.3)) == 2.0
    masked = pack([[1, 2, 3]], counted=[[True, False, True]])
    assert main_tensors(masked).labels_M.tolist() == [3]


@pytest.mark.covers(44)
@pytest.mark.parametrize("stream", [compile_stream(pack([[]]), 1), compile_stream(pack([[1, 2, 3]]), 0)])
def test_no_token_or_no_depth_is_an_error(stream: CompiledStream) -> None:
    with pytest.raises(ValueError, match="at least one token and one depth"):
        counts_of([stream], Alone())


@pytest.mark.covers(40, 146)
def test_the_reported_schedule_and_its_boundary() -> None:
    assert DEEPSEEK_V3_SCHEDULE.at(0) == 0.3
    assert DEEPSEEK_V3_SCHEDULE.at(10**13 - 1) == 0.3
    assert DEEPSEEK_V3_SCHEDULE.at(10**13) == 0.1
    assert DEEPSEEK_V3_SCHEDULE.at(DEEPSEEK_V3_TOKENS - 1) == 0.1
    assert DEEPSEEK_V3_TOKENS - 10**13 == 48 * 10**11


@pytest.mark.covers(40)
@pytest.mark.parametrize("phases", [(), ((1, 0.3),), ((0, 0.3), (0, 0.1)), ((0, 0.3), (9, 0.2), (5, 0.1))])
def test_a_schedule_starts_at_zero_and_rises(phases: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="start at token 0 and rise"):
        LossWeightSchedule(phases=phases)


@pytest.mark.covers(40)
def test_a_schedule_is_declared_and_not_negative() -> None:
    with pytest.raises(TypeError):
        ObjectiveContract()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="never negative"):
        LossWeightSchedule(phases=((0, -0.1),))


@pytest.mark.covers(41, 51, 55, 143, 145, 146)
def test_the_record_names_what_was_minimised() -> None:
    paper, valid = PAPER.record(), VALID.record()
    assert paper["mtp_reduction"] == "paper_fixed_T"
    assert valid["mtp_reduction"] == "valid_row_mean"
    assert paper["mtp_denominator"] != valid["mtp_denominator"]
    assert paper["reduction_order"].startswith("numerators and denominators summed over streams and ranks")
    assert paper["loss_weight_phases"] == [[0, 0.3]]
    assert {paper["program"], replace(PAPER, detach_trunk=True).record()["program"]} == {
        "joint",
        "mtp_detached_from_trunk",
    }
    assert paper["teacher_forcing"] == "ground-truth shifted tokens"


def sliced_loss(hidden: Tensor, tokens: Tensor, depth: int) -> Tensor:
    """Trim first: rows [0, S-k-1) only, labels [k+1, S)."""
    rows = hidden[: len(tokens) - depth - 1]
    return torch.nn.functional.cross_entropy(rows, tokens[depth + 1 :], reduction="sum")


@pytest.mark.covers(23, 25)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_trimming_first_and_masking_later_give_one_loss(depth: int) -> None:
    """Rows as logits: states of S-k rows, the last without a label, against S-k-1 trimmed rows."""
    tokens = [3, 1, 4, 1, 5, 2, 6, 5]
    stream = compile_stream(pack([tokens]), depth)
    logits = torch.randn(len(tokens) - depth, 7)
    assert len(stream.depths[-1].bases) == len(tokens) - depth
    assert stream.depths[-1].tokens_N.tolist() == tokens[depth:]
    masked = term(logits, stream.depths[-1]).nll_sum
    torch.testing.assert_close(masked, sliced_loss(logits, torch.tensor(tokens), depth))


@pytest.mark.covers(119)
def test_a_valid_mean_under_the_papers_name_is_seen() -> None:
    """The fault: the log divides by rows and calls it the paper's loss. Numerator and denominators show it."""
    stream, nll = two_segments(2), [[1.0, 2.0, 3.0, 4.0], [5.0, 7.0]]
    totals = counts_of([stream], Alone())
    logged = {"form": "paper_fixed_T", "loss": 2.5, "nll_sum": 10.0}
    honest = logged["nll_sum"] / denominators(totals, Reduction(logged["form"]))[0]
    assert honest != logged["loss"]
    assert honest == per_depth(PAPER, stream, nll)[0]


@pytest.mark.covers(42, 118)
def test_a_mean_of_rank_means_is_another_number() -> None:
    totals = Counts(length=8, main=4, depths=(4,))
    ranks = [(3.0, 3), (5.0, 1)]
    shares = [mtp_loss([torch.tensor(nll)], totals, VALID, 1.0) for nll, _ in ranks]
    assert float(sum(shares)) == 2.0
    assert sum(nll / rows for nll, rows in ranks) / 2 == 3.0
