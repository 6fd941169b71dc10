"""A last phase of joint training: the main model frozen, its MTP layer trained on the model's own text, self-fed.

Joint training feeds the layer true text, one step at a time. A server feeds it text the model wrote and, from the
second draft on, the layer's own states. This phase trains exactly that, against the main model's own distribution: the
fitting loop of `seqmtp fit` (`training/trainer.py`) on `ChainedLayer`. Embedding, head, norms and every main layer keep
their bits; the result is a run folder like the one it came from.

    recipe.json, latest.json, step-…    as of any run; latest.json says how it was refined
    refine/plan.json                    what was asked, and of which checkpoint
    refine/samples, refine/fit          shards of own text; log and state of the loop: an interrupted phase goes on
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from seqmtp_serve.checkpoint.fingerprint import file_fingerprint
from seqmtp_serve.errors import CheckpointNotWritten, InvalidField, TrainingError
from seqmtp_serve.training.acceptance import Acceptance, measure, total
from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.joint.export import trained_model
from seqmtp_serve.training.joint.own_samples import SamplePlan, collect_samples
from seqmtp_serve.training.joint.recipe import Recipe
from seqmtp_serve.training.joint.run_files import REFINED, Progress, latest, save_refined
from seqmtp_serve.training.joint.self_fed import frozen_parts
from seqmtp_serve.training.mtp_objective import Wiring
from seqmtp_serve.training.trainer import FitSettings, Trainer, is_held_out, load_documents
from seqmtp_serve.training.v3.chained import ChainedLayer
from seqmtp_serve.training.v3.products import Arithmetic

_CHECKED = 64  # greedy samples kept out of training, on which progress is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinePlan:
    samples: SamplePlan
    fit: FitSettings

    def record(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


def refine(run: Path, corpus: Corpus, out: Path, plan: RefinePlan, *, save_every_s: float = 120) -> dict[str, Any]:
    """Carry the phase out, or go on with it; returns its record.

    Raises TrainingError for a run or a folder it cannot be done with, InvalidField for a plan that does not fit the
    model, CheckpointNotWritten when the disk is full.
    """
    recipe = _begin(run, out, plan)
    try:
        return _carry_out(run, corpus, out, plan, recipe, save_every_s)
    except (OSError, SafetensorError) as fault:
        raise CheckpointNotWritten(f"{out}: {fault}; make room and start the same command again") from fault


def _begin(run: Path, out: Path, plan: RefinePlan) -> Recipe:
    """Refuse what cannot work, before anything is computed; leave the plan in `out`."""
    if run.resolve() == out.resolve():
        raise InvalidField(f"out: {out} is the run itself, which stays as it is; give another folder", param="out")
    recipe, model, found = trained_model(run)
    ChainedLayer(model)
    if recipe.objective.wiring is not Wiring.SEQUENTIAL:
        raise TrainingError(f"{run}: {recipe.objective.wiring} heads are a baseline, and no MTP layer to refine")
    longest, samples = recipe.model.max_position, plan.samples
    least, most = samples.prompt_lens
    if not 2 <= least <= most or samples.reply_len < 4 or most + samples.reply_len > longest:
        raise InvalidField(f"prompt and reply: at least 2 and 4 tokens, at most {longest} together", param="reply")
    step = run / f"step-{found['progress']['step']:08d}"
    base = {path.name: file_fingerprint(path) for path in sorted(step.glob("rank*.safetensors"))}
    record = {"step": found["progress"]["step"], "sha256": base, "refined_before": found.get(REFINED), **plan.record()}
    path = out / "refine" / "plan.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != record:
        raise TrainingError(f"{path}: another plan, or another step of the run, was begun here; give another --out")
    if not path.exists() and latest(out) is not None:
        raise TrainingError(f"{out}: holds a run already; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(run / "recipe.json", out / "recipe.json")
    return recipe


def _carry_out(
    run: Path, corpus: Corpus, out: Path, plan: RefinePlan, recipe: Recipe, save_every_s: float
) -> dict[str, Any]:
    arithmetic = Arithmetic(products=getattr(torch, recipe.optimization.products))
    shards = collect_samples(trained_model(run)[1], corpus, plan.samples, out / "refine" / "samples")
    _, model, found = trained_model(run, arithmetic)
    model.requires_grad_(False)
    module = ChainedLayer(model)
    module.requires_grad_(True)
    frozen = frozen_parts(model, arithmetic.products)
    documents = load_documents(shards[0].parent, tuple(path.name for path in shards))
    if not any(len(each.tokens) - each.prompt_len >= 4 for each in documents if not is_held_out(each)):
        raise TrainingError(f"{run}: its model ends every continuation at once; train it longer first")
    checked = [document for document in documents if is_held_out(document) and document.greedy][:_CHECKED]
    everything = torch.arange(recipe.model.vocab_size)

    def acceptance() -> dict[str, Any]:
        found = measure(module, checked, frozen, everything, depth=plan.fit.depth)
        return _reported(total(found, plan.fit.depth))

    before = _once(out / "refine" / "before.json", acceptance())
    trainer = Trainer(module, frozen, plan.fit, shards=shards[0].parent, folder=out / "refine" / "fit")
    trainer.run(save_every_s=save_every_s, evaluate=acceptance)
    record = {
        "objective": "the main model frozen; mean over self-fed depths (weighted) of the divergence of the draft from "
        f"the main model's own distribution ({plan.fit.divergence}), mean over reply rows of its own text",
        "trained": f"model.layers.{recipe.model.num_layers}.* but its copies of embedding, norm and head",
        "products": recipe.optimization.products,
        "from_step": found["progress"]["step"],
        "refined_before": found.get(REFINED),
        **plan.record(),
        "documents": len(documents),
        "reply_tokens": sum(len(document.tokens) - document.prompt_len for document in documents),
        "rows_trained": trainer.state.rows,
        "hours_of_the_loop": round(trainer.state.seconds / 3600, 3),
        "own_text_kept_out": {"before": before, "after": acceptance()},
    }
    save_refined(out, model, Progress(**found["progress"]), recipe.layout, record)
    return record


def _once(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """What was found the first time: an interrupted phase starts again with a changed layer."""
    if not path.exists():
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    first: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return first


def _reported(found: Acceptance) -> dict[str, Any]:
    return {
        "rounds": found.num_rounds,
        "by_position": [round(share, 4) for share in found.by_position],
        "e_r": round(found.expected_progress, 4),
    }
