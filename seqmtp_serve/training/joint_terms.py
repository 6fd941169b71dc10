"""One pass of a stream through the main model and the whole chain of depths, teacher-forced.

`Taps` stand where the MTP path enters what it shares with the main model: identity in the forward pass, and in the
backward pass the only place where the MTP part of a shared gradient can be seen before it is added to the main part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from seqmtp_serve.training.mtp_objective import ObjectiveContract, Term, term
from seqmtp_serve.training.packing import CompiledStream
from seqmtp_serve.training.v3.model import V3Model


@dataclass(slots=True)
class Taps:
    """The MTP part of the gradient at each named place, summed over the streams it was used for."""

    gradients: dict[str, Tensor] = field(default_factory=dict)

    def through(self, name: str, tensor: Tensor) -> Tensor:
        """A view of `tensor` for the MTP path."""
        view = tensor.view_as(tensor)
        if view.requires_grad:
            view.register_hook(lambda gradient: self._add(name, gradient))  # type: ignore[no-untyped-call]
        return view

    def _add(self, name: str, gradient: Tensor) -> None:
        seen = self.gradients.get(name)
        self.gradients[name] = gradient.detach() if seen is None else seen + gradient.detach()

    def norm(self, name: str) -> float:
        """L2 norm; 0 where nothing arrived."""
        return float(self.gradients[name].norm()) if name in self.gradients else 0.0


def joint_terms(
    model: V3Model, stream: CompiledStream, contract: ObjectiveContract, taps: Taps | None = None
) -> tuple[Term, list[Term]]:
    """`(main, depths)`. Every module runs for every stream, rows or not: the collectives inside keep their order."""
    taps = taps or Taps()
    h0_Nd = model.main_states(stream.main)
    main = term(model.logits(h0_Nd), stream.main)
    state_Nd = h0_Nd.detach() if contract.detach_trunk else taps.through("trunk", h0_Nd)
    depths: list[Term] = []
    for depth, rows in enumerate(stream.depths, start=1):
        layer = model.mtp_layer(depth)
        embed_Vd = taps.through("embedding", layer.embed_tokens.weight)
        head_Vd = taps.through("head", layer.shared_head.head.weight)
        state_Nd = model.mtp_states(depth, state_Nd, rows, embed_Vd)
        depths.append(term(model.logits(state_Nd, depth, head_Vd), rows))
    return main, depths
