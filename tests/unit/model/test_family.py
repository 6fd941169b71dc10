"""The seam between engines and model families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.pages import Owner
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.family import ModelConfig, build_layers, build_trunk, numerics_for
from seqmtp_serve.model.synthetic import TINY, TINY_V3, target_tensors

CONFIG = EngineConfig(weights="fp32", page_size=8, num_pages=4, max_model_len=32)
MODELS = {"llama": TINY, "deepseek": TINY_V3}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_engine_needs_no_more_than_the_seam(model: ModelConfig) -> None:
    """The same calls for either family, on a cache of the size its configuration names."""
    tensors, numerics = target_tensors(model), numerics_for(CONFIG, model)
    trunk = build_trunk(tensors, model, CONFIG.page_size, CONFIG.max_model_len, numerics)
    cache = PagedCache(Owner.TARGET, CONFIG, model, model.num_layers)
    assert cache.kv_LSE.shape == (model.num_layers, 32, model.cache_row_size)
    state = trunk.forward([3, 1, 4], [Span(pages=[2], start=0, num_rows=3)], cache.kv_LSE)
    assert trunk.features(state).shape == (3, model.hidden_size)
    assert trunk.logits(state).shape == (3, model.vocab_size)
    written = (cache.kv_LSE != 0).any(-1).nonzero()[:, 1].unique().tolist()
    assert written == [16, 17, 18]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_layers_of_a_family_are_its_trunks(model: ModelConfig) -> None:
    tensors, numerics = target_tensors(model), numerics_for(CONFIG, model)
    layers = build_layers(model, CONFIG.page_size, CONFIG.max_model_len, numerics)
    pool = torch.zeros(model.num_layers, 32, model.cache_row_size)
    span, ids = Span(pages=[0], start=0, num_rows=5), [5, 3, 1, 2, 4]
    state = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    shared = layers.plan([span], torch.arange(5))
    for layer in range(model.num_layers):
        state = layers.block(tensors, layer)(state, pool[layer], shared)
    trunk = build_trunk(tensors, model, CONFIG.page_size, CONFIG.max_model_len, numerics)
    assert torch.equal(state, trunk.forward(ids, [span], torch.zeros_like(pool)))


@pytest.mark.parametrize("name", ["per_head_rows_agree", "attention_rows_agree"])
def test_products_of_this_family_that_disagree_run_in_fixed_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine cannot keep a row's bits in products of these shapes, the slow form is taken, and only then."""
    monkeypatch.setattr(f"seqmtp_serve.model.family.{name}", lambda *_: False)
    assert numerics_for(CONFIG, TINY_V3).fixed_tiles
    assert not numerics_for(replace(CONFIG, numerics="fast"), TINY_V3).fixed_tiles
