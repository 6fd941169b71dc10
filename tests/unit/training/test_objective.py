"""The chunked divergence equals the plain one, gradient included; gradients reach only the module."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_llama import random_document

from seqmtp_serve.training import objective
from seqmtp_serve.training.batches import make_batch
from seqmtp_serve.training.loss import Frozen, batch_losses
from seqmtp_serve.training.mtp_module import MtpModule


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_divergence_equals_autograd_over_chunks(kind: objective.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_CHUNK", 3)
    torch.manual_seed(0)
    draft, target, head = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16), torch.randn(40, 16)
    weights = torch.rand(8)
    plain = objective.plain_divergence(draft, target, head, kind)
    (plain_grad,) = torch.autograd.grad((plain * weights).sum(), draft)
    fast, hits = objective.divergence(draft, target, head, kind=kind)
    (fast_grad,) = torch.autograd.grad((fast * weights).sum(), draft)
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(fast_grad, plain_grad)
    assert torch.equal(hits, (draft @ head.T).argmax(-1) == (target @ head.T).argmax(-1))


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_divergence_of_equal_rows_is_zero(kind: objective.Kind) -> None:
    rows, head = torch.randn(5, 16), torch.randn(40, 16)
    loss, hits = objective.divergence(rows, rows, head, kind=kind)
    assert loss.abs().max() < 1e-5
    assert hits.all()


@pytest.mark.covers(46, 51, 53)
def test_gradients_reach_the_module_and_nothing_else(module: MtpModule, frozen: Frozen) -> None:
    documents = [random_document(20, 6, seed=1), random_document(14, 5, seed=2)]
    batch = make_batch(documents, num_chains=4, depth=3, rng=random.Random(0))
    losses = batch_losses(module, batch, frozen, depth=3)
    sum(loss.total for loss in losses).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    for tensor in (frozen.embed_Vd, frozen.norm_d, frozen.head_Vd, batch.hidden):
        assert tensor.grad is None
        assert not tensor.requires_grad


@pytest.mark.covers(54)
def test_later_steps_train_through_the_fed_back_row(module: MtpModule, frozen: Frozen) -> None:
    """A loss of the third step alone moves the fusion of the first: the recycled row is not detached."""
    batch = make_batch([random_document(20, 6, seed=1)], num_chains=4, depth=3, rng=random.Random(0))
    docs = torch.arange(1)[:, None]
    outputs, rows = module.first_step(batch.hidden[:, :-1], frozen.embed_Vd[batch.tokens[:, 1:-1]], batch.bases_BQ)
    fed = outputs[docs, batch.chains_BM]
    fed.retain_grad()
    starts = batch.bases_BQ[docs, batch.chains_BM]
    module.next_step(fed, frozen.embed_Vd[batch.tokens[docs, starts + 2]], starts, rows).sum().backward()
    assert fed.grad is not None
    assert fed.grad.abs().sum() > 0
