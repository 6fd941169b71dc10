"""A random model small enough for tests of processes, whose drafts are accepted now and then.

The head maps a token's embedding to another token's (a permutation), so an untouched residual stream names the next
token, and so does the MTP module from the token it is given. Attention and MLP add noise to both: acceptance lies well
between none and all.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.model.config import LlamaConfig, MtpConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position=16384,
    tie_word_embeddings=False,
)
NOISE = 0.8  # size of what a block adds to the residual stream
SMALL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def write_tiny_model(root: Path) -> Path:
    """Write target and MTP module into `root` (as one folder each) and return the target's."""
    target, module = _target(), _module()
    for folder in (root / "tiny", root / "tiny-mtp"):
        folder.mkdir(parents=True)
    save_file(target, root / "tiny" / "model.safetensors")
    save_file(module, root / "tiny-mtp" / "model.safetensors")
    (root / "tiny" / "config.json").write_text(json.dumps(_hf_config()))
    vocab = {f"w{token} ": token for token in range(CONFIG.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(root / "tiny" / "tokenizer.json"))
    (root / "tiny-mtp" / "manifest.json").write_text(json.dumps(_manifest(target, module)))
    return root / "tiny"


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values = torch.ones(shape)
        elif name != names.EMBEDDING:
            values *= (NOISE if name.endswith(SMALL) else 1.0) / shape[1] ** 0.5
        tensors[name] = values
    return tensors


def _target() -> dict[str, Tensor]:
    tensors = _random(names.llama_target_shapes(CONFIG), seed=1)
    following = torch.randperm(CONFIG.vocab_size, generator=torch.Generator().manual_seed(3))
    head = torch.empty_like(tensors[names.EMBEDDING])
    head[following] = tensors[names.EMBEDDING]
    tensors[names.HEAD] = head
    return tensors


def _module() -> dict[str, Tensor]:
    prefix, d = names.layer_prefix(CONFIG.num_layers), CONFIG.hidden_size
    layer = _random(names.mtp_layer_shapes(CONFIG, MtpConfig()), seed=2)
    layer[names.EH_PROJ] = torch.cat([torch.eye(d), 0.1 * layer[names.EH_PROJ][:, d:]], dim=1).contiguous()
    return {prefix + name: tensor for name, tensor in layer.items()}


def _hf_config() -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "intermediate_size": CONFIG.intermediate_size,
        "rms_norm_eps": CONFIG.rms_eps,
        "rope_theta": CONFIG.rope_theta,
        "max_position_embeddings": CONFIG.max_position,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _manifest(target: dict[str, Tensor], module: dict[str, Tensor]) -> dict[str, object]:
    return {
        "target_checkpoint": "tiny",
        "target_sha256": "0" * 64,
        "architecture": "llama",
        "num_main_layers": CONFIG.num_layers,
        "num_checkpoint_mtp_layers": 1,
        "mtp_layer_ids": [CONFIG.num_layers],
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "draft_vocab_size": 0,
        "fusion_order": "eh",
        "norm_flavour": "w",
        "fed_hidden": "pre",
        "recycled_hidden": "pre",
        "position0_zeroing": False,
        "final_norm_owner": "main",
        "embedding_owner": "main.embed_tokens",
        "output_head_owner": "main.norm+lm_head",
        "requires_physical_training_aliases": True,
        "rope": {"theta": CONFIG.rope_theta, "head_dim": CONFIG.head_dim, "layout": "rotate_half", "position": "base"},
        "fingerprints": {
            "embedding": tensor_fingerprint(target[names.EMBEDDING]),
            "output_norm": tensor_fingerprint(target[names.FINAL_NORM]),
            "head": tensor_fingerprint(target[names.HEAD]),
        },
        "tensor_fingerprints": {name: tensor_fingerprint(tensor) for name, tensor in module.items()},
        "storage_dtype": "float32",
        "compute_dtype": "float32",
        "cache_layout": contract_of(CONFIG).mtp_cache_layout,
        "expert_layout": "dense",
        "quantization": "none",
        "source_commit": "",
        "training": {"objective": "none", "tokens": 0},
    }
