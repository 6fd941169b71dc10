"""What the processes of an expert-parallel group compute, and how the tokens are shared out among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from moe_fixture import MOE, moe_weights, tokens
from torch import Tensor

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.dispatch import LocalDispatcher
from seqmtp_serve.model.moe import MoeLayer, MoeWeights
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import gemm_rows_agree, int8_levels

INVARIANT = Numerics(fixed_tiles=not gemm_rows_agree())  # as the start-up probe decides on this machine
FEW = replace(MOE, num_experts=3, num_groups=1, top_k_groups=1, top_k=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`num_tokens` tokens for a layer; ranks listed in `idle` have none. `favoured` experts get every token."""

    num_tokens: int = 37
    config: MoeConfig = MOE
    numerics: Numerics = INVARIANT
    idle: tuple[int, ...] = ()
    favoured: tuple[int, ...] = ()

    def weights(self) -> MoeWeights:
        weights = moe_weights(self.config)
        bias_E = weights.bias_E.clone()
        bias_E[list(self.favoured)] += 9.0
        return replace(weights, bias_E=bias_E)

    def tokens(self) -> Tensor:
        return tokens(self.num_tokens)

    def share(self, rank: int, world_size: int) -> Tensor:
        """The tokens of one rank: uneven parts of the whole, in order."""
        working = [each for each in range(world_size) if each not in self.idle]
        if rank not in working:
            return self.tokens()[:0]
        bounds = [round(self.num_tokens * (place / len(working)) ** 2) for place in range(len(working) + 1)]
        place = working.index(rank)
        return self.tokens()[bounds[place] : bounds[place + 1]]


SCENARIOS = {
    "fp32": Scenario(),
    "fixed tiles": Scenario(numerics=Numerics(fixed_tiles=True)),
    "int8": Scenario(numerics=Numerics(int8_levels=int8_levels())),
    "rank 0 idle": Scenario(idle=(0,)),
    "all but rank 1 idle": Scenario(idle=(0, 2, 3)),
    "one token": Scenario(num_tokens=1, idle=(1, 2, 3)),
    "no token anywhere": Scenario(num_tokens=0),
    "four experts get everything": Scenario(favoured=(0, 1, 2, 3)),
    "fewer experts than ranks": Scenario(config=FEW),
}


def whole_layer(scenario: Scenario) -> torch.Tensor:
    """The rows of all ranks, from one process that holds every expert."""
    layer = MoeLayer(scenario.weights(), scenario.config, LocalDispatcher(), scenario.numerics)
    return layer(scenario.tokens())
