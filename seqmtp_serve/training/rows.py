"""Which rows an MTP module of depth k computes on a packed stream, and which of them have a label. No torch.

Zero-based, half-open indices. A row of base i at depth k joins the depth k-1 state of i with the token at i+k and is
asked for the token at i+k+1 (DeepSeek-V3 report, arXiv 2412.19437, equations 21 to 25, there one-based).

Two supports, compiled in this order. *State*: every index i..i+k is a real token of one document occurrence; the row
exists and may be attended to. *Supervised*: i+k+1 is one too; the row has a label. A row without a label is kept:
it is context for later rows and the predecessor of deeper ones.

A base is an address in the packed stream; `previous_depth_row` is a physical row of the tensor one depth up. They are
equal only until the first row is dropped, so every depth carries its `state_bases` beside its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpRow:
    """One row of one depth. All indices but `previous_depth_row` are addresses in the packed stream."""

    base: int
    previous_depth_row: int
    shifted_token_index: int
    label_index: int | None  # None: no label in this document
    segment: int

    @property
    def loss_valid(self) -> bool:
        return self.label_index is not None

    @property
    def position(self) -> int:
        """Where to look up the semantic position: `position_ids[row.position]`."""
        return self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class MainRow:
    """One row of the main model: it reads the token at `base` and is asked for the next one."""

    base: int
    label_index: int | None
    segment: int


def compile_mtp_rows(
    tokens: Sequence[int],
    segment_ids: Sequence[int],
    valid: Sequence[bool],
    depth: int,
    previous_bases: Sequence[int],
) -> list[MtpRow]:
    """The rows of `depth`, by rising base.

    `previous_bases[j]` is the base of physical row j one depth up (depth 1: of the main model's rows), in any order.
    A segment id names one occurrence of a document; `valid` is False for padding. Masks that only drop losses do not
    belong here: they must not drop state.

    Raises ValueError for inputs of unequal length, a depth that is no positive int, a previous base that is no int in
    range or is there twice, and for a row whose predecessor is missing (no other row may stand in for it).
    """
    _check_stream(tokens, segment_ids, valid)
    if type(depth) is not int or depth < 1:
        raise ValueError("depth must be positive")
    previous_row = _row_of_base(previous_bases, len(tokens))
    rows = []
    for base in range(len(tokens) - depth):
        shifted = base + depth
        if not _one_occurrence(segment_ids, valid, base, shifted):
            continue
        if base not in previous_row:
            raise ValueError("required predecessor state is missing")
        rows.append(
            MtpRow(
                base=base,
                previous_depth_row=previous_row[base],
                shifted_token_index=shifted,
                label_index=_label(segment_ids, valid, shifted),
                segment=segment_ids[base],
            )
        )
    return rows


def compile_main_rows(tokens: Sequence[int], segment_ids: Sequence[int], valid: Sequence[bool]) -> list[MainRow]:
    """The rows of the main model: every real token. Padding is neither computed nor attended to."""
    _check_stream(tokens, segment_ids, valid)
    return [
        MainRow(base=base, label_index=_label(segment_ids, valid, base), segment=segment_ids[base])
        for base in range(len(tokens))
        if valid[base]
    ]


def state_bases(rows: Sequence[MtpRow] | Sequence[MainRow]) -> list[int]:
    """The identities of a depth's rows: the next depth's `previous_bases`."""
    return [row.base for row in rows]


def num_labels(sequence_len: int, depths: int) -> list[int]:
    """Labels of depths 1..`depths` for one unpadded sequence: max(T - k - 1, 0) each, never negative."""
    return [max(sequence_len - k - 1, 0) for k in range(1, depths + 1)]


def _check_stream(tokens: Sequence[int], segment_ids: Sequence[int], valid: Sequence[bool]) -> None:
    if len(segment_ids) != len(tokens) or len(valid) != len(tokens):
        raise ValueError("unaligned packed inputs")


def _row_of_base(previous_bases: Sequence[int], num_tokens: int) -> dict[int, int]:
    if any(type(base) is not int or not 0 <= base < num_tokens for base in previous_bases):
        raise ValueError("invalid previous base")
    previous_row = {base: row for row, base in enumerate(previous_bases)}
    if len(previous_row) != len(previous_bases):
        raise ValueError("duplicate previous base")
    return previous_row


def _one_occurrence(segment_ids: Sequence[int], valid: Sequence[bool], first: int, last: int) -> bool:
    return all(valid[j] and segment_ids[j] == segment_ids[first] for j in range(first, last + 1))


def _label(segment_ids: Sequence[int], valid: Sequence[bool], last_input: int) -> int | None:
    label = last_input + 1
    if label < len(segment_ids) and valid[label] and segment_ids[label] == segment_ids[last_input]:
        return label
    return None
