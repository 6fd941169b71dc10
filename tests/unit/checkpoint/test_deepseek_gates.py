"""Break one thing in the MTP layer of a released layout, each of its tensors in turn: its gate names it, the target's
gate passes, and the target's tensors load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek as tiny
import torch
from safetensors.torch import save_file
from tiny_deepseek import BLOCKS, LAYER, DeepseekFiles
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX
from seqmtp_serve.checkpoint.fusion import projection_for_he, swapped_halves
from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE, write_mtp_manifest
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.problem import ProblemKind
from seqmtp_serve.checkpoint.safetensors_reader import INDEX_FILE
from seqmtp_serve.checkpoint.seal import sealed
from seqmtp_serve.errors import MtpIncomplete, TargetIncomplete

OWN = sorted(tiny.mtp_tensors())
COPIES = sorted(LAYER + copy for copy in names.MTP_DUPLICATES)
SCALED = tiny.as_stored(tiny.mtp_tensors(), BLOCKS)
SCALES = sorted(name for name in SCALED if name.endswith(SCALE_SUFFIX))
EH_PROJ = LAYER + names.EH_PROJ
Q_A_0 = "model.layers.0.self_attn.q_a_proj.weight"
Faults = set[tuple[str, ProblemKind]]


@pytest.fixture
def files(tmp_path: Path) -> DeepseekFiles:
    return DeepseekFiles(folder=tmp_path / "model")


@pytest.fixture
def scaled(tmp_path: Path) -> DeepseekFiles:
    return DeepseekFiles(folder=tmp_path / "model", blocks=BLOCKS)


def seal(files: DeepseekFiles) -> None:
    write_mtp_manifest(files.folder, sealed(open_checkpoint(str(files.folder))))


def faults(files: DeepseekFiles) -> Faults:
    """What the MTP gate says; the target's says nothing, and the target loads."""
    checkpoint = open_checkpoint(str(files.folder))
    report = checkpoint.gates()
    assert report.target.problems == ()
    weight = checkpoint.target_tensors()[Q_A_0]
    assert weight.shape == tiny.target_tensors()[Q_A_0].shape
    assert report.mtp is not None
    if report.mtp.problems:
        with pytest.raises(MtpIncomplete, match=re.escape(str(report.mtp.problems[0]))):
            report.mtp.require()
    return {(problem.subject, problem.kind) for problem in report.mtp.problems}


def assert_no_proposer(files: DeepseekFiles, name: str) -> None:
    """What a proposer does at start: take the module's tensors, then read them."""
    with pytest.raises(MtpIncomplete, match=re.escape(name)):
        tensors = open_checkpoint(str(files.folder)).mtp_tensors()
        for wanted in tensors:
            assert tensors[wanted] is not None


@pytest.mark.covers(61, 62, 149)
@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("with_copies", [True, False])
def test_a_sound_checkpoint_passes_both_gates(tmp_path: Path, blocks: Any, with_copies: bool) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=blocks, with_copies=with_copies)
    assert faults(files) == set()
    seal(files)
    assert faults(files) == set()


@pytest.mark.covers(61, 62, 121)
@pytest.mark.parametrize("name", OWN)
def test_any_dropped_tensor(files: DeepseekFiles, name: str) -> None:
    files.edit(**{name: None})
    assert faults(files) == {(name, ProblemKind.MISSING)}
    assert_no_proposer(files, name)


@pytest.mark.covers(61, 62, 121)
@pytest.mark.parametrize("name", SCALES)
def test_any_dropped_scale(scaled: DeepseekFiles, name: str) -> None:
    scaled.edit(**{name: None})
    assert (name, ProblemKind.MISSING) in faults(scaled)
    assert_no_proposer(scaled, name)


@pytest.mark.covers(63)
@pytest.mark.parametrize("name", COPIES)
def test_a_dropped_copy_is_no_fault_its_owner_is_used(files: DeepseekFiles, name: str) -> None:
    files.edit(**{name: None})
    assert faults(files) == set()


@pytest.mark.covers(61)
@pytest.mark.parametrize("name", OWN + COPIES)
def test_any_misshaped_tensor(files: DeepseekFiles, name: str) -> None:
    files.edit(**{name: files.tensors[name][:-1]})
    assert faults(files) == {(name, ProblemKind.SHAPE)}
    assert_no_proposer(files, name)


