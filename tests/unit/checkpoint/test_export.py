"""What is written passes the gate it will meet, and declares what it was told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_checkpoint as tiny
import torch
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.export import write_mtp_part
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.model.config import MtpConfig

DECLARED = MtpConfig(fusion_order="he", fed_hidden="post", draft_vocab_size=tiny.DRAFT_VOCAB)


@pytest.mark.covers(10, 61)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    files = TinyFiles(tmp_path, replace(CONFIG, tie_word_embeddings=tied))
    layers = tiny.mtp_tensors()
    layers[MTP_LAYER + names.DRAFT_TOKEN_IDS] = layers[MTP_LAYER + names.DRAFT_TOKEN_IDS].long()
    target = open_checkpoint(str(files.target))
    written = write_mtp_part(tmp_path / "new", target, layers, DECLARED, training={"tokens": 3})

    checkpoint = open_checkpoint(str(files.target), str(tmp_path / "new"))
    report = checkpoint.gates()
    assert report.mtp is not None
    assert report.mtp.problems == ()
    assert checkpoint.manifest.mtp == written
    assert checkpoint.mtp_config == DECLARED
    assert written.training_json == '{"tokens":3}'
    stored = checkpoint.mtp_tensors()
    for name, tensor in layers.items():
        assert torch.equal(stored[name], tensor.bfloat16().float() if tensor.is_floating_point() else tensor.int())


@pytest.mark.covers(112)
def test_the_fingerprints_are_of_the_stored_values(files: TinyFiles) -> None:
    target = open_checkpoint(str(files.target))
    write_mtp_part(files.mtp, target, tiny.mtp_tensors(), DECLARED, training={})
    files.edit_tensors(files.mtp, **{MTP_LAYER + names.ENORM: tiny.mtp_tensors()[MTP_LAYER + names.ENORM]})
    problems = open_checkpoint(str(files.target), str(files.mtp)).gates().mtp
    assert problems is not None
    assert [problem.subject for problem in problems.problems] == [MTP_LAYER + names.ENORM], "not rounded: other values"
