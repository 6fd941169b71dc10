"""A tiny llama checkpoint with an MTP layer, as files a test may then damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.model.config import LlamaConfig, MtpConfig

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    max_position=128,
    tie_word_embeddings=True,
)
MTP_LAYER = "model.layers.2."
DRAFT_VOCAB = 8


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def target_tensors(config: LlamaConfig = CONFIG) -> dict[str, Tensor]:
    return random_tensors(names.llama_target_shapes(config), seed=1)


def mtp_tensors(config: LlamaConfig = CONFIG) -> dict[str, Tensor]:
    shapes = names.mtp_layer_shapes(config, MtpConfig(draft_vocab_size=0))
    layer = random_tensors({MTP_LAYER + name: shape for name, shape in shapes.items()}, seed=2)
    layer[MTP_LAYER + names.DRAFT_TOKEN_IDS] = torch.arange(0, 2 * DRAFT_VOCAB, 2, dtype=torch.int32)
    return layer


def hf_config(config: LlamaConfig = CONFIG) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
    }


def manifest(target: dict[str, Tensor], module: dict[str, Tensor], config: LlamaConfig = CONFIG) -> dict[str, Any]:
    """A `manifest.json` that fits both parts."""
    head = None if config.tie_word_embeddings else tensor_fingerprint(target[names.HEAD])
    return {
        "target_checkpoint": "tiny",
        "target_sha256": "0" * 64,
        "architecture": "llama",
        "num_main_layers": config.num_layers,
        "num_checkpoint_mtp_layers": 1,
        "mtp_layer_ids": [config.num_layers],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "draft_vocab_size": DRAFT_VOCAB,
        "fusion_order": "eh",
        "norm_flavour": "w",
        "fed_hidden": "pre",
        "recycled_hidden": "pre",
        "position0_zeroing": False,
        "final_norm_owner": "main",
        "embedding_owner": "main.embed_tokens",
        "output_head_owner": "main.norm+lm_head",
        "requires_physical_training_aliases": True,
        "rope": {"theta": config.rope_theta, "head_dim": config.head_dim, "layout": "rotate_half", "position": "base"},
        "fingerprints": {
            "embedding": tensor_fingerprint(target[names.EMBEDDING]),
            "output_norm": tensor_fingerprint(target[names.FINAL_NORM]),
            "head": head,
        },
        "tensor_fingerprints": {name: tensor_fingerprint(tensor) for name, tensor in module.items()},
        "storage_dtype": "float32",
        "compute_dtype": "float32",
        "cache_layout": contract_of(config).mtp_cache_layout,
        "expert_layout": "dense",
        "quantization": "none",
        "source_commit": "",
        "training": {"objective": "none", "tokens": 0},
    }


class TinyFiles:
    """The two folders, and ways to damage them."""

    def __init__(self, root: Path, config: LlamaConfig = CONFIG) -> None:
        self.target, self.mtp = root / "target", root / "mtp"
        target, module = target_tensors(config), mtp_tensors(config)
        self.target.mkdir()
        self.mtp.mkdir()
        save_file(target, self.target / "model.safetensors")
        (self.target / "config.json").write_text(json.dumps(hf_config(config)))
        save_file(module, self.mtp / "model.safetensors")
        (self.mtp / "manifest.json").write_text(json.dumps(manifest(target, module, config)))

    def edit_tensors(self, folder: Path, **changes: Tensor | None) -> None:
        """Replace tensors by name (`**{name: tensor}`), or drop those set to None."""
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors")

    def edit_json(self, path: Path, **changes: Any) -> None:
        """Set fields of a JSON object; a field set to `...` is dropped."""
        found = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
