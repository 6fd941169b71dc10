"""Break one thing in a checkpoint: the right gate fails, by name, and the target still opens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_checkpoint as tiny
import torch
from safetensors.torch import load_file
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fusion import projection_for_he
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.problem import ProblemKind
from seqmtp_serve.errors import MtpIncomplete, TargetIncomplete

EH_PROJ = MTP_LAYER + names.EH_PROJ
DRAFT_IDS = MTP_LAYER + names.DRAFT_TOKEN_IDS
Q_PROJ_0 = "model.layers.0.self_attn.q_proj.weight"


def assert_mtp_fails(files: TinyFiles, subject: str, kind: ProblemKind) -> None:
    """The MTP gate names `subject`, the target gate passes, and the target's tensors load."""
    checkpoint = open_checkpoint(str(files.target), str(files.mtp))
    report = checkpoint.gates()
    assert report.target.ok
    assert report.mtp is not None
    assert (subject, kind) in {(problem.subject, problem.kind) for problem in report.mtp.problems}
    with pytest.raises(MtpIncomplete, match=re.escape(str(report.mtp.problems[0]))):
        report.mtp.require()
    assert torch.equal(checkpoint.target_tensors()[Q_PROJ_0], tiny.target_tensors()[Q_PROJ_0])


def assert_target_fails(files: TinyFiles, subject: str, kind: ProblemKind) -> None:
    report = open_checkpoint(str(files.target), str(files.mtp)).gates()
    assert (subject, kind) in {(problem.subject, problem.kind) for problem in report.target.problems}
    with pytest.raises(TargetIncomplete, match=re.escape(str(report.target.problems[0]))):
        report.target.require()


@pytest.mark.covers(61, 62)
def test_a_sound_checkpoint_passes_both_gates(files: TinyFiles) -> None:
    report = open_checkpoint(str(files.target), str(files.mtp)).gates()
    assert report.target.problems == ()
    assert report.mtp is not None
    assert report.mtp.problems == ()


@pytest.mark.covers(61, 62, 121)
@pytest.mark.parametrize("name", sorted(tiny.mtp_tensors()))
def test_any_dropped_mtp_tensor_is_named(files: TinyFiles, name: str) -> None:
    files.edit_tensors(files.mtp, **{name: None})
    assert_mtp_fails(files, name, ProblemKind.MISSING)
    with pytest.raises(MtpIncomplete, match=name):
        open_checkpoint(str(files.target), str(files.mtp)).mtp_tensors()


@pytest.mark.covers(61)
@pytest.mark.parametrize("name", sorted(tiny.mtp_tensors()))
def test_any_misshaped_mtp_tensor_is_named(files: TinyFiles, name: str) -> None:
    files.edit_tensors(files.mtp, **{name: tiny.mtp_tensors()[name][:-1].clone()})
    assert_mtp_fails(files, name, ProblemKind.SHAPE)


@pytest.mark.covers(61)
def test_values_that_are_not_finite(files: TinyFiles) -> None:
    weight = tiny.mtp_tensors()[EH_PROJ]
    weight[3, 5] = float("nan")
    files.edit_tensors(files.mtp, **{EH_PROJ: weight})
    assert_mtp_fails(files, EH_PROJ, ProblemKind.NON_FINITE)
    with pytest.raises(MtpIncomplete, match="not finite"):
        open_checkpoint(str(files.target), str(files.mtp)).mtp_tensors()[EH_PROJ]


@pytest.mark.covers(57, 61)
def test_one_flipped_bit(files: TinyFiles) -> None:
    path = files.mtp / "model.safetensors"
    stored = bytearray(path.read_bytes())
    needle = load_file(path)[EH_PROJ].numpy().tobytes()
    stored[bytes(stored).index(needle) + 6] ^= 0x40
    path.write_bytes(stored)
    assert_mtp_fails(files, EH_PROJ, ProblemKind.FINGERPRINT)


@pytest.mark.covers(59, 112)
def test_columns_stored_in_the_order_that_was_not_declared(files: TinyFiles) -> None:
    swapped = projection_for_he(tiny.mtp_tensors()[EH_PROJ], CONFIG.hidden_size, "eh")
    files.edit_tensors(files.mtp, **{EH_PROJ: swapped})
    assert_mtp_fails(files, EH_PROJ, ProblemKind.FINGERPRINT)


