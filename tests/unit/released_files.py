"""Made-up weights of the DeepSeek-V3 layout as the files of a release: names, copies, configuration, a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fp8 import BlockFormat
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from tests.unit.checkpoint.tiny_deepseek import DeepseekFiles

LAYER = names.layer_prefix(TINY_V3.num_layers)  # the MTP layer of `write_tiny_v3`


def write_released(
    folder: Path,
    tensors: dict[str, Tensor],
    model: DeepseekConfig,
    num_modules: int = 1,
    blocks: BlockFormat | None = None,
) -> DeepseekFiles:
    """Two shards; each MTP layer stores embedding and head again, as released files do. One word a token."""
    copies = {
        names.layer_prefix(model.num_layers + module) + copy: tensors[owner].clone()
        for module in range(num_modules)
        for copy, owner in names.MTP_DUPLICATES.items()
    }
    files = DeepseekFiles(folder=folder, config=model, blocks=blocks, num_modules=num_modules, tensors=tensors | copies)
    vocab = {f"w{token} ": token for token in range(model.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(folder / "tokenizer.json"))
    files.write_json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    return files


def write_tiny_v3(
    folder: Path,
    model: DeepseekConfig = TINY_V3,
    *,
    blocks: BlockFormat | None = None,
    context: float = 0.8,
    noise: float = 0.8,
) -> DeepseekFiles:
    """The small made-up model (`model/synthetic.py`). More `context` and `noise`: fewer drafts accepted."""
    target = target_tensors(model, context=context)
    return write_released(folder, target | mtp_tensors(target, model, noise=noise), model, blocks=blocks)
