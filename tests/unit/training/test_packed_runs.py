"""A packed run is the separate runs: bit for bit in `invariant`, and no row sees another document."""

from __future__ import annotations

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3
from torch import Tensor

from seqmtp_serve.training.packing import PackedStream, RowTensors, main_tensors, mtp_tensors, pack, visible
from seqmtp_serve.training.v3.attention import attend_masked, attend_within
from seqmtp_serve.training.v3.model import V3Model
from seqmtp_serve.training.v3.products import FAST, INVARIANT


def run(model: V3Model, stream: PackedStream, depths: int = 2) -> list[tuple[RowTensors, Tensor, Tensor]]:
    """Rows, states and logits of the main model and each depth."""
    rows = main_tensors(stream)
    state = model.main_states(rows)
    found = [(rows, state, model.logits(state))]
    for depth in range(1, depths + 1):
        rows = mtp_tensors(stream, depth, rows.bases)
        state = model.mtp_states(depth, state, rows)
        found.append((rows, state, model.logits(state, depth)))
    return found


LENGTHS = [7, 3, 1, 11, 2, 7]


@pytest.mark.covers(31, 35, 116, 142)
@torch.no_grad()
def test_packed_is_separate_bit_for_bit_when_invariant() -> None:
    model = tiny_v3(2, arithmetic=INVARIANT).eval()
    documents = random_documents(LENGTHS)
    packed = run(model, pack(documents, length=40))
    alone = [run(model, pack([document])) for document in documents]
    for depth, (rows, states, logits) in enumerate(packed):
        assert len(rows.bases) == sum(len(one[depth][0].bases) for one in alone)
        assert torch.equal(states, torch.cat([one[depth][1] for one in alone]))
        assert torch.equal(logits, torch.cat([one[depth][2] for one in alone]))
        assert torch.equal(rows.labels_M, torch.cat([one[depth][0].labels_M for one in alone]))


@pytest.mark.covers(31)
@torch.no_grad()
def test_the_order_of_packing_does_not_change_a_document_when_invariant() -> None:
    model = tiny_v3(1, arithmetic=INVARIANT).eval()
    documents = random_documents(LENGTHS)
    forward, backward = run(model, pack(documents), 1), run(model, pack(documents[::-1]), 1)
    for (rows, states, _), (_, mirrored, _) in zip(forward, backward, strict=True):
        spans = [stop - start for start, stop in rows.spans]
        flipped = torch.cat(list(mirrored.split(spans[::-1]))[::-1])
        assert torch.equal(states, flipped)


@pytest.mark.covers(31)
@torch.no_grad()
def test_fast_is_invariant_up_to_rounding() -> None:
    stream = pack(random_documents(LENGTHS))
    fast, invariant = (run(tiny_v3(2, arithmetic=n).eval(), stream) for n in (FAST, INVARIANT))
    for (_, states, logits), (_, same, same_logits) in zip(fast, invariant, strict=True):
        torch.testing.assert_close(states, same, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, same_logits, rtol=1e-4, atol=1e-5)


def attention_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 2, 6), torch.randn(rows, 2, 6), torch.randn(rows, 2, 4)


STREAMS = {
    "two segments": pack(random_documents([4, 4])),
    "a hole": PackedStream(
        tokens=tuple(range(8)),
        segment_ids=(0,) * 8,
        valid=(True, True, True, False, True, True, True, True),
        position_ids=tuple(range(8)),
        counted=(True,) * 8,
    ),
    "an id used again": PackedStream(
        tokens=tuple(range(6)),
        segment_ids=(0, 0, 1, 1, 0, 0),
        valid=(True,) * 6,
        position_ids=(0, 1, 0, 1, 0, 1),
        counted=(True,) * 6,
    ),
    "padding": pack(random_documents([3, 2]), length=9),
}


@pytest.mark.covers(31, 35, 116)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("together", [True, False])
def test_attention_within_spans_is_attention_under_the_mask(name: str, together: bool) -> None:
    stream = STREAMS[name]
    rows = main_tensors(stream)
    for depth in range(3):
        rows = mtp_tensors(stream, depth, rows.bases) if depth else rows
        if not rows.bases:
            continue
        q, k, v = attention_inputs(len(rows.bases))
        spanned = attend_within(q, k, v, rows.spans, 0.4, together=together)
        masked = attend_masked(q, k, v, visible(stream, rows.bases), 0.4)
        torch.testing.assert_close(spanned, masked)


