"""The MTP modules over their pages: canonical rows depth after depth, and the provisional rows of a rollout.

Rows fed by a target are canonical: the module of depth 1 computes each once from true target features, and the module
of depth k each once from true tokens and the canonical row of depth k-1. They run depth after depth. The row of depth k
at base i needs the token at i+k, so the last k-1 fed bases have no canonical row of depth k yet, and one row of each
depth is carried to the next feed.

Drafts beyond the first come from provisional rows above the canonical ones. Step s, from 0, runs the module of depth
s mod D + 1. In the first lap over the modules these are the rows that training would compute if the drafts were true:
all of them that a draft closes. That lap is the "chain" rollout; the "recurrent" one goes on, and gives each further
step the newest row of the step before, in the place of a target row it does not have.

Slot rule: the cached row of base i and depth k lies at slot i + k, the position of the newest token it consumed, so a
slot depends on the same tokens as the target's slot of that number. Slots below `first_base + k` are never read. RoPE
position is i. A recurrent step past the last module takes the slot after its module's newest row.

Shapes: N rows of a pass, n rows of one sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.pages import Lease
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.mtp import DepthPool, MtpModule
from seqmtp_serve.request import Ref, Request

PASS_ROWS = 512  # bounds the memory of one pass


@dataclass(slots=True, kw_only=True)
class MtpSequence:
    """One sequence: canonical rows of depth k of bases `first_base .. next_base - k`.

    `carried[k - 1]` is the last canonical row of depth k, which the module of depth k + 1 has not consumed yet. `drawn`
    are the drafts last made, with how sure the module was of each, if anybody asked.
    """

    ref: Ref
    request: Request
    lease: Lease
    first_base: int
    next_base: int
    carried: list[Tensor | None]  # each [d]
    drawn: tuple[Sequence[int], Sequence[float]] = ((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpRows:
    """Consecutive rows of one sequence for one module: row j is base `base + j` at slot `slot + j`."""

    sequence: MtpSequence
    base: int
    slot: int
    hidden: Tensor  # [n, d], as the module consumes it
    next_ids: Sequence[int]

    def cut(self, start: int, stop: int) -> MtpRows:
        """Rows `start .. stop - 1` of these."""
        return MtpRows(
            sequence=self.sequence,
            base=self.base + start,
            slot=self.slot + start,
            hidden=self.hidden[start:stop],
            next_ids=self.next_ids[start:stop],
        )


class Depths:
    """`modules` are those of depth 1, 2, …; layer k - 1 of `cache` holds the rows of depth k."""

    def __init__(self, modules: Sequence[MtpModule], cache: PagedCache) -> None:
        self._modules, self._cache = modules, cache

    def module_of_step(self, step: int) -> MtpModule:
        """Whose row draft `step`, from 0, is drawn from."""
        return self._modules[step % len(self._modules)]

    def fed_rows(self, sequence: MtpSequence, base: int, hidden_nd: Tensor, next_ids: Sequence[int]) -> MtpRows:
        """Target rows (before the final norm) and the tokens after them, for the module of depth 1."""
        fed_nd = self._modules[0].fed(hidden_nd)
        return MtpRows(sequence=sequence, base=base, slot=base + 1, hidden=fed_nd, next_ids=next_ids)

    def compute_canonical(self, fed: Sequence[MtpRows]) -> list[Tensor]:
        """Compute the fed rows and what they close at the other depths. Returns the last row of depth 1 of each."""
        newest, rows = list[Tensor](), fed
        for module in self._modules:
            outputs = self._compute_split(module, rows)
            if module.depth == 1:
                newest = [output_nd[-1:] for output_nd in outputs]
            if module.depth < len(self._modules):
                rows = [_of_next_depth(module, each, output) for each, output in zip(rows, outputs, strict=True)]
        return newest

    def provisional_rows(self, sequence: MtpSequence, drafts: Sequence[int], known_nd: Tensor) -> MtpRows:
        """What the next step computes, once the newest of `drafts` was drawn from the last of `known_nd`.

        In the first lap that is every row of its depth that a draft closes: as many as there are drafts, the first of
        which reads the canonical row that the depth before computed last. Later it is the row of the newest draft.
        """
        step, num_modules = len(drafts), len(self._modules)
        before, following, lap = self.module_of_step(step - 1), self.module_of_step(step), step // num_modules
        if lap:
            base, slot = sequence.next_base - 1 + lap * num_modules, sequence.next_base - 1 + lap + following.depth
            known_nd = known_nd[-1:]
        else:
            carried_d = sequence.carried[before.depth - 1]
            if step > 1 and carried_d is not None:
                known_nd = torch.cat((carried_d[None], known_nd))
            base = sequence.next_base - len(known_nd)
            slot = base + following.depth
        next_ids = drafts[-len(known_nd) :]
        return MtpRows(sequence=sequence, base=base, slot=slot, hidden=before.recycled(known_nd), next_ids=next_ids)

    def compute(self, module: MtpModule, rows: Sequence[MtpRows]) -> list[Tensor]:
        """One pass: outputs `[n, d]` for each of `rows`."""
        pool, device = self._cache.pool, self._cache.kv_LSE.device
        spans = [
            Span(
                pages=pool.pages(each.sequence.lease),
                start=each.slot,
                num_rows=len(each.next_ids),
                first_slot=each.sequence.first_base + module.depth,
            )
            for each in rows
        ]
        output_Nd = module.forward(
            torch.cat([each.hidden for each in rows]),
            torch.tensor([token for each in rows for token in each.next_ids], device=device),
            torch.cat([torch.arange(each.base, each.base + len(each.next_ids)) for each in rows]).to(device),
            spans,
            DepthPool(depth=module.depth, rows_SE=self._cache.kv_LSE[module.depth - 1]),
        )
        return list(torch.split(output_Nd, [len(each.next_ids) for each in rows]))

    def _compute_split(self, module: MtpModule, rows: Sequence[MtpRows]) -> list[Tensor]:
        """The same in passes of at most `PASS_ROWS`; `rows` may have none for a sequence."""
        outputs: list[list[Tensor]] = [[] for _ in rows]
        for cuts in _passes(rows):
            parts = self.compute(module, [part for _, part in cuts])
            for (index, _), part in zip(cuts, parts, strict=True):
                outputs[index].append(part)
        return [torch.cat(parts) if parts else each.hidden for parts, each in zip(outputs, rows, strict=True)]


def _passes(rows: Sequence[MtpRows]) -> list[list[tuple[int, MtpRows]]]:
    """Cut `rows` into passes; each part comes with its index in `rows`."""
    passes: list[list[tuple[int, MtpRows]]] = []
    room = 0
    for index, each in enumerate(rows):
        start = 0
        while start < len(each.next_ids):
            if not room:
                passes.append([])
                room = PASS_ROWS
            stop = min(start + room, len(each.next_ids))
            passes[-1].append((index, each.cut(start, stop)))
            start, room = stop, room - (stop - start)
    return passes


def _of_next_depth(module: MtpModule, rows: MtpRows, output_nd: Tensor) -> MtpRows:
    """What the module of the next depth computes after `module` turned `rows` into `output_nd`.

    The tokens are the same, so the bases are one lower: the row carried from the last feed comes first, and the newest
    row waits for its token. A sequence that has no carried row yet begins one token later.
    """
    sequence, depth = rows.sequence, module.depth
    carried_d, next_ids, base = sequence.carried[depth - 1], rows.next_ids, rows.base - 1
    if carried_d is None:
        next_ids, base = next_ids[1:], rows.base
        known_nd = output_nd
    else:
        known_nd = torch.cat((carried_d[None], output_nd))
    if len(known_nd):
        sequence.carried[depth - 1] = known_nd[-1].clone()
    hidden_nd = module.recycled(known_nd[:-1])
    return MtpRows(sequence=sequence, base=base, slot=base + depth + 1, hidden=hidden_nd, next_ids=next_ids)
