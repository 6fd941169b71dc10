"""The feed-forward half of a DeepSeek-V3 layer: routed experts, wherever they are held, and shared ones.

    y_t = sum over t's k experts, in ascending id, of w_e * expert_e(x_t)    + shared(x_t)

The order of that sum is fixed, so neither the arrival order of the parts nor the number of ranks can change a bit of
it. Each token's weights stay with the process that owns the token. `moe_naive.py` is the same as plain loops.

Shapes: T tokens, d hidden, k experts a token, P (token, expert) pairs that arrive here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.dispatch import Dispatcher
from seqmtp_serve.model.experts import Experts, SwiGlu, SwiGluWeights
from seqmtp_serve.model.gate import Gate
from seqmtp_serve.model.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """One layer's tensors. `experts` holds this process's experts only, by global id; `shared` None: there are none."""

    gate_Ed: Tensor
    bias_E: Tensor
    experts: Mapping[int, SwiGluWeights]
    shared: SwiGluWeights | None

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], prefix: str, config: MoeConfig, experts: Iterable[int] | None = None
    ) -> MoeWeights:
        """From Hugging Face names below `prefix` ("model.layers.3.mlp."), for `experts` (None: all of them)."""
        wanted = range(config.num_experts) if experts is None else experts
        return cls(
            gate_Ed=tensors[f"{prefix}gate.weight"],
            bias_E=tensors[f"{prefix}gate.e_score_correction_bias"],
            experts={expert: SwiGluWeights.read(tensors, f"{prefix}experts.{expert}.") for expert in wanted},
            shared=SwiGluWeights.read(tensors, f"{prefix}shared_experts.") if config.num_shared else None,
        )


class MoeLayer:
    """`[T, d]` to `[T, d]`. All ranks of the dispatcher's group call it together, one without tokens too (T = 0)."""

    def __init__(self, weights: MoeWeights, config: MoeConfig, dispatcher: Dispatcher, numerics: Numerics) -> None:
        self._gate = Gate(weights.gate_Ed, weights.bias_E, config, numerics)
        self._experts = Experts(weights.experts, numerics)
        self._shared = SwiGlu(weights.shared, numerics) if weights.shared is not None else None
        self._dispatcher = dispatcher

    def __call__(self, x_Td: Tensor) -> Tensor:
        routing = self._gate(x_Td)
        arrived = self._dispatcher.dispatch(x_Td, routing.experts_Tk)
        out_Pd, num_touched = self._experts(arrived.rows_Pd, arrived.experts_P)
        parts_Tkd = self._dispatcher.combine(out_Pd, arrived, routing.experts_Tk)
        self._dispatcher.tally.count_pass(num_pairs=len(out_Pd), num_touched=num_touched)
        routed_Td = _weighted_sum(parts_Tkd, routing.weights_Tk)
        return routed_Td if self._shared is None or not len(x_Td) else routed_Td.add_(self._shared(x_Td))


def _weighted_sum(parts_Tkd: Tensor, weights_Tk: Tensor) -> Tensor:
    """Sum over k, left to right. Products and sums are separate operations: a fused one would round otherwise."""
    weighted_Tkd = parts_Tkd * weights_Tk.unsqueeze(-1)
    total_Td = weighted_Tkd[:, 0].clone()
    for part_Td in weighted_Tkd.unbind(1)[1:]:
        total_Td.add_(part_Td)
    return total_Td
