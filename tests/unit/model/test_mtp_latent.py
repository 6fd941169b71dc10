"""MTP modules around a latent-attention, mixture-of-experts block, against the plain reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmtp_serve import oracle
from seqmtp_serve.errors import InternalError
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.mtp import DepthPool, MtpModule, build_modules
from seqmtp_serve.model.mtp_families import FAMILIES
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors

PAGE, MAX_LEN, LEN = 8, 64, 20
RELEASED = FAMILIES["deepseek_v3"].contract
TARGET = target_tensors(TINY_V3)
MTP = mtp_tensors(TARGET, TINY_V3, num_modules=2)
FIRST, SECOND = "model.layers.3.", "model.layers.4."
IDS = torch.randint(TINY_V3.vocab_size, (LEN + 2,), generator=torch.Generator().manual_seed(4)).tolist()
HIDDEN = oracle.forward(TARGET, TINY_V3, IDS[:LEN])[1]


def module(mtp: MtpConfig = RELEASED, tensors: dict[str, Tensor] = MTP, depth: int = 1) -> MtpModule:
    return MtpModule(tensors, TINY_V3, mtp, PAGE, MAX_LEN, Numerics(), depth=depth)


def rows(built: MtpModule, consumed: Tensor, ids: list[int] = IDS) -> Tensor:
    depth = built.depth
    pool = DepthPool(depth=depth, rows_SE=torch.full((8 * PAGE, TINY_V3.cache_row_size), 3.0))
    span = Span(pages=[0, 1, 2, 3], start=depth, num_rows=len(consumed), first_slot=depth)
    next_ids = torch.tensor(ids[depth : depth + len(consumed)])
    return built.forward(consumed, next_ids, torch.arange(len(consumed)), [span], pool)


@pytest.mark.covers(15, 16, 17, 18, 19)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_module_is_the_reference(family: str) -> None:
    mtp = FAMILIES[family].contract
    built = module(mtp)
    output = rows(built, built.fed(HIDDEN))
    fed = HIDDEN.double()
    if mtp.fed_hidden == "post":
        fed = oracle.rms_norm(fed, TARGET["model.norm.weight"], TINY_V3)
    expected = oracle.mtp_rows(MTP, TINY_V3, mtp, fed, IDS[1 : LEN + 1])
    normed = oracle.mtp_final_norm(MTP, TINY_V3, mtp, expected)
    assert torch.allclose(output.double(), expected, atol=2e-5)
    assert torch.allclose(built.draft_logits(output).double(), normed @ TARGET["lm_head.weight"].double().T, atol=2e-4)
    recycled = normed if mtp.recycled_hidden == "post" else expected
    assert torch.allclose(built.recycled(output).double(), recycled, atol=2e-5)


@pytest.mark.covers(17)
def test_the_block_is_a_main_layer_with_experts() -> None:
    """Not a dense stub: each routed expert that a row chose changes it, and so does the shared one."""
    base = rows(module(), HIDDEN)
    for name in ("mlp.shared_experts.down_proj.weight", "self_attn.kv_b_proj.weight"):
        assert not torch.allclose(rows(module(tensors=MTP | {FIRST + name: 0 * MTP[FIRST + name]}), HIDDEN), base)
    names = [f"{FIRST}mlp.experts.{expert}.down_proj.weight" for expert in range(TINY_V3.moe.num_experts)]
    changed = [rows(module(tensors=MTP | {name: 0 * MTP[name]}), HIDDEN) != base for name in names]
    touched = torch.stack([each.any(-1) for each in changed]).sum(0)
    assert int(touched.min()) >= 1
    assert int(touched[0]) == TINY_V3.moe.top_k, "the first row sees itself alone: its own experts and no other's"


@pytest.mark.covers(64, 113)
def test_a_norm_of_its_own_is_honoured() -> None:
    """`shared_head.norm` is a tensor of its own, and not the main norm: using the main one shows in the logits."""
    own, main = module(), module(replace(RELEASED, final_norm_owner="main"))
    output = rows(own, own.fed(HIDDEN))
    assert not torch.allclose(own.draft_logits(output), main.draft_logits(output), atol=1e-2)
    equal = MTP | {f"{FIRST}shared_head.norm.weight": MTP["model.norm.weight"]}
    assert torch.equal(module(tensors=equal).draft_logits(output), main.draft_logits(output))


@pytest.mark.covers(64, 135)
def test_recycling_before_the_norm_is_another_contract() -> None:
    """h and norm(h) differ by the gain, which the next hnorm does not undo."""
    post, pre = module(), module(replace(RELEASED, recycled_hidden="pre"))
    output = rows(post, post.fed(HIDDEN))
    fed_post, fed_pre = (rows(post, each.recycled(output)) for each in (post, pre))
    assert not torch.allclose(fed_post, fed_pre, atol=1e-2)
    doubled = post.draft_logits(post.recycled(output))
    assert not torch.allclose(doubled, post.draft_logits(output), atol=1e-2), "two norms before the head must show"


@pytest.mark.covers(60, 112)
def test_the_other_fusion_order_shows() -> None:
    size, name = TINY_V3.hidden_size, f"{FIRST}eh_proj.weight"
    swapped = MTP | {name: torch.cat((MTP[name][:, size:], MTP[name][:, :size]), 1)}
    right = rows(module(), HIDDEN)
    assert torch.equal(rows(module(replace(RELEASED, fusion_order="he"), swapped), HIDDEN), right)
    assert not torch.allclose(rows(module(tensors=swapped), HIDDEN), right, atol=0.1)


@pytest.mark.covers(22, 111, 160)
def test_a_row_consumes_the_token_at_its_depth_and_none_after_it() -> None:
    built = module(depth=2)
    base = rows(built, HIDDEN)
    for changed in (5, 9):
        other = [*IDS]
        other[changed] = (other[changed] + 1) % TINY_V3.vocab_size
        same = (rows(built, HIDDEN, other) == base).all(-1)
        first = changed - built.depth  # the first row that consumes the token, at its base + 2
        assert bool(same[:first].all())
        assert not bool(same[first])


@pytest.mark.covers(21)
def test_depth_two_reads_depth_one() -> None:
    first, second = build_modules(MTP, TINY_V3, replace(RELEASED, num_modules=2), PAGE, MAX_LEN, Numerics())
    chained = rows(second, first.recycled(rows(first, first.fed(HIDDEN))))
    assert not torch.allclose(chained, rows(second, second.fed(HIDDEN)), atol=1e-2)
    own = oracle.mtp_final_norm(MTP, TINY_V3, RELEASED, rows(first, first.fed(HIDDEN)).double())
    expected = oracle.mtp_rows(MTP, TINY_V3, RELEASED, own, IDS[2 : LEN + 2], module=1)
    assert torch.allclose(chained.double(), expected, atol=5e-5)


@pytest.mark.covers(84, 91, 123)
def test_rows_of_another_depth_are_refused() -> None:
    first, second = module(), module(depth=2)
    pool = DepthPool(depth=1, rows_SE=torch.zeros(8 * PAGE, TINY_V3.cache_row_size))
    span = Span(pages=[0, 1, 2], start=2, num_rows=1, first_slot=2)
    given = (HIDDEN[:1], torch.tensor(IDS[1:2]), torch.tensor([0]), [span])
    with pytest.raises(InternalError, match="depth 1 were given to the module of depth 2"):
        second.forward(*given, pool)
    first.forward(*given, pool)


@pytest.mark.covers(91)
def test_the_same_hidden_row_is_cached_differently_by_each_module() -> None:
    pools = [DepthPool(depth=depth, rows_SE=torch.zeros(8 * PAGE, TINY_V3.cache_row_size)) for depth in (1, 2)]
    for pool in pools:
        span = Span(pages=[0], start=pool.depth, num_rows=1, first_slot=pool.depth)
        module(depth=pool.depth).forward(HIDDEN[:1], torch.tensor([5]), torch.tensor([0]), [span], pool)
    assert not torch.allclose(pools[0].rows_SE[1], pools[1].rows_SE[2], atol=1e-2)


@pytest.mark.covers(49, 114)
def test_modules_share_the_main_models_objects() -> None:
    first, second = build_modules(MTP, TINY_V3, replace(RELEASED, num_modules=2), PAGE, MAX_LEN, Numerics())
    assert first._main is second._main
    assert first._main.embed_Vd.data_ptr() == TARGET["model.embed_tokens.weight"].data_ptr()