@pytest.mark.covers(58)
@pytest.mark.parametrize("order", ["", "EH", "h,e", None, ...])
def test_fusion_order_must_be_declared(files: TinyFiles, order: object) -> None:
    files.edit_json(files.mtp / "manifest.json", fusion_order=order)
    assert_mtp_fails(files, "fusion_order", ProblemKind.DECLARATION)


@pytest.mark.covers(8, 9, 61, 122, 136)
@pytest.mark.parametrize(
    ("field", "value", "subject"),
    [
        ("vocab_size", 33, "vocab_size"),
        ("hidden_size", 8, "hidden_size"),
        ("num_main_layers", 61, "num_main_layers"),
        ("num_checkpoint_mtp_layers", 2, "num_checkpoint_mtp_layers"),
        ("num_checkpoint_mtp_layers", 0, "num_checkpoint_mtp_layers"),
        ("mtp_layer_ids", [3], "mtp_layer_ids"),
        ("mtp_layer_ids", [], "mtp_layer_ids"),
        ("rope", {"theta": 1e6, "head_dim": 4}, "rope.theta"),
        ("rope", {"theta": 1e4, "head_dim": 8}, "rope.head_dim"),
        ("rope", {"theta": 1e4, "head_dim": 4, "layout": "interleaved"}, "rope.layout"),
        ("rope", {"theta": "1e4", "head_dim": 4}, "rope.theta"),
        ("embedding_owner", "mtp.embed_tokens", "embedding_owner"),
        ("output_head_owner", "mtp.head", "output_head_owner"),
        ("norm_flavour", "layernorm", "norm_flavour"),
        ("fed_hidden", "normed", "fed_hidden"),
        ("recycled_hidden", "", "recycled_hidden"),
        ("final_norm_owner", "both", "final_norm_owner"),
        ("quantization", "fp8", "quantization"),
        ("expert_layout", "moe", "expert_layout"),
        ("architecture", "deepseek_v3", "architecture"),
        ("draft_vocab_size", -1, "draft_vocab_size"),
        ("position0_zeroing", 0, "position0_zeroing"),
        ("training", ..., "training"),
        ("surprise", 1, "surprise"),
    ],
)
def test_a_declaration_that_does_not_fit(files: TinyFiles, field: str, value: object, subject: str) -> None:
    files.edit_json(files.mtp / "manifest.json", **{field: value})
    assert_mtp_fails(files, subject, ProblemKind.DECLARATION)


@pytest.mark.covers(10, 63, 114)
@pytest.mark.parametrize(
    ("field", "name"), [("embedding", names.EMBEDDING), ("output_norm", names.FINAL_NORM), ("head", names.HEAD)]
)
def test_a_module_made_for_another_target(files: TinyFiles, field: str, name: str) -> None:
    manifest = tiny.manifest(tiny.target_tensors(), tiny.mtp_tensors())
    manifest["fingerprints"][field] = "f" * 64
    files.edit_json(files.mtp / "manifest.json", **manifest)
    assert_mtp_fails(files, name, ProblemKind.FINGERPRINT)


@pytest.mark.covers(63)
@pytest.mark.parametrize("copy", sorted([*names.MTP_DUPLICATES, names.SHARED_NORM]))
@pytest.mark.parametrize("equal", [True, False])
def test_duplicates_in_the_mtp_layer(files: TinyFiles, copy: str, equal: bool) -> None:
    target = tiny.target_tensors()
    owner = target[names.FINAL_NORM if copy == names.SHARED_NORM else names.EMBEDDING]
    files.edit_tensors(files.mtp, **{MTP_LAYER + copy: owner if equal else owner + 1})
    if not equal:
        return assert_mtp_fails(files, MTP_LAYER + copy, ProblemKind.FINGERPRINT)
    checkpoint = open_checkpoint(str(files.target), str(files.mtp))
    report = checkpoint.gates()
    assert report.mtp is not None
    assert report.mtp.ok
    assert MTP_LAYER + copy not in checkpoint.mtp_tensors()


@pytest.mark.covers(63, 114)
@pytest.mark.parametrize("equal", [True, False])
def test_a_head_stored_beside_the_embedding_it_is_tied_to(files: TinyFiles, equal: bool) -> None:
    embedding = tiny.target_tensors()[names.EMBEDDING]
    files.edit_tensors(files.target, **{names.HEAD: embedding.clone() if equal else embedding * 2})
    if not equal:
        return assert_target_fails(files, names.HEAD, ProblemKind.FINGERPRINT)
    checkpoint = open_checkpoint(str(files.target))
    assert checkpoint.gates().target.ok
    assert names.HEAD not in checkpoint.target_tensors()


