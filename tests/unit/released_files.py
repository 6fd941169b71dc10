"""Made-up weights of the DeepSeek-V3 layout as the files of a release: names, copies, configuration, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from seqmtp_serve.model.deepseek_config import DeepseekConfig
from tests.unit.checkpoint.tiny_deepseek import hf_config


def write_released(folder: Path, tensors: dict[str, Tensor], model: DeepseekConfig, num_modules: int = 1) -> Path:
    """One file, under released names, with the copies of embedding and head that released files hold."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = dict(tensors)
    for layer in range(model.num_layers, model.num_layers + num_modules):
        prefix = f"model.layers.{layer}."
        stored[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        stored[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(hf_config(model, num_mtp_layers=num_modules)))
    vocab = {f"w{token} ": token for token in range(model.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(folder / "tokenizer.json"))
    return folder