@pytest.mark.covers(31, 116)
def test_the_mask_is_segment_causal() -> None:
    seen = visible(STREAMS["an id used again"], range(6))
    assert seen.tolist() == [[j <= i and i // 2 == j // 2 for j in range(6)] for i in range(6)]
    hole = visible(STREAMS["a hole"], [0, 1, 2, 4])
    assert hole.tolist() == [[j <= i for j in range(4)] for i in range(4)]


@pytest.mark.covers(116)
@torch.no_grad()
def test_attention_without_the_segment_rule_is_seen() -> None:
    """The fault: rows are chosen by segment, but attention is causal over the whole stream."""
    model = tiny_v3(1).eval()
    documents = random_documents([6, 6])
    stream = pack(documents)
    rows = main_tensors(stream)
    leaking = RowTensors(
        bases=rows.bases,
        spans=((0, len(rows.bases)),),
        previous_N=rows.previous_N,
        tokens_N=rows.tokens_N,
        positions_N=rows.positions_N,
        loss_rows_M=rows.loss_rows_M,
        labels_M=rows.labels_M,
    )
    alone = model.main_states(main_tensors(pack(documents[1:])))
    torch.testing.assert_close(model.main_states(rows)[6:], alone, rtol=1e-4, atol=1e-5)
    assert (model.main_states(leaking)[6:] - alone).abs().max() > 1e-2


@pytest.mark.covers(34, 117)
def test_positions_are_looked_up_by_base() -> None:
    stream = pack(random_documents([4, 4]))
    one = mtp_tensors(stream, 1, main_tensors(stream).bases)
    two = mtp_tensors(stream, 2, one.bases)
    assert one.positions_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert two.positions_N.tolist() == [0, 1, 0, 1]
    assert two.previous_N.tolist() == [0, 1, 3, 4]
    assert two.spans == ((0, 2), (2, 4))


@pytest.mark.covers(33)
@torch.no_grad()
def test_a_loss_mask_drops_a_loss_and_nothing_else() -> None:
    document = list(range(6))
    plain = pack([document])
    masked = pack([document], counted=[[True, True, True, False, True, True]])
    model = tiny_v3(2).eval()
    for (rows, states, _), (fewer, same, _) in zip(run(model, plain), run(model, masked), strict=True):
        assert fewer.bases == rows.bases
        assert torch.equal(states, same)
        assert [x for x in rows.labels_M.tolist() if x != 3] == fewer.labels_M.tolist()
    assert mtp_tensors(masked, 1, range(6)).bases == [0, 1, 2, 3, 4]


@pytest.mark.covers(22, 167)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_row() -> None:
    model = tiny_v3(2, arithmetic=INVARIANT).eval()
    document = random_documents([9])[0]
    before = run(model, pack([document]))
    for changed in range(1, 9):
        other = list(document)
        other[changed] = (other[changed] + 1) % CONFIG.vocab_size
        for depth, (rows, states, _) in enumerate(run(model, pack([other]))):
            same = [row for row, base in enumerate(rows.bases) if base + depth < changed]
            assert torch.equal(states[same], before[depth][1][same])
            touched = [row for row, base in enumerate(rows.bases) if base + depth == changed]
            assert not torch.equal(states[touched], before[depth][1][touched]) or not touched


@pytest.mark.covers(21)
@torch.no_grad()
def test_depth_two_reads_depth_one_and_not_the_trunk() -> None:
    model = tiny_v3(2).eval()
    stream = pack(random_documents([6]))
    main = main_tensors(stream)
    one = mtp_tensors(stream, 1, main.bases)
    two = mtp_tensors(stream, 2, one.bases)
    h0 = model.main_states(main)
    h1 = model.mtp_states(1, h0, one)
    h2 = model.mtp_states(2, h1, two)
    h0.add_(1.0)  # too late to matter
    assert torch.equal(model.mtp_states(2, h1, two), h2)
    assert not torch.equal(model.mtp_states(2, h1 + 1.0, two), h2)


@pytest.mark.covers(28)
def test_documents_longer_than_the_stream_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens do not fit a stream of 6"):
        pack([[1, 2, 3], [4, 5, 6, 7]], length=6)
