"""A tiny checkpoint in the released DeepSeek-V3 layout, as files a test may then damage.

Two shards and an index; with `blocks`, matrices are stored in fp8 and their scales lie in the other shard.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqmtp_serve.checkpoint import deepseek_names, names
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, BlockFormat, quantise
from seqmtp_serve.checkpoint.safetensors_reader import INDEX_FILE
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig
from seqmtp_serve.training.v3.hf_config import hf_config as exported_config

CONFIG = DeepseekConfig(
    vocab_size=40,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    q_lora_rank=12,
    kv_lora_rank=16,
    nope_head_dim=8,
    rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=32,
    num_dense_layers=1,
    moe=MoeConfig(
        num_experts=4, num_shared=1, top_k=2, intermediate_size=16, num_groups=2, top_k_groups=1, routed_scaling=2.5
    ),
    max_position=256,
    yarn=YarnConfig(factor=4.0, original_max_position=64),
)
LAYER = "model.layers.2."
BLOCKS = BlockFormat(rows=16, columns=16)
RELEASED = MtpConfig(final_norm_owner="mtp")
# What released checkpoints keep in a wider type: norms, the gate and its bias, the fusion, embedding and head.
_WIDE = (names.EH_PROJ, "mlp.gate.weight", names.EMBEDDING, names.HEAD, *names.MTP_DUPLICATES)


def target_tensors(config: DeepseekConfig = CONFIG) -> dict[str, Tensor]:
    return _random(deepseek_names.target_shapes(config), seed=1)


def mtp_tensors(config: DeepseekConfig = CONFIG) -> dict[str, Tensor]:
    """Layer 2, without the copies of the embedding and the head."""
    shapes = deepseek_names.mtp_layer_shapes(config, RELEASED)
    return _random({LAYER + name: shape for name, shape in shapes.items()}, seed=2)


def copies(target: dict[str, Tensor]) -> dict[str, Tensor]:
    return {LAYER + copy: target[owner].clone() for copy, owner in names.MTP_DUPLICATES.items()}


def hf_config(config: DeepseekConfig = CONFIG, *, num_mtp_layers: int = 1) -> dict[str, Any]:
    """As an exported model has it, in float32 as these files are; a field that says nothing is left out."""
    found = exported_config(config, MtpConfig(num_modules=num_mtp_layers)) | {"torch_dtype": "float32"}
    return {name: value for name, value in found.items() if value is not None or name != "rope_scaling"}


@dataclass(kw_only=True)
class DeepseekFiles:
    """The folder, and ways to damage it. Without `tensors` it holds random ones, `with_copies` of both ends."""

    folder: Path
    config: DeepseekConfig = CONFIG
    blocks: BlockFormat | None = None
    with_copies: bool = True
    num_modules: int = 1
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.tensors:
            target = target_tensors(self.config)
            self.tensors = target | mtp_tensors(self.config) | (copies(target) if self.with_copies else {})
        self.tensors = as_stored(self.tensors, self.blocks)
        config = hf_config(self.config, num_mtp_layers=self.num_modules)
        if self.blocks is not None:
            sizes = [self.blocks.rows, self.blocks.columns]
            config["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": sizes,
                "activation_scheme": "dynamic",
            }
        self.write_json("config.json", config)
        self.write(self.tensors)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Scales go to the shard that their weight does not lie in."""
        self.tensors = tensors
        shards: dict[str, dict[str, Tensor]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
        files = list(shards)
        weight_map = {}
        for i, name in enumerate(sorted(name for name in tensors if not name.endswith(SCALE_SUFFIX))):
            weight_map[name] = files[i % 2]
            weight_map[name + SCALE_SUFFIX] = files[(i + 1) % 2]
        for name in tensors:
            weight_map.setdefault(name, files[0])
        weight_map = {name: file for name, file in weight_map.items() if name in tensors}
        for name, file in weight_map.items():
            shards[file][name] = tensors[name].contiguous()
        for file, part in shards.items():
            save_file(part, self.folder / file, metadata={"format": "pt"})
        self.write_json(INDEX_FILE, {"metadata": {"total_size": 0}, "weight_map": weight_map})

    def edit(self, **changes: Tensor | None) -> None:
        """Replace tensors by name (`**{name: tensor}`), or drop those set to None."""
        edited = {name: tensor for name, tensor in {**self.tensors, **changes}.items() if tensor is not None}
        self.write(edited)

    def edit_json(self, file: str, **changes: Any) -> None:
        """Set fields of a JSON object; a field set to `...` is dropped."""
        found = json.loads((self.folder / file).read_text()) | changes
        self.write_json(file, {name: value for name, value in found.items() if value is not ...})

    def write_json(self, file: str, found: dict[str, Any]) -> None:
        (self.folder / file).write_text(json.dumps(found))

    def stored_files(self) -> dict[str, Tensor]:
        return {k: v for file in sorted(self.folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def as_stored(tensors: dict[str, Tensor], blocks: BlockFormat | None) -> dict[str, Tensor]:
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if blocks is not None and tensor.ndim == 2 and not name.endswith(_WIDE):
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor, blocks)
    return stored


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Matrices that keep the size of what they multiply, norms around one: nothing is close to an identity."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            tensors[name] = 0.1 * values
        elif len(shape) == 1:
            tensors[name] = 1.0 + 0.2 * values
        else:
            tensors[name] = values / shape[1] ** 0.5 if "embed" not in name else values
    return tensors
