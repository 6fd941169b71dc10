"""The same files through transformers' DeepseekV3 and its native MTP: logits, greedy text, and which drafts are kept.

transformers feeds its module the row after the final norm and zeroes no position: the released contract of the family
table. It makes one draft a module, so a round there is a round of depth one here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, PreTrainedModel
from transformers.utils import logging

from seqmtp_serve import oracle
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek import DeepseekTrunk
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.mtp_families import FAMILIES
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from seqmtp_serve.request import Request, SamplingParams
from tests.unit.engine.driver import Driver
from tests.unit.engine.engines import config as engine_config
from tests.unit.released_files import write_released

logging.set_verbosity_error()
logging.disable_progress_bar()
RELEASED = FAMILIES["deepseek_v3"].contract
NEW_TOKENS = 24


def prompts(count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(2, TINY_V3.vocab_size, (count, length), generator=generator).tolist()


def transformers_model(folder: Path, model: DeepseekConfig) -> DeepseekV3ForCausalLM:
    loaded = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    later = "|".join(str(model.num_layers + index) for index in range(4))
    loaded._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({later})\..*"]  # its own list knows layer 61 only
    loaded.generation_config.eos_token_id = None
    return loaded


def their_text(loaded: PreTrainedModel, prompt: Sequence[int], *, use_mtp: bool) -> tuple[list[int], int]:
    """Greedy tokens, and how many passes of the main model they took."""
    passes = list[None]()
    counter = loaded.register_forward_pre_hook(lambda *_: passes.append(None))
    ids = torch.tensor([prompt])
    out = loaded.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_mtp=use_mtp, attention_mask=torch.ones_like(ids)
    )
    counter.remove()
    return out[0, len(prompt) :].tolist(), len(passes)


def our_text(
    tensors: dict[str, Tensor], model: DeepseekConfig, prompt: Sequence[int], mtp: MtpConfig | None
) -> tuple[list[int], int]:
    """The same of the engine, at as many drafts a round as there are modules, all of them the modules' own."""
    config = replace(engine_config(), prompt_lookup=False)
    link = DirectProposer(ProposerEngine(config, model, mtp, tensors)) if mtp else None
    engine = TargetEngine(config, model, tensors, link)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    driver = Driver(engine, depth=mtp.num_modules if mtp else 0)
    (stream,) = driver.run(Request(request_id="r", prompt_ids=tuple(prompt), params=params))
    return stream.output, len(stream.rows)


@pytest.mark.covers(150)
@pytest.mark.parametrize(
    "model",
    [
        TINY_V3,
        replace(TINY_V3, q_lora_rank=0, yarn=None),
        replace(TINY_V3, moe=replace(TINY_V3.moe, num_groups=1, top_k_groups=1, normalise_weights=False)),
    ],
    ids=["released layout", "whole query, no YaRN", "one group, no normalisation"],
)
def test_logits_are_transformers(model: DeepseekConfig, tmp_path: Path) -> None:
    tensors = target_tensors(model, context=1.0)
    ids = prompts(1, 40)[0]
    loaded = transformers_model(write_released(tmp_path / "m", tensors, model, 0).folder, model)
    with torch.inference_mode():
        theirs = loaded(torch.tensor([ids]), output_hidden_states=True)
    trunk = DeepseekTrunk(tensors, model, 8, 64, Numerics())
    pool = torch.zeros(model.num_layers, 64, model.cache_row_size)
    state = trunk.forward(ids, [Span(pages=list(range(8)), start=0, num_rows=40)], pool)
    scale = float(theirs.logits.abs().max())
    assert torch.allclose(trunk.logits(state), theirs.logits[0], atol=2e-6 * scale)
    ours_normed = oracle.rms_norm(state, tensors["model.norm.weight"], model)
    assert torch.allclose(ours_normed, theirs.hidden_states[-1][0], atol=1e-5), "theirs is after the final norm"