@pytest.mark.covers(61)
@pytest.mark.parametrize("name", SCALES)
def test_any_misshaped_scale(scaled: DeepseekFiles, name: str) -> None:
    scaled.edit(**{name: torch.ones(9, 9)})
    assert faults(scaled) == {(name, ProblemKind.SHAPE)}
    assert_no_proposer(scaled, name)


@pytest.mark.covers(57, 61)
@pytest.mark.parametrize("name", OWN)
def test_one_flipped_bit_of_any_tensor_that_was_sealed(files: DeepseekFiles, name: str) -> None:
    seal(files)
    flip_a_bit(files, name)
    assert (name, ProblemKind.FINGERPRINT) in faults(files)
    assert_no_proposer(files, name)


@pytest.mark.covers(57, 61)
@pytest.mark.parametrize("name", sorted(SCALED))
def test_one_flipped_bit_of_any_block_scaled_tensor_that_was_sealed(scaled: DeepseekFiles, name: str) -> None:
    seal(scaled)
    flip_a_bit(scaled, name)
    assert (name, ProblemKind.FINGERPRINT) in faults(scaled)
    assert_no_proposer(scaled, name.removesuffix(SCALE_SUFFIX))


@pytest.mark.covers(63, 114)
@pytest.mark.parametrize("name", COPIES)
def test_one_flipped_bit_of_a_copy_shows_without_a_seal(files: DeepseekFiles, name: str) -> None:
    flip_a_bit(files, name)
    assert faults(files) == {(name, ProblemKind.FINGERPRINT)}
    assert_no_proposer(files, name)


@pytest.mark.covers(61)
@pytest.mark.parametrize("name", OWN)
def test_any_tensor_that_is_not_finite(files: DeepseekFiles, name: str) -> None:
    broken = files.tensors[name].clone()
    broken.view(-1)[-1] = float("nan")
    files.edit(**{name: broken})
    assert (name, ProblemKind.NON_FINITE) in faults(files)
    assert_no_proposer(files, name)


@pytest.mark.covers(61)
@pytest.mark.parametrize("name", OWN)
def test_any_tensor_of_integers(files: DeepseekFiles, name: str) -> None:
    files.edit(**{name: files.tensors[name].to(torch.int32)})
    assert faults(files) == {(name, ProblemKind.DTYPE)}


@pytest.mark.covers(61)
def test_a_tensor_nothing_would_read(files: DeepseekFiles) -> None:
    files.edit(**{LAYER + "mlp.gate.bias": torch.zeros(4)})
    assert faults(files) == {(LAYER + "mlp.gate.bias", ProblemKind.UNEXPECTED)}


def flip_a_bit(files: DeepseekFiles, name: str) -> None:
    """The lowest exponent bit (fp8: of the exponent as well) of the first value: still finite."""
    stored = files.tensors[name]
    raw = stored.contiguous().view(torch.uint8).clone()
    size = stored.element_size()
    raw.view(-1)[size - 1] ^= 0x08 if size == 1 else 0x01
    files.edit(**{name: raw.view(stored.dtype)})


# ---- the fusion order


@pytest.mark.covers(58, 59, 112)
def test_columns_stored_in_the_other_order(files: DeepseekFiles) -> None:
    seal(files)
    files.edit(**{EH_PROJ: swapped_halves(files.tensors[EH_PROJ])})
    assert faults(files) == {(EH_PROJ, ProblemKind.FINGERPRINT)}
    assert_no_proposer(files, EH_PROJ)


@pytest.mark.covers(58, 112)
def test_the_other_order_declared(files: DeepseekFiles) -> None:
    seal(files)
    files.edit_json(MANIFEST_FILE, fusion_order="he")
    assert faults(files) == {(EH_PROJ, ProblemKind.FINGERPRINT)}
    assert_no_proposer(files, EH_PROJ)


@pytest.mark.covers(58)
@pytest.mark.parametrize("order", ["", "EH", None, ...])
def test_an_order_that_is_not_declared(files: DeepseekFiles, order: object) -> None:
    seal(files)
    files.edit_json(MANIFEST_FILE, fusion_order=order)
    assert faults(files) == {("fusion_order", ProblemKind.DECLARATION)}


