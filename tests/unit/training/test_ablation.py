"""The arms of the ablation: equal compute, equal targets where claimed, and a baseline that is never taken for MTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import RECIPE, longer, make_corpus, trainer_in
from tiny_v3 import CONFIG, random_documents, tiny_v3

from seqmtp_serve.errors import TrainingError
from seqmtp_serve.training.joint.ablation import ARMS, ablate, arm_recipe, cost_of_token
from seqmtp_serve.training.joint.export import export_run
from seqmtp_serve.training.joint_terms import joint_terms
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import ObjectiveContract, Wiring
from seqmtp_serve.training.packing import compile_stream, pack

SEQUENTIAL = ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3),)))
INDEPENDENT = replace(SEQUENTIAL, wiring=Wiring.INDEPENDENT)


@pytest.mark.covers(162, 164)
def test_independent_heads_share_the_targets_and_not_the_chain() -> None:
    """A change in module 1 moves depth two's loss in a chain only; both have the same rows to learn."""
    model = tiny_v3(2).eval()
    stream = compile_stream(pack(random_documents([9, 5])), 2)
    with torch.no_grad():
        before = {c.wiring: joint_terms(model, stream, c)[1] for c in (SEQUENTIAL, INDEPENDENT)}
        model.mtp_layer(1).eh_proj.weight.mul_(1.5)
        after = {c.wiring: joint_terms(model, stream, c)[1] for c in (SEQUENTIAL, INDEPENDENT)}
    assert not torch.equal(before[Wiring.SEQUENTIAL][1].nll_sum, after[Wiring.SEQUENTIAL][1].nll_sum)
    assert torch.equal(before[Wiring.INDEPENDENT][1].nll_sum, after[Wiring.INDEPENDENT][1].nll_sum)
    assert not torch.equal(before[Wiring.INDEPENDENT][0].nll_sum, after[Wiring.INDEPENDENT][0].nll_sum)


@pytest.mark.covers(164)
def test_an_independent_head_reads_no_shifted_token() -> None:
    """Through the trunk it sees tokens up to its base only."""
    model = tiny_v3(1).eval()
    stream = compile_stream(pack(random_documents([8])), 1)
    other = stream.depths[0].tokens_N.flip(0)
    changed = replace(stream, depths=(replace(stream.depths[0], tokens_N=other),))
    with torch.no_grad():
        losses = {
            (c.wiring, at): float(joint_terms(model, s, c)[1][0].nll_sum)
            for c in (SEQUENTIAL, INDEPENDENT)
            for at, s in enumerate((stream, changed))
        }
    assert losses[Wiring.INDEPENDENT, 0] == losses[Wiring.INDEPENDENT, 1]
    assert losses[Wiring.SEQUENTIAL, 0] != losses[Wiring.SEQUENTIAL, 1]


@pytest.mark.covers(162)
def test_arms_cost_the_same() -> None:
    base = longer(RECIPE, 400)
    spent = {}
    for arm in ARMS:
        recipe = arm_recipe(base, arm, 1, 0.3)
        spent[arm.name] = recipe.optimization.tokens * cost_of_token(CONFIG, arm.targets)
        assert recipe.objective.schedule.at(0) == (0.3 if arm.targets else 0.0)
    assert max(spent.values()) == pytest.approx(min(spent.values()), rel=1e-3)
    sequential, independent = (arm_recipe(base, arm, 1, 0.3) for arm in ARMS[2:])
    assert replace(independent, name=sequential.name, objective=sequential.objective) == sequential
    weights = sum(p.numel() for name, p in tiny_v3(1).named_parameters() if p.ndim > 1 and ".gate." not in name)
    idle = 3 * CONFIG.hidden_size * CONFIG.moe.intermediate_size * (CONFIG.moe.num_experts - CONFIG.moe.top_k)
    embedding = CONFIG.vocab_size * CONFIG.hidden_size
    head_again = embedding  # depth one multiplies by the head once more
    assert cost_of_token(CONFIG, 1) == weights - 2 * idle - embedding + head_again


@pytest.mark.covers(147, 162)
def test_every_arm_is_trained_and_judged_by_its_main_model(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    found = ablate(longer(RECIPE, 3), corpus, tmp_path / "out", seeds=[1, 2], weight=0.3, most_tokens=60)
    assert [line["arm"] for line in found] == [arm.name for arm in ARMS]
    assert [line["tokens"] for line in found] == sorted((line["tokens"] for line in found), reverse=True)
    for line in found:
        assert len(line["main_nll"]) == 2
        assert line["standard_error"] > 0
    assert len({line["mean"] for line in found}) == len(ARMS)


@pytest.mark.covers(6, 164)
def test_independent_heads_are_not_exported_as_mtp(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    recipe = replace(RECIPE, objective=replace(RECIPE.objective, wiring=Wiring.INDEPENDENT))
    for _ in trainer_in(tmp_path / "run", corpus, recipe).run(save_every_s=1e9, until=1):
        pass
    with pytest.raises(TrainingError, match="independent heads are a baseline"):
        export_run(tmp_path / "run", corpus, tmp_path / "out")
    export_run(tmp_path / "run", corpus, tmp_path / "out", with_mtp=False)
