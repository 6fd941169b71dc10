"""Checks of stored tensors: what the headers say, and what the values are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.block_scaled_source import is_block_scaled
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, BlockFormat
from seqmtp_serve.checkpoint.problem import Problem, ProblemKind
from seqmtp_serve.checkpoint.tensor_source import TensorSource, TensorSpec, all_finite
from seqmtp_serve.errors import CheckpointError

_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"})
Shapes = Mapping[str, tuple[int, ...]]


def header_problems(
    source: TensorSource, expected: Shapes, present: Set[str], optional: Shapes, blocks: BlockFormat | None
) -> Iterator[Problem]:
    """Names, shapes and dtypes. `optional` tensors may be absent; `present` ones that nobody expects are strangers."""
    for name, shape in {**expected, **optional}.items():
        spec = source.specs.get(name)
        if name in source.unreadable:
            yield Problem(kind=ProblemKind.UNREADABLE, subject=name, detail=source.unreadable[name])
        elif spec is None:
            if name in expected:
                yield Problem(kind=ProblemKind.MISSING, subject=name, detail="is missing")
        elif spec.shape != shape:
            detail = f"has shape {list(spec.shape)}, must have {list(shape)}"
            yield Problem(kind=ProblemKind.SHAPE, subject=name, detail=detail)
        elif not _is_readable(name, spec, blocks):
            yield Problem(kind=ProblemKind.DTYPE, subject=name, detail=f"has dtype {spec.dtype}")
    for name in sorted(present - expected.keys() - optional.keys()):
        if not name.endswith(names.DERIVED_SUFFIXES):
            yield Problem(kind=ProblemKind.UNEXPECTED, subject=name, detail="nothing reads this tensor")


def _is_readable(name: str, spec: TensorSpec, blocks: BlockFormat | None) -> bool:
    """Whether a tensor of this dtype has the meaning its name says."""
    if name.endswith(names.DRAFT_TOKEN_IDS):
        return spec.dtype in ("I32", "I64")
    if spec.dtype.startswith("F8"):
        return blocks is not None and is_block_scaled(spec) and not name.endswith(SCALE_SUFFIX)
    return spec.dtype not in _INTEGERS


def value_problems(source: TensorSource, wanted: Iterable[str]) -> Iterator[Problem]:
    """Reads each tensor in turn (one in memory at a time)."""
    for name in wanted:
        try:
            finite = all_finite(source.read(name))
        except CheckpointError as fault:
            detail = str(fault).removeprefix(f"{name}: ")
            yield Problem(kind=ProblemKind.UNREADABLE, subject=name, detail=detail)
            continue
        if not finite:
            yield Problem(kind=ProblemKind.NON_FINITE, subject=name, detail="holds values that are not finite")


def fingerprint_problems(source: TensorSource, name: str, wanted: str) -> Iterator[Problem]:
    """A copy of a shared tensor must equal its owner (then it is not loaded), a declared tensor its declaration.

    A tensor that cannot be read is left to `value_problems`.
    """
    try:
        actual = tensor_fingerprint(source.read(name))
    except CheckpointError:
        return
    if actual != wanted:
        detail = f"holds other values ({actual[:12]}) than its owner or its manifest says ({wanted[:12]})"
        yield Problem(kind=ProblemKind.FINGERPRINT, subject=name, detail=detail)


def draft_vocab_problems(source: TensorSource, name: str, vocab_size: int) -> Iterator[Problem]:
    ids: Tensor = source.read(name)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        yield Problem(kind=ProblemKind.VALUES, subject=name, detail=f"ids must lie in 0..{vocab_size - 1}")
    if len(set(ids.tolist())) != ids.numel():
        yield Problem(kind=ProblemKind.VALUES, subject=name, detail="holds an id twice")
