"""The two opened parts of a checkpoint, before anybody judged them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from seqmtp_serve.checkpoint.fp8 import BlockFormat
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest
from seqmtp_serve.checkpoint.tensor_source import TensorSource
from seqmtp_serve.checkpoint.tokenizer import TextContract
from seqmtp_serve.model.family import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPart:
    """The main model's opened files. `family` is the configuration's own word for the model (`model_type`).

    `num_mtp_layers` counts the MTP layers that the configuration says follow in the same files; None: it says nothing
    about them. `blocks` is how scaled weights are stored.
    """

    config: ModelConfig
    source: TensorSource
    text: TextContract
    family: str = "llama"
    num_mtp_layers: int | None = None
    blocks: BlockFormat | None = None

    @property
    def quantization(self) -> str:
        """The word of a manifest."""
        return "none" if self.blocks is None else str(self.blocks)

    @property
    def later_layers(self) -> tuple[int, ...]:
        """Layer ids in the files beyond the main layers: MTP layers, or strangers."""
        return layers_beyond(self.config.num_layers, [*self.source.specs, *self.source.unreadable])


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpPart:
    """The MTP part's opened files; `own_files` is false when they are the target's."""

    manifest: MtpManifest
    source: TensorSource
    own_files: bool
    blocks: BlockFormat | None = None


def layers_beyond(num_layers: int, tensors: Iterable[str]) -> tuple[int, ...]:
    """Ids of layers, ascending, that `tensors` belong to and that are not main layers."""
    found = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    return tuple(sorted(layer for layer in found if layer >= num_layers))
