"""Tensors out of a GGUF file: dequantised to float32 one at a time, under Hugging Face names and in their row order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from seqmtp_serve.checkpoint.gguf_header import GgufTensor, read_gguf_header
from seqmtp_serve.checkpoint.names import hf_name_of_gguf
from seqmtp_serve.checkpoint.tensor_source import TensorSpec
from seqmtp_serve.errors import CheckpointError


class GgufSource:
    """A TensorSource over one GGUF file of the llama family. The file is mapped: only the tensor asked for is read."""

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self._path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(header.metadata)
        self._entries = {hf_name_of_gguf(name): entry for name, entry in header.tensors.items()}
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        self._specs = {name: self._spec(name, entry) for name, entry in self._entries.items()}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def unreadable(self) -> Mapping[str, str]:
        return MappingProxyType({})  # one header: it was read, or opening failed

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{name}: not in {self._path.name}")
        quantization = GGMLQuantizationType(entry.ggml_type)
        block_len, block_size = GGML_QUANT_SIZES[quantization]
        *outer, inner = entry.shape
        row_size = inner // block_len * block_size
        num_rows = int(np.prod(outer, dtype=np.int64))
        stored = self._bytes[entry.start : entry.start + num_rows * row_size]
        if stored.size != num_rows * row_size or inner % block_len:
            raise CheckpointError(f"{name}: its bytes are cut short in {self._path.name}")
        values = dequantize(stored.reshape(*outer, row_size), quantization)
        tensor = torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(entry.shape))
        num_heads = self._rotary_heads(name)
        if num_heads:
            tensor = half_split_rows(tensor, num_heads)
        return tensor if rows is None else tensor[rows].clone()

    def _rotary_heads(self, name: str) -> int:
        """How many rotary heads the rows of `name` form; 0 for a tensor without rotary rows."""
        if name.endswith("self_attn.q_proj.weight"):
            return int(self.metadata["llama.attention.head_count"])
        if name.endswith("self_attn.k_proj.weight"):
            return int(self.metadata["llama.attention.head_count_kv"])
        return 0

    def _spec(self, name: str, entry: GgufTensor) -> TensorSpec:
        try:
            dtype = GGMLQuantizationType(entry.ggml_type).name
        except ValueError as fault:
            raise CheckpointError(f"{name}: unknown GGML type {entry.ggml_type}") from fault
        return TensorSpec(shape=entry.shape, dtype=dtype, file=self._path)


def half_split_rows(weight_OI: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's interleaved rotary rows (0, D/2, 1, D/2+1, ...) of each head, back in `rotate_half` order.

    Inverse of `LlamaModel.permute` in llama.cpp's `convert_hf_to_gguf.py`; O output rows, I inputs, D head size.
    """
    num_rows, num_inputs = weight_OI.shape
    pairs = weight_OI.view(num_heads, num_rows // num_heads // 2, 2, num_inputs)
    return pairs.transpose(1, 2).reshape(num_rows, num_inputs)