@pytest.mark.covers(59)
def test_both_changed_together_is_the_same_module(files: DeepseekFiles) -> None:
    seal(files)
    files.edit(**{EH_PROJ: swapped_halves(files.tensors[EH_PROJ])})
    files.edit_json(MANIFEST_FILE, fusion_order="he", tensor_fingerprints={})
    assert faults(files) == set()
    size = tiny.CONFIG.hidden_size
    turned = open_checkpoint(str(files.folder)).mtp_tensors()[EH_PROJ]
    assert torch.equal(
        projection_for_he(turned, size, "he"), projection_for_he(tiny.mtp_tensors()[EH_PROJ], size, "eh")
    )


# ---- declarations against the target


@pytest.mark.covers(8, 9, 10, 61, 122, 136)
@pytest.mark.parametrize(
    ("field", "value", "subject"),
    [
        ("vocab_size", 41, "vocab_size"),
        ("hidden_size", 8, "hidden_size"),
        ("num_main_layers", 61, "num_main_layers"),
        ("mtp_layer_ids", [3], "mtp_layer_ids"),
        ("num_checkpoint_mtp_layers", 2, "num_checkpoint_mtp_layers"),
        ("architecture", "llama", "architecture"),
        ("expert_layout", "dense", "expert_layout"),
        ("quantization", "fp8-e4m3-block[128,128]", "quantization"),
        ("cache_layout", "latent[slot]: de-interleaved order", "cache_layout"),
        ("output_head_owner", "main.norm+lm_head", "output_head_owner"),
        ("rollout", "tree", "rollout"),
    ],
)
def test_a_declaration_that_does_not_fit(files: DeepseekFiles, field: str, value: object, subject: str) -> None:
    seal(files)
    files.edit_json(MANIFEST_FILE, **{field: value})
    assert (subject, ProblemKind.DECLARATION) in faults(files)


@pytest.mark.covers(61, 136)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("theta", 5e5),
        ("head_dim", 64),
        ("layout", "rotate_half"),
        ("position", "base+1"),
        ("yarn", None),
        ("yarn.factor", 40.0),
        ("yarn.original_max_position", 4096),
        ("yarn.beta_fast", 16.0),
        ("yarn.beta_slow", 2.0),
        ("yarn.mscale", 0.7),
        ("yarn.mscale_all_dim", 0.7),
    ],
)
def test_another_rope_contract(files: DeepseekFiles, field: str, value: object) -> None:
    seal(files)
    checkpoint = open_checkpoint(str(files.folder))
    assert checkpoint.manifest.mtp is not None
    rope: dict[str, Any] = {
        "theta": checkpoint.manifest.mtp.rope.theta,
        "head_dim": tiny.CONFIG.rope_head_dim,
        "layout": "interleaved",
        "position": "base",
        "yarn": {
            "factor": 4.0,
            "original_max_position": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    outer, _, inner = field.partition(".")
    if inner:
        rope[outer][inner] = value
    else:
        rope[outer] = value
    files.edit_json(MANIFEST_FILE, rope=rope)
    assert faults(files) == {(f"rope.{field}", ProblemKind.DECLARATION)}


@pytest.mark.covers(61, 136)
@pytest.mark.parametrize(
    ("field", "value", "subject"),
    [
        ("rope_theta", 5e5, "rope.theta"),
        ("rope_scaling", None, "rope.yarn"),
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers"),
    ],
)
def test_the_targets_configuration_changed_under_a_sealed_module(
    files: DeepseekFiles, field: str, value: object, subject: str
) -> None:
    seal(files)
    files.edit_json("config.json", **{field: value})
    assert {name for name, _ in faults(files)} == {subject}


def test_another_vocabulary_breaks_the_target_itself(files: DeepseekFiles) -> None:
    files.edit_json("config.json", vocab_size=41)
    report = open_checkpoint(str(files.folder)).gates()
    assert [problem.subject for problem in report.target.problems] == [names.EMBEDDING, names.HEAD]
    with pytest.raises(TargetIncomplete, match=names.EMBEDDING):
        open_checkpoint(str(files.folder)).target_tensors()


# ---- a layer that is not where it should be


@pytest.mark.covers(14, 62, 121)
def test_the_whole_layer_dropped(files: DeepseekFiles) -> None:
    files.edit(**dict.fromkeys(OWN + COPIES))
    assert faults(files) == {("model.layers.2", ProblemKind.MISSING)}
    assert_no_proposer(files, "whole MTP layer is missing")


@pytest.mark.covers(62, 122)
def test_a_layer_the_configuration_does_not_count(files: DeepseekFiles) -> None:
    files.edit_json("config.json", num_nextn_predict_layers=0)
    assert faults(files) == {("num_nextn_predict_layers", ProblemKind.DECLARATION)}


@pytest.mark.covers(122)
def test_a_layer_under_another_id(files: DeepseekFiles) -> None:
    moved = {name.replace(LAYER, "model.layers.3."): files.tensors[name] for name in OWN}
    files.edit(**dict.fromkeys(OWN + COPIES), **moved)
    assert faults(files) == {("model.layers.2", ProblemKind.MISSING)}


@pytest.mark.covers(14, 62)
def test_no_layer_and_none_counted_is_a_sound_target(files: DeepseekFiles) -> None:
    files.edit(**dict.fromkeys(OWN + COPIES))
    files.edit_json("config.json", num_nextn_predict_layers=0)
    checkpoint = open_checkpoint(str(files.folder))
    assert checkpoint.gates().target.ok
    assert checkpoint.gates().mtp is None


@pytest.mark.covers(62)
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-8])])
def test_the_shard_of_the_mtp_layer_missing_or_cut_short(
    files: DeepseekFiles, damage: Callable[[Path], object]
) -> None:
    own_shard(files)
    damage(files.folder / "mtp.safetensors")
    assert faults(files) == {(name, ProblemKind.UNREADABLE) for name in OWN + COPIES}
    assert_no_proposer(files, "mtp.safetensors")


