"""The memory ledger: storages once, owners apart, rows by the page."""

from __future__ import annotations

import pytest
import torch

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.memory import memory_ledger, storages
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.linear import Int8Linear
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from services.gateway.metric_words import PROPOSER_GAUGES, TARGET_GAUGES
from services.process_levels import process_levels

CONFIG = EngineConfig(weights="fp32", page_size=16, num_pages=8, max_model_len=64, max_batch=4)
MTP = MtpConfig(fed_hidden="post", recycled_hidden="post", final_norm_owner="mtp")


def test_a_storage_counts_once_however_it_is_reached() -> None:
    tensor = torch.zeros(10, 4)
    assert sum(storages([tensor, {"again": tensor[2:5]}, (tensor.T,)]).values()) == 160
    assert sum(storages([tensor, tensor.clone()]).values()) == 320
    assert storages([None, 3, "text", torch.float32]) == {}


def test_packed_int8_weights_are_counted() -> None:
    layer = Int8Linear(torch.ones(6, 16), levels=63)
    assert sum(storages(layer).values()) == 6 * 16 + 6 * 8


def key(gauge: str) -> str:
    """As the table of help texts has it."""
    return "kernel_*" if gauge.startswith("kernel_") else gauge


@pytest.mark.covers(49, 105)
def test_the_ledger_tells_owners_apart() -> None:
    main = target_tensors(TINY_V3)
    module = mtp_tensors(main, TINY_V3)
    proposer = ProposerEngine(CONFIG, TINY_V3, MTP, module)
    target = TargetEngine(CONFIG, TINY_V3, main)
    ledger = memory_ledger(target, proposer, branch_rows=8)
    row = TINY_V3.latent_size * 4
    assert (ledger.target_row, ledger.mtp_row) == (TINY_V3.num_layers * row, row)
    assert ledger.branch_rows == 8 * ledger.target_row
    assert (ledger.target_rows, ledger.mtp_rows, ledger.hidden_rows) == (0, 0, 0)
    shared = sum(main[name].numel() * 4 for name in ("model.embed_tokens.weight", "lm_head.weight"))
    alone = sum(storages(proposer.modules).values())
    assert ledger.main_weights >= sum(tensor.numel() * 4 for tensor in main.values())
    assert alone - ledger.mtp_own_weights >= shared, "embedding and head are the target's own objects here"
    own = sum(tensor.numel() * 4 for name, tensor in module.items() if name not in main)
    assert own <= ledger.mtp_own_weights < 1.6 * own, "forms made for speed are counted as well"
    assert alone < sum(tensor.numel() * 4 for tensor in main.values()), "no main layer is among them"

    lease = target.cache.pool.open()
    target.cache.pool.grow(lease, 17)
    grown = memory_ledger(target, None, branch_rows=0)
    assert grown.target_rows == 2 * 16 * ledger.target_row
    assert grown.hidden_rows == 2 * 16 * TINY_V3.hidden_size * 4
    assert (grown.mtp_own_weights, grown.mtp_rows, grown.mtp_row) == (0, 0, 0)
    assert grown.total == ledger.main_weights + grown.target_rows + grown.hidden_rows

    levels = target.levels()
    assert levels["kv_bytes"] == grown.target_rows
    assert levels["hidden_bytes"] == grown.hidden_rows
    assert levels["weight_bytes"] == grown.main_weights
    assert (levels["pages"] - levels["pages_free"], levels["branch_bytes"]) == (2, 0)
    named = {key(name) for name in (*levels, *process_levels())}
    assert named == set(TARGET_GAUGES), "each is described for /metrics"
    assert proposer.levels()["weight_bytes"] == alone
    assert {key(name) for name in proposer.levels()} <= set(PROPOSER_GAUGES)
