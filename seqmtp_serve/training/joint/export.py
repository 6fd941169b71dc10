"""A run as a checkpoint of the released layout: bf16 safetensors, config.json, tokenizer, and the record of the run.

MTP layers carry copies of the embedding, the norm and the head, as released files do; a reader verifies and aliases
them. `manifest.json` declares what no shape reveals, with a fingerprint of every tensor and the whole record of the
run; without MTP layers the result is an ordinary checkpoint of the main model, and the record is `training.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seqmtp_serve.checkpoint.fusion import projection_for_he
from seqmtp_serve.checkpoint.manifest import canonical_json
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest, write_mtp_manifest
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.seal import sealed
from seqmtp_serve.errors import TrainingError
from seqmtp_serve.training.joint.corpus import RECORD, TOKENIZER
from seqmtp_serve.training.joint.recipe import Recipe, recipe_from_record
from seqmtp_serve.training.joint.run_files import REFINED, latest, own_tensors, read_rank
from seqmtp_serve.training.mtp_objective import Wiring
from seqmtp_serve.training.v3.hf_config import hf_config
from seqmtp_serve.training.v3.model import V3Model
from seqmtp_serve.training.v3.products import FAST, Arithmetic

TRAINING, TEMPLATE = "training.json", "chat_template.jinja"
# A model that continues text has no turns: a conversation is its messages' texts, each but a reply on a new line.
_AS_ONE_TEXT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if not loop.first and message.role != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{{ message.content }}{% endfor %}\n"
)
# What the released files keep in float32, and transformers insists on.
_FLOAT32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


def trained_model(folder: Path, arithmetic: Arithmetic = FAST) -> tuple[Recipe, V3Model, dict[str, Any]]:
    """The recipe, the whole model of a run's latest step (experts of all ranks), and what latest.json says."""
    found = latest(folder)
    if found is None:
        raise TrainingError(f"{folder}: no step was saved yet")
    recipe = recipe_from_record(json.loads((folder / "recipe.json").read_text(encoding="utf-8")))
    model = V3Model(recipe.model, recipe.mtp, arithmetic=arithmetic).eval()
    stored: dict[str, Tensor] = {}
    for rank in range(found["ranks"]):
        stored |= read_rank(folder, found["progress"]["step"], rank)
    with torch.no_grad():
        for name, tensor in own_tensors(model).items():
            tensor.copy_(stored[f"model.{name}"])
    return recipe, model, found


def released_tensors(model: V3Model, *, with_mtp: bool = True) -> dict[str, Tensor]:
    """Every tensor by its released name, in the dtype it is stored in and, for the fusion, in the released order."""
    first_mtp, order = model.config.num_layers, model.mtp.fusion_order
    found = {}
    for name, tensor in model.state_dict().items():
        is_mtp = name.startswith("model.layers.") and int(name.split(".")[2]) >= first_mtp
        if with_mtp or not is_mtp:
            dtype = torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16
            if name.endswith("eh_proj.weight") and order == "he":
                tensor = projection_for_he(tensor, model.config.hidden_size, "eh")  # the swap is its own inverse
            found[name] = tensor.detach().to(dtype).clone()
    return found


def export_run(run: Path, corpus: Path, out: Path, *, with_mtp: bool = True) -> Mapping[str, Any]:
    """Write `out`; returns the record of the run that lies beside the weights. Raises TrainingError without a step."""
    recipe, model, found = trained_model(run)
    if with_mtp and recipe.objective.wiring is not Wiring.SEQUENTIAL:
        raise TrainingError(f"{run}: {recipe.objective.wiring} heads are a baseline; export them --without-mtp")
    out.mkdir(parents=True, exist_ok=True)
    tensors = released_tensors(model, with_mtp=with_mtp)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(recipe.model, recipe.mtp) | ({} if with_mtp else {"num_nextn_predict_layers": 0})
    _write(out / "config.json", config)
    _write(
        out / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    )
    if (corpus / TOKENIZER).exists():
        shutil.copyfile(corpus / TOKENIZER, out / TOKENIZER)
        ends = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
        _write(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | ends)
        (out / TEMPLATE).write_text(_AS_ONE_TEXT, encoding="utf-8")
    record = {
        "recipe": recipe.record(),
        "corpus": json.loads((corpus / RECORD).read_text(encoding="utf-8")),
        "progress": found["progress"],
        "ranks": found["ranks"],
        "refined": found.get(REFINED),
        "parameters": {
            "stored": sum(tensor.numel() for tensor in tensors.values()),
            "unique": sum(parameter.numel() for parameter in model.parameters()),
        },
    }
    if with_mtp:
        write_mtp_manifest(out, _declared(out, recipe, record))
    else:
        _write(out / TRAINING, record)
    return record


def _declared(out: Path, recipe: Recipe, record: Mapping[str, Any]) -> MtpManifest:
    """The sealed record of the MTP layers in `out`, with what they were trained on and how."""
    mtp = recipe.mtp
    return replace(
        sealed(open_checkpoint(str(out))),
        fed_hidden=mtp.fed_hidden,
        recycled_hidden=mtp.recycled_hidden,
        position0_zeroing=mtp.zero_position0,
        rollout=mtp.rollout,
        training_json=canonical_json(record),
    )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