@pytest.mark.covers(61)
@pytest.mark.parametrize("ids", [[0, 2, 4, 6, 8, 10, 12, 32], [0, 2, 4, 6, 8, 10, 12, -1], [0, 2, 4, 6, 8, 10, 12, 12]])
def test_draft_token_ids_out_of_range_or_twice(files: TinyFiles, ids: list[int]) -> None:
    files.edit_tensors(files.mtp, **{DRAFT_IDS: torch.tensor(ids, dtype=torch.int32)})
    assert_mtp_fails(files, DRAFT_IDS, ProblemKind.VALUES)


@pytest.mark.covers(61)
def test_draft_token_ids_must_be_integers(files: TinyFiles) -> None:
    files.edit_tensors(files.mtp, **{DRAFT_IDS: torch.arange(8, dtype=torch.float32)})
    assert_mtp_fails(files, DRAFT_IDS, ProblemKind.DTYPE)


@pytest.mark.covers(61)
def test_a_tensor_nothing_would_read(files: TinyFiles) -> None:
    files.edit_tensors(files.mtp, **{MTP_LAYER + "self_attn.q_proj.bias": torch.zeros(16)})
    assert_mtp_fails(files, MTP_LAYER + "self_attn.q_proj.bias", ProblemKind.UNEXPECTED)


@pytest.mark.covers(62)
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\0" * 40)])
@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_mtp_files_missing_or_broken(files: TinyFiles, file: str, damage: Callable[[Path], object]) -> None:
    damage(files.mtp / file)
    checkpoint = open_checkpoint(str(files.target), str(files.mtp))
    report = checkpoint.gates()
    assert report.target.ok
    assert report.mtp is not None
    assert not report.mtp.ok
    assert file in str(report.mtp.problems[0])
    with pytest.raises(MtpIncomplete, match=file):
        checkpoint.mtp_tensors()


@pytest.mark.covers(62)
@pytest.mark.parametrize("name", sorted(tiny.target_tensors()))
def test_any_dropped_target_tensor_is_named(files: TinyFiles, name: str) -> None:
    files.edit_tensors(files.target, **{name: None})
    assert_target_fails(files, name, ProblemKind.MISSING)
    with pytest.raises(TargetIncomplete, match=name):
        open_checkpoint(str(files.target)).target_tensors()


@pytest.mark.covers(62)
def test_the_target_fails_for_its_values_shapes_and_strangers(files: TinyFiles) -> None:
    tensors = tiny.target_tensors()
    bad_norm = torch.full_like(tensors["model.layers.1.input_layernorm.weight"], float("inf"))
    files.edit_tensors(
        files.target,
        **{
            "model.layers.1.input_layernorm.weight": bad_norm,
            Q_PROJ_0: tensors[Q_PROJ_0].T[:3].contiguous(),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(16),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        },
    )
    assert_target_fails(files, "model.layers.1.input_layernorm.weight", ProblemKind.NON_FINITE)
    assert_target_fails(files, Q_PROJ_0, ProblemKind.SHAPE)
    assert_target_fails(files, "model.layers.0.self_attn.q_proj.bias", ProblemKind.UNEXPECTED)
    problems = open_checkpoint(str(files.target)).gates().target.problems
    assert len(problems) == 3, "a derived rotary table is no problem"


@pytest.mark.covers(62)
def test_a_module_cannot_pass_when_the_shared_tensors_are_gone(files: TinyFiles) -> None:
    files.edit_tensors(files.target, **{names.EMBEDDING: None})
    report = open_checkpoint(str(files.target), str(files.mtp)).gates()
    assert not report.target.ok
    assert report.mtp is not None
    assert [problem.subject for problem in report.mtp.problems] == [names.EMBEDDING]


@pytest.mark.covers(10, 63)
@pytest.mark.parametrize("equal", [True, False])
def test_an_untied_head_is_part_of_the_fingerprints(tmp_path: Path, equal: bool) -> None:
    files = TinyFiles(tmp_path, replace(CONFIG, tie_word_embeddings=False))
    if not equal:
        head = load_file(files.target / "model.safetensors")[names.HEAD]
        files.edit_tensors(files.target, **{names.HEAD: head + 1})
        return assert_mtp_fails(files, names.HEAD, ProblemKind.FINGERPRINT)
    checkpoint = open_checkpoint(str(files.target), str(files.mtp))
    assert checkpoint.gates().mtp is not None
    assert checkpoint.mtp_tensors()[names.HEAD] is checkpoint.target_tensors()[names.HEAD]
