"""What is trained is what is served: the trainer's model and the engine's, on the same tensors, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3

from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import YarnConfig
from seqmtp_serve.model.family import build_trunk
from seqmtp_serve.model.mtp import DepthPool, build_modules
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.training.packing import compile_stream, pack

PAGE, MAX_LEN, LEN = 8, 64, 30
PAGES = [3, 0, 2, 5, 1, 4]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.covers(17, 31, 35, 150)
@pytest.mark.parametrize("yarn", [None, YarnConfig(factor=4.0, original_max_position=16)], ids=["plain", "yarn"])
@torch.no_grad()
def test_the_engine_computes_what_was_trained(yarn: YarnConfig | None) -> None:
    config = replace(CONFIG, yarn=yarn)
    model = tiny_v3(1, config=config).eval()
    document = random_documents([LEN])[0]
    ours = model.main_states(compile_stream(pack([document]), 1).main)
    trunk = build_trunk(model.state_dict(), config, PAGE, MAX_LEN, Numerics())
    pool = torch.zeros(config.num_layers, len(PAGES) * PAGE, config.cache_row_size)
    theirs = trunk.forward(document, [Span(pages=PAGES, start=0, num_rows=LEN)], pool)
    torch.testing.assert_close(trunk.logits(theirs), model.logits(ours), **CLOSE)


@pytest.mark.covers(21, 23, 60, 64, 150)
@pytest.mark.parametrize("hidden", ["pre", "post"])
@pytest.mark.parametrize("owner", ["main", "mtp"])
@pytest.mark.parametrize("order", ["eh", "he"])
@torch.no_grad()
def test_the_engines_modules_compute_the_trained_chain(
    hidden: Literal["pre", "post"], owner: Literal["main", "mtp"], order: Literal["eh", "he"]
) -> None:
    """Depth two is fed depth one's row: before or after the norm, as declared; states and logits apart."""
    mtp = MtpConfig(
        num_modules=2, fed_hidden=hidden, recycled_hidden=hidden, final_norm_owner=owner, fusion_order=order
    )
    model = tiny_v3(mtp=mtp).eval()
    document = random_documents([LEN])[0]
    stream = compile_stream(pack([document]), 2)
    state = model.main_states(stream.main)
    modules = build_modules(model.state_dict(), CONFIG, mtp, PAGE, MAX_LEN, Numerics())
    fed = modules[0].fed(state)
    for depth, (module, rows) in enumerate(zip(modules, stream.depths, strict=True), start=1):
        state = model.mtp_states(depth, state, rows)
        pool = DepthPool(depth=depth, rows_SE=torch.zeros(len(PAGES) * PAGE, CONFIG.cache_row_size))
        span = Span(pages=PAGES, start=depth, num_rows=len(rows.bases), first_slot=depth)
        theirs = module.forward(fed[rows.previous_N], rows.tokens_N, rows.positions_N, [span], pool)
        torch.testing.assert_close(theirs, state, **CLOSE)
        torch.testing.assert_close(module.draft_logits(theirs), model.logits(state, depth), **CLOSE)
        fed = module.recycled(theirs)
