"""One pass of a stream through the main model and the whole chain of depths, teacher-forced.

`Taps` stand where the MTP path enters what it shares with the main model: identity in the forward pass, and in the
backward pass the only place where the MTP part of a shared gradient can be seen before it is added to the main part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqmtp_serve.training.mtp_objective import ObjectiveContract, Term, Wiring, term
from seqmtp_serve.training.packing import CompiledStream, RowTensors
from seqmtp_serve.training.v3.model import V3Model


@dataclass(slots=True)
class Taps:
    """What passes backward at each named place, over all the streams and depths of a step."""

    gradients: dict[str, Tensor] = field(default_factory=dict)  # of shared parameters: summed
    squares: dict[str, float] = field(default_factory=dict)  # of states: squared L2 norm over all rows

    def of_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """A view of a shared parameter for the MTP path."""
        return _watched(parameter, lambda gradient: self._add(name, gradient))

    def of_state(self, name: str, state_Nd: Tensor) -> Tensor:
        """A view of hidden rows for the MTP path."""
        return _watched(state_Nd, lambda gradient: self._add_square(name, gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        seen = self.gradients.get(name)
        self.gradients[name] = gradient.detach() if seen is None else seen + gradient.detach()

    def _add_square(self, name: str, gradient: Tensor) -> None:
        self.squares[name] = self.squares.get(name, 0.0) + float(gradient.detach().square().sum())


def _watched(tensor: Tensor, see: Callable[[Tensor], None]) -> Tensor:
    view = tensor.view_as(tensor)
    if view.requires_grad:
        view.register_hook(see)  # type: ignore[no-untyped-call]
    return view


def from_the_trunk(rows: RowTensors, main: RowTensors) -> RowTensors:
    """The same rows, fed with the main model's row of their base."""
    main_row = {base: row for row, base in enumerate(main.bases)}
    return replace(rows, previous_N=torch.tensor([main_row[base] for base in rows.bases], dtype=torch.long))


def joint_terms(
    model: V3Model, stream: CompiledStream, contract: ObjectiveContract, taps: Taps | None = None
) -> tuple[Term, list[Term]]:
    """`(main, depths)`. Every module runs for every stream, rows or not: the collectives inside keep their order."""
    taps = taps or Taps()
    h0_Nd = model.main_states(stream.main)
    main = term(model.logits(h0_Nd), stream.main)
    fed_Nd = state_Nd = h0_Nd.detach() if contract.detach_trunk else taps.of_state("trunk", h0_Nd)
    depths: list[Term] = []
    for depth, rows in enumerate(stream.depths, start=1):
        layer = model.mtp_layer(depth)
        embed_Vd = taps.of_parameter("embedding", layer.embed_tokens.weight)
        head_Vd = taps.of_parameter("head", layer.shared_head.head.weight)
        if contract.wiring is Wiring.INDEPENDENT:
            state_Nd, rows = fed_Nd, from_the_trunk(rows, stream.main)
            embed_Vd = embed_Vd * 0.0
        state_Nd = model.mtp_states(depth, state_Nd, rows, embed_Vd)
        depths.append(term(model.logits(state_Nd, depth, head_Vd), rows))
    return main, depths