@pytest.mark.covers(62)
def test_a_manifest_that_is_no_json(files: DeepseekFiles) -> None:
    (files.folder / MANIFEST_FILE).write_text("{")
    assert {kind for _, kind in faults(files)} == {ProblemKind.DECLARATION}
    assert_no_proposer(files, MANIFEST_FILE)


@pytest.mark.covers(9, 63)
def test_a_norm_that_is_a_copy_of_the_main_one_is_not_loaded(files: DeepseekFiles) -> None:
    shared_norm = LAYER + names.SHARED_NORM
    checkpoint = open_checkpoint(str(files.folder))
    assert checkpoint.mtp_config is not None
    assert checkpoint.mtp_config.final_norm_owner == "mtp"
    assert checkpoint.manifest.mtp is not None
    assert checkpoint.manifest.mtp.output_head_owner == "mtp.shared_head.norm+lm_head"
    assert torch.equal(checkpoint.mtp_tensors()[shared_norm], tiny.mtp_tensors()[shared_norm])

    files.edit(**{shared_norm: files.tensors[names.FINAL_NORM].clone()})
    checkpoint = open_checkpoint(str(files.folder))
    assert checkpoint.mtp_config is not None
    assert checkpoint.mtp_config.final_norm_owner == "main"
    assert shared_norm not in checkpoint.mtp_tensors()
    assert faults(files) == set()


@pytest.mark.covers(62)
@pytest.mark.parametrize("name", sorted(tiny.target_tensors()))
def test_any_dropped_target_tensor(files: DeepseekFiles, name: str) -> None:
    files.edit(**{name: None})
    report = open_checkpoint(str(files.folder)).gates(deep=False)
    assert [(p.subject, p.kind) for p in report.target.problems] == [(name, ProblemKind.MISSING)]
    with pytest.raises(TargetIncomplete, match=re.escape(name)):
        open_checkpoint(str(files.folder)).target_tensors()


def own_shard(files: DeepseekFiles) -> None:
    """Move the MTP layer into a shard of its own."""
    module: dict[str, Tensor] = {name: files.tensors[name] for name in OWN + COPIES}
    files.edit(**dict.fromkeys(module))
    save_file(module, files.folder / "mtp.safetensors")
    index = json.loads((files.folder / INDEX_FILE).read_text())
    index["weight_map"] |= dict.fromkeys(module, "mtp.safetensors")
    files.write_json(INDEX_FILE, index)
