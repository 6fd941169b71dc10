"""Documents packed into one stream, and compiled rows as the tensors a module gathers with.

Three things a row must keep through any layout: its identity (`bases`), its semantic position (`positions_N`, looked
up in the stream, never the row number) and what it may see (`spans`: rows of one document occurrence stand together,
by rising base, and a row sees those before it in its span). `visible` is the same rule as a dense mask: the oracle.

Shapes: N rows of a depth, M of them with a counted label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.training.rows import MainRow, MtpRow, compile_main_rows, compile_mtp_rows, state_bases


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStream:
    """One packed row axis. `counted[j]` False drops the loss whose label is j, and nothing else."""

    tokens: tuple[int, ...]
    segment_ids: tuple[int, ...]
    valid: tuple[bool, ...]
    position_ids: tuple[int, ...]
    counted: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def occurrences(self) -> list[int]:
        """Index of the run of equal segment ids each token belongs to: an id met again later is another run."""
        runs: list[int] = []
        for at, segment in enumerate(self.segment_ids):
            fresh = at == 0 or segment != self.segment_ids[at - 1]
            runs.append(runs[-1] + fresh if runs else 0)
        return runs


def pack(
    documents: Sequence[Sequence[int]], *, length: int | None = None, counted: Sequence[Sequence[bool]] | None = None
) -> PackedStream:
    """Documents one after the other, positions from zero in each, padded with token 0 to `length`.

    The padding is a segment of its own, invalid throughout. Raises ValueError when the documents exceed `length`.
    """
    num_tokens = sum(map(len, documents))
    length = num_tokens if length is None else length
    if num_tokens > length:
        raise ValueError(f"{num_tokens} tokens do not fit a stream of {length}")
    padding = length - num_tokens
    masks = [[True] * len(document) for document in documents] if counted is None else counted
    return PackedStream(
        tokens=(*(token for document in documents for token in document), *(0,) * padding),
        segment_ids=(
            *(segment for segment, document in enumerate(documents) for _ in document),
            *(len(documents),) * padding,
        ),
        valid=(True,) * num_tokens + (False,) * padding,
        position_ids=(*(position for document in documents for position in range(len(document))), *range(padding)),
        counted=(*(flag for mask in masks for flag in mask), *(False,) * padding),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """The rows of one depth, ready to gather. `tokens_N` are the tokens the rows read: at depth k those at base + k."""

    bases: list[int]
    spans: tuple[tuple[int, int], ...]  # [start, stop) rows of each document occurrence
    previous_N: Tensor
    tokens_N: Tensor
    positions_N: Tensor
    loss_rows_M: Tensor
    labels_M: Tensor


def main_tensors(stream: PackedStream) -> RowTensors:
    """The main model's rows (depth 0); `previous_N` counts them."""
    rows = compile_main_rows(stream.tokens, stream.segment_ids, stream.valid)
    bases = state_bases(rows)
    return _tensors(stream, rows, previous=range(len(rows)), read=bases)


def mtp_tensors(stream: PackedStream, depth: int, previous_bases: Sequence[int]) -> RowTensors:
    """The rows of `depth` against the rows of the depth before, whose identities are `previous_bases`."""
    rows = compile_mtp_rows(stream.tokens, stream.segment_ids, stream.valid, depth, previous_bases)
    return _tensors(
        stream,
        rows,
        previous=[row.previous_depth_row for row in rows],
        read=[row.shifted_token_index for row in rows],
    )


def visible(stream: PackedStream, bases: Sequence[int]) -> Tensor:
    """Which row (second index) each row (first index) may attend to: `[N, N]` bool, itself included."""
    runs = stream.occurrences
    run_N = torch.tensor([runs[base] for base in bases], dtype=torch.long)
    base_N = torch.tensor(list(bases), dtype=torch.long)
    return (run_N[:, None] == run_N) & (base_N[:, None] >= base_N)


def _tensors(
    stream: PackedStream, rows: Sequence[MtpRow] | Sequence[MainRow], *, previous: Sequence[int], read: Sequence[int]
) -> RowTensors:
    label_indices: list[int | None] = [row.label_index for row in rows]
    labelled = [(at, label) for at, label in enumerate(label_indices) if label is not None]
    counted = [(at, label) for at, label in labelled if stream.counted[label]]
    bases, runs = [row.base for row in rows], stream.occurrences
    return RowTensors(
        bases=bases,
        spans=_spans([runs[base] for base in bases]),
        previous_N=torch.tensor(list(previous), dtype=torch.long),
        tokens_N=torch.tensor([stream.tokens[index] for index in read], dtype=torch.long),
        positions_N=torch.tensor([stream.position_ids[base] for base in bases], dtype=torch.long),
        loss_rows_M=torch.tensor([at for at, _ in counted], dtype=torch.long),
        labels_M=torch.tensor([stream.tokens[label] for _, label in counted], dtype=torch.long),
    )


def _spans(runs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    starts = [at for at in range(len(runs)) if at == 0 or runs[at] != runs[at - 1]]
    return tuple(zip(starts, [*starts[1:], len(runs)], strict=True)) if starts else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStream:
    """The rows of the main model and of depths 1..D. `length` is the stream's, padding included: the paper's T."""

    main: RowTensors
    depths: tuple[RowTensors, ...]
    length: int


def compile_stream(stream: PackedStream, depths: int) -> CompiledStream:
    """Every depth's rows, each against the identities of the depth before."""
    main = main_tensors(stream)
    found, bases = [], main.bases
    for depth in range(1, depths + 1):
        found.append(mtp_tensors(stream, depth, bases))
        bases = found[-1].bases
    return CompiledStream(main=main, depths=tuple(found), length=len(stream))