@pytest.mark.covers(72, 150)
def test_greedy_text_is_transformers(tmp_path: Path) -> None:
    """Weights whose text depends on the whole prefix; with drafts and without, here and there."""
    target = target_tensors(TINY_V3)
    tensors = target | mtp_tensors(target, TINY_V3)
    loaded = transformers_model(write_released(tmp_path / "m", tensors, TINY_V3).folder, TINY_V3)
    saved = 0
    for prompt in prompts(4):
        plain, num_plain = their_text(loaded, prompt, use_mtp=False)
        assert our_text(tensors, TINY_V3, prompt, None) == (plain, num_plain)
        theirs, num_theirs = their_text(loaded, prompt, use_mtp=True)
        ours, num_ours = our_text(tensors, TINY_V3, prompt, RELEASED)
        assert theirs == ours == plain
        assert num_ours == num_theirs, "the same drafts must be accepted"
        saved += num_plain - num_ours
    assert saved > 0, "drafts must be accepted, or the comparison is empty"


@pytest.mark.covers(60, 112, 150)
def test_the_permutation_fixture_accepts_what_transformers_accepts(tmp_path: Path) -> None:
    """Text that depends on the last token only. Columns as declared: every draft right; swapped: none, in both."""
    size, name = TINY_V3.hidden_size, "model.layers.3.eh_proj.weight"
    target = target_tensors(TINY_V3, context=0.0)
    passes: dict[str, int] = {}
    for label, noise in {"sure": 0.0, "noisy": 2.0, "swapped": 0.0}.items():
        tensors = target | mtp_tensors(target, TINY_V3, noise=noise)
        if label == "swapped":
            tensors[name] = torch.cat((tensors[name][:, size:], tensors[name][:, :size]), 1)
        loaded = transformers_model(write_released(tmp_path / label, tensors, TINY_V3).folder, TINY_V3)
        passes[label] = 0
        for prompt in prompts(2):
            theirs, num_theirs = their_text(loaded, prompt, use_mtp=True)
            ours, num_ours = our_text(tensors, TINY_V3, prompt, RELEASED)
            assert (ours, num_ours) == (theirs, num_theirs)
            passes[label] += num_ours
    assert passes["sure"] < passes["noisy"] < passes["swapped"] == 2 * NEW_TOKENS


@pytest.mark.covers(97, 98, 150)
def test_two_depths_are_transformers_two_depths(tmp_path: Path) -> None:
    """A chain of two modules, whose second has to be computed again after rejections: equal passes, equal text."""
    mtp = replace(RELEASED, num_modules=2, rollout="chain")
    target = target_tensors(TINY_V3, context=0.3)
    tensors = target | mtp_tensors(target, TINY_V3, num_modules=2, noise=0.5)
    loaded = transformers_model(write_released(tmp_path / "m", tensors, TINY_V3, 2).folder, TINY_V3)
    total = 0
    for prompt in prompts(4):
        theirs, num_theirs = their_text(loaded, prompt, use_mtp=True)
        ours, num_ours = our_text(tensors, TINY_V3, prompt, mtp)
        assert ours == theirs
        assert num_ours == num_theirs
        total += num_ours
    assert total < 4 * NEW_TOKENS


@pytest.mark.covers(72, 150)
def test_a_glm_module_around_the_same_block_is_transformers(tmp_path: Path) -> None:
    """`glm4_moe_lite`: GLM-4.5's contract, read from the files by the family table alone."""
    model = replace(TINY_V3, yarn=None)
    target = target_tensors(model)
    tensors = target | mtp_tensors(target, model)
    folder = write_released(tmp_path / "m", tensors, model).folder
    file = folder / "config.json"
    kinds = ["dense"] * model.num_dense_layers + ["sparse"] * (model.num_layers - model.num_dense_layers)
    glm = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": kinds}
    file.write_text(json.dumps(json.loads(file.read_text()) | glm))
    loaded = Glm4MoeLiteForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    loaded.generation_config.eos_token_id = None
    loaded.config.num_mtp_layers, loaded.config.mtp_mlp_layer_types = 1, ["sparse"]  # its words for what we read
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == model
    assert checkpoint.mtp_config == FAMILIES["glm4_moe"].contract
    checkpoint.mtp_tensors()  # both gates pass
    saved = 0
    for prompt in prompts(3):
        plain, num_plain = their_text(loaded, prompt, use_mtp=False)
        assert our_text(tensors, model, prompt, None) == (plain, num_plain)
        theirs, num_theirs = their_text(loaded, prompt, use_mtp=True)
        assert our_text(tensors, model, prompt, checkpoint.mtp_config) == (theirs, num_theirs)
        assert theirs == plain
        saved += num_plain - num_theirs
    assert saved > 0
