"""A run on documents it never read: the main model alone, and what its MTP chain adds, reported apart.

Main-only figures are those of the model with its MTP layers deleted: nothing in them depends on the layers. The
MTP-assisted ones are what a speculative server would see of teacher-forced text: whether the draft's argmax is the main
model's own next choice (greedy acceptance), and the mass both distributions share (acceptance at temperature 1).

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.packing import CompiledStream, RowTensors, compile_stream, pack
from seqmtp_serve.training.v3.model import V3Model


@torch.no_grad()
def evaluate(model: V3Model, corpus: Corpus, *, window: int, most_tokens: int) -> dict[str, Any]:
    """Over the first windows of the corpus's documents, `most_tokens` in all."""
    main_nll = main_rows = 0.0
    depths = [{"nll": 0.0, "rows": 0.0, "greedy": 0.0, "shared": 0.0} for _ in range(model.mtp.num_modules)]
    read = 0
    for index in range(len(corpus)):
        tokens = corpus.document(index)[: min(window, most_tokens - read)]
        if len(tokens) < 3:
            continue
        read += len(tokens)
        stream = compile_stream(pack([tokens]), model.mtp.num_modules)
        state = model.main_states(stream.main)
        main_NV = F.log_softmax(model.logits(state), -1)
        main_nll += _nll(main_NV, stream.main)
        main_rows += len(stream.main.labels_M)
        for depth, rows in enumerate(stream.depths, start=1):
            state = model.mtp_states(depth, state, rows)
            draft_NV = F.log_softmax(model.logits(state, depth), -1)
            for name, value in _compared(draft_NV, main_NV, stream, depth).items():
                depths[depth - 1][name] += value
        if read >= most_tokens:
            break
    return {
        "tokens": read,
        "main_only": {"nll": main_nll / max(1, main_rows), "rows": int(main_rows)},
        "mtp_assisted": [
            {
                "depth": depth,
                "fed": "teacher-forced",
                "nll": found["nll"] / max(1, found["rows"]),
                "greedy_acceptance": found["greedy"] / max(1, found["rows"]),
                "acceptance_at_temperature_1": found["shared"] / max(1, found["rows"]),
                "rows": int(found["rows"]),
            }
            for depth, found in enumerate(depths, start=1)
        ],
    }


def _compared(draft_NV: Tensor, main_NV: Tensor, stream: CompiledStream, depth: int) -> dict[str, float]:
    """The draft of base i is for the token that the main row of i + depth predicts."""
    rows = stream.depths[depth - 1]
    main_row = {base: row for row, base in enumerate(stream.main.bases)}
    labelled = [rows.bases[row] for row in rows.loss_rows_M.tolist()]
    target_MV = main_NV[[main_row[base + depth] for base in labelled]] if labelled else main_NV[:0]
    draft_MV = draft_NV[rows.loss_rows_M]
    return {
        "nll": _nll(draft_NV, rows),
        "rows": len(labelled),
        "greedy": float((draft_MV.argmax(-1) == target_MV.argmax(-1)).sum()),
        "shared": float(torch.minimum(draft_MV.exp(), target_MV.exp()).sum()),
    }


def _nll(log_probs_NV: Tensor, rows: RowTensors) -> float:
    return float(-log_probs_NV[rows.loss_rows_M].gather(1, rows.labels_M[:, None]).sum())
