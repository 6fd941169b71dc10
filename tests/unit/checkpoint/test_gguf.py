"""GGUF files against the `gguf` package, which writes them here and is the oracle."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from seqmtp_serve.checkpoint.gguf_header import read_gguf_header
from seqmtp_serve.checkpoint.gguf_reader import GgufSource, half_split_rows
from seqmtp_serve.checkpoint.llama_config import llama_config_from_gguf
from seqmtp_serve.checkpoint.names import hf_name_of_gguf
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.errors import CheckpointError, TargetIncomplete
from seqmtp_serve.model.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_eps=1e-5,
    rope_theta=100_000.0,
    max_position=128,
    tie_word_embeddings=True,
)
GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


def llama_cpp_permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k (`LlamaModel.permute`)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, quantization: Type) -> dict[str, Tensor]:
    """A one-layer llama as llama.cpp would store it; returns what must be read back, by Hugging Face name."""
    tensors = tiny.target_tensors(CONFIG)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG.max_position)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_eps)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"tök{i}" for i in range(CONFIG.vocab_size)])
    writer.add_token_types([1] * CONFIG.vocab_size)
    writer.add_array("mixed.floats", [0.5, -1.25])
    writer.add_bool("a.flag", True)
    expected: dict[str, Tensor] = {}
    for stored_name, name in GGUF_NAMES.items():
        values = tensors[name].numpy()
        if name.endswith("q_proj.weight"):
            values = llama_cpp_permute(values, CONFIG.num_heads)
        elif name.endswith("k_proj.weight"):
            values = llama_cpp_permute(values, CONFIG.num_kv_heads)
        kind = quantization if values.ndim == 2 else Type.F32
        blocks = gguf.quantize(values, kind)
        writer.add_tensor(stored_name, blocks, raw_dtype=kind)
        expected[name] = torch.from_numpy(np.array(gguf.dequantize(blocks, kind), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, num_heads in (("q_proj", CONFIG.num_heads), ("k_proj", CONFIG.num_kv_heads)):
        full = f"model.layers.0.self_attn.{name}.weight"
        expected[full] = half_split_rows(expected[full], num_heads)
    return expected


@pytest.mark.covers(57)
@pytest.mark.parametrize("quantization", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1, Type.Q4_0])
def test_values_names_and_shapes(tmp_path: Path, quantization: Type) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", quantization)
    source = GgufSource(tmp_path / "tiny.gguf")
    assert source.specs.keys() == expected.keys()
    original = tiny.target_tensors(CONFIG)
    for name, tensor in expected.items():
        assert source.specs[name].shape == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor)
        assert torch.equal(source.read(name, slice(1, 5)), tensor[1:5])
        step = 0.35 if quantization in (Type.Q4_1, Type.Q4_0) else 0.05  # of values in about -3..3
        assert torch.allclose(tensor, original[name], atol=step)


@pytest.mark.covers(57)
def test_rotary_rows_come_back_in_half_split_order() -> None:
    weight = torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3)
    stored = torch.from_numpy(llama_cpp_permute(weight.numpy(), 2))
    assert stored[:4, 0].tolist() == [0, 6, 3, 9]
    assert torch.equal(half_split_rows(stored, 2), weight)


def test_header_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, Type.Q8_0)
    header, oracle = read_gguf_header(path), gguf.GGUFReader(path)
    stated = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == stated
    for tensor in oracle.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.ggml_type, entry.start) == (tensor.tensor_type, tensor.data_offset)


def test_config_and_gate(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Type.F16)
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert checkpoint.config == CONFIG
    assert checkpoint.name == "tiny"
    assert checkpoint.gates().target.ok
    assert checkpoint.gates().mtp is None


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, Type.F32)
    whole = path.read_bytes()
    last = max(GgufSource(path).specs, key=lambda name: read_gguf_header(path).tensors[stored_as(name)].start)
    path.write_bytes(whole[:-64])
    problems = open_checkpoint(str(path)).gates().target.problems
    assert [problem.subject for problem in problems] == [last]
    for size in (0, 3, 20, 300):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf: not a readable GGUF file"):
            read_gguf_header(path)


def stored_as(name: str) -> str:
    return next(stored for stored, hf in GGUF_NAMES.items() if hf == name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen2"),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.dimension_count", 8),
        ("llama.block_count", None),
        ("llama.attention.head_count_kv", 3),
    ],
)
def test_metadata_this_engine_would_compute_differently(key: str, value: object, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Type.F32)
    metadata = dict(GgufSource(tmp_path / "tiny.gguf").metadata) | {key: value}
    with pytest.raises(TargetIncomplete):
        llama_config_from_gguf(metadata, has_head=False)


def test_a_name_outside_the_table_stays_and_fails_the_gate() -> None:
    assert hf_name_of_gguf("rope_freqs.weight") == "rope_freqs.weight"
    assert hf_name_of_gguf("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert {hf_name_of_gguf(name) for name in GGUF_NAMES} == set(GGUF_NAMES.values())
