"""Opening: where files are found, what the record says, and that shared tensors are one object."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny_checkpoint as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.llama_config import llama_config_from_hf
from seqmtp_serve.checkpoint.manifest import canonical_json
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.errors import ModelNotFound, MtpIncomplete, TargetIncomplete
from seqmtp_serve.model.config import MtpConfig


@pytest.mark.covers(14, 62)
def test_target_only_use_needs_no_mtp_part(files: TinyFiles) -> None:
    checkpoint = open_checkpoint(str(files.target))
    assert checkpoint.mtp_config is None
    assert checkpoint.gates().mtp is None
    assert checkpoint.manifest.num_checkpoint_mtp_layers == 0
    with pytest.raises(MtpIncomplete, match="no MTP part"):
        checkpoint.mtp_tensors()
    assert checkpoint.target_tensors().keys() == tiny.target_tensors().keys()


@pytest.mark.covers(49, 63)
def test_shared_tensors_are_the_same_objects_while_held(files: TinyFiles) -> None:
    checkpoint = open_checkpoint(str(files.target), str(files.mtp))
    target, module = checkpoint.target_tensors(), checkpoint.mtp_tensors()
    embedding, norm = target[names.EMBEDDING], target[names.FINAL_NORM]
    assert module[names.EMBEDDING] is embedding
    assert module[names.FINAL_NORM] is norm
    assert names.HEAD not in module
    assert set(module) == tiny.mtp_tensors().keys() | {names.EMBEDDING, names.FINAL_NORM}
    for name, tensor in tiny.mtp_tensors().items():
        assert torch.equal(module[name], tensor)


def test_an_mtp_layer_inside_the_targets_own_folder(files: TinyFiles) -> None:
    both = load_file(files.target / "model.safetensors") | load_file(files.mtp / "model.safetensors")
    save_file(both, files.target / "model.safetensors")
    assert not open_checkpoint(str(files.target)).gates().target.ok, "undeclared, the layer is a stranger"
    shutil.copy(files.mtp / "manifest.json", files.target)
    checkpoint = open_checkpoint(str(files.target))
    report = checkpoint.gates()
    assert report.target.ok
    assert report.mtp is not None
    assert report.mtp.ok
    assert MTP_LAYER + names.EH_PROJ not in checkpoint.target_tensors()
    assert MTP_LAYER + names.EH_PROJ in checkpoint.mtp_tensors()


@pytest.mark.covers(7, 8, 9, 10, 11, 13)
def test_the_record_is_frozen_whole_and_hashed(files: TinyFiles) -> None:
    manifest = open_checkpoint(str(files.target), str(files.mtp)).manifest
    assert manifest.target.embedding_owner == "main.embed_tokens"
    assert manifest.target.output_head_owner == "main.norm+lm_head"
    assert manifest.mtp is not None
    assert manifest.mtp.mtp_layer_ids == tuple(range(CONFIG.num_layers, CONFIG.num_layers + 1))
    assert manifest.num_checkpoint_mtp_layers == len(manifest.mtp.mtp_layer_ids)
    assert manifest.target.fingerprints.head == manifest.target.fingerprints.embedding
    for record, field in ((manifest, "mtp"), (manifest.target, "vocab_size"), (manifest.mtp, "fusion_order")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)
    assert json.loads(canonical_json(manifest))["target"]["rope"]["theta"] == CONFIG.rope_theta


@pytest.mark.covers(11)
def test_the_fingerprint_follows_content_not_place(files: TinyFiles, tmp_path: Path) -> None:
    before = open_checkpoint(str(files.target), str(files.mtp)).manifest.fingerprint
    elsewhere = shutil.copytree(files.target, tmp_path / "elsewhere" / "target")
    assert open_checkpoint(str(elsewhere), str(files.mtp)).manifest.fingerprint == before
    files.edit_json(files.mtp / "manifest.json", recycled_hidden="post")
    assert open_checkpoint(str(files.target), str(files.mtp)).manifest.fingerprint != before


def test_the_mtp_config_is_what_the_manifest_declares(files: TinyFiles) -> None:
    files.edit_json(files.mtp / "manifest.json", fusion_order="he", fed_hidden="post", position0_zeroing=True)
    assert open_checkpoint(str(files.target), str(files.mtp)).mtp_config == MtpConfig(
        num_modules=1,
        fusion_order="he",
        norm_flavour="w",
        fed_hidden="post",
        recycled_hidden="pre",
        zero_position0=True,
        final_norm_owner="main",
        draft_vocab_size=tiny.DRAFT_VOCAB,
    )


def test_both_spellings_of_the_rotary_fields() -> None:
    older = tiny.hf_config()
    newer = {key: value for key, value in older.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": CONFIG.rope_theta}
    assert llama_config_from_hf(older) == llama_config_from_hf(newer) == CONFIG


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("vocab_size", None),
        ("num_key_value_heads", 3),
        ("head_dim", 5),
    ],
)
def test_a_configuration_this_engine_would_compute_differently(field: str, value: object) -> None:
    with pytest.raises(TargetIncomplete):
        llama_config_from_hf(tiny.hf_config() | {field: value})


def test_what_is_not_there(files: TinyFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="built-in"):
        open_checkpoint(str(tmp_path / "nothing"))
    (files.target / "config.json").write_text("{")
    with pytest.raises(TargetIncomplete, match=r"config\.json"):
        open_checkpoint(str(files.target))
