"""The seam between engines and model families: what an engine asks of a trunk, and which trunk a configuration means.

An engine knows rows, spans and pools. That a llama caches keys and values and a DeepSeek one latent is between the
configuration (`cache_row_size`) and the layers built here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.deepseek import DeepseekLayers, DeepseekTrunk, ExpertShare
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.device import on_device
from seqmtp_serve.model.dispatch import Tally
from seqmtp_serve.model.layers import LlamaLayers
from seqmtp_serve.model.llama import LlamaTrunk
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import attention_rows_agree, per_head_rows_agree, probe

ModelConfig: TypeAlias = LlamaConfig | DeepseekConfig


class Trunk(Protocol):
    """A target model without state: everything a sequence leaves behind lies in the pool.

    `tally` counts what its experts did; None for a dense model. `kernels` names the backends that compute it, by their
    words in `config.Kernels`.
    """

    @property
    def tally(self) -> Tally | None: ...

    @property
    def kernels(self) -> Mapping[str, str]: ...

    def forward(self, token_ids: Sequence[int], spans: list[Span], pool_LSE: Tensor) -> Tensor:
        """States `[N, d]` of the rows of `spans`, before the final norm, in a basis of the trunk's own."""
        ...

    def features(self, state_Nd: Tensor) -> Tensor:
        """The same in the model's basis: what an MTP module is fed."""
        ...

    def logits(self, state_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head: `[N, V]`."""
        ...


class Block(Protocol):
    """A decoder block over one layer's pool. `shared` comes from the `plan` of the same `Layers`."""

    def __call__(self, hidden_Nd: Tensor, pool_SE: Tensor, shared: Any) -> Tensor: ...


class Layers(Protocol):
    """A family's decoder layers: what an MTP module is built of as well. `tally` and `kernels` as in `Trunk`."""

    @property
    def tally(self) -> Tally | None: ...

    @property
    def kernels(self) -> Mapping[str, str]: ...

    def plan(self, spans: list[Span], positions_N: Tensor) -> Any: ...

    def block(self, tensors: Mapping[str, Tensor], layer: int) -> Block: ...


def build_trunk(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    page_size: int,
    max_len: int,
    numerics: Numerics,
    share: ExpertShare | None = None,
) -> Trunk:
    """The target of a configuration. `share` says which experts are held here; None: all, or there are none.

    Raises InvalidField when a backend that is asked for by name cannot run here.
    """
    tensors = on_device(tensors, numerics.device)
    if isinstance(model, DeepseekConfig):
        return DeepseekTrunk(tensors, model, page_size, max_len, numerics, share)
    return LlamaTrunk(tensors, model, page_size, max_len, numerics)


def build_layers(model: ModelConfig, page_size: int, max_len: int, numerics: Numerics) -> Layers:
    """The layers of a configuration's MTP modules, with all experts held here. Raises InvalidField as `build_trunk`."""
    if isinstance(model, DeepseekConfig):
        return DeepseekLayers(model, page_size, max_len, numerics, ExpertShare(), skips_slots=True)
    return LlamaLayers(model, page_size, max_len, numerics)


def chosen_kernels(config: EngineConfig, model: ModelConfig) -> Mapping[str, str]:
    """What would compute a target, dispatch aside, without its weights. Raises InvalidField as `build_trunk` does."""
    numerics = numerics_for(config, model)
    if isinstance(model, DeepseekConfig):
        return DeepseekLayers(model, config.page_size, 1, numerics, ExpertShare()).kernels
    return LlamaLayers(model, config.page_size, 1, numerics).kernels


def kernel_levels(kernels: Mapping[str, str]) -> dict[str, float]:
    """The names as gauges: "kernel_<kind>_<backend>", always 1."""
    return {f"kernel_{kind}_{name}".replace("-", "_"): 1.0 for kind, name in kernels.items()}


def numerics_for(config: EngineConfig, model: ModelConfig) -> Numerics:
    """What this machine guarantees (`probe.py`), for the shapes of this family's products."""
    numerics = probe(config)
    if isinstance(model, DeepseekConfig) and numerics.invariant and not numerics.fixed_tiles:
        size = model.latent_size
        agree = per_head_rows_agree(size) and attention_rows_agree(config.page_size, size)
        return replace(numerics, fixed_tiles=not agree)
    return numerics
