"""Which token each row consumes and which it is asked for, by hand on six tokens and then in batches."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_llama import SHAPE, random_document

from seqmtp_serve.training.batches import epoch_batches, first_counted_base, make_batch
from seqmtp_serve.training.loss import DepthLoss, Frozen, batch_losses
from seqmtp_serve.training.mtp_module import MtpModule, Rows
from seqmtp_serve.training.shards import Document


class Spy(MtpModule):
    """Records (base, token) of each row it is given; embeddings are told apart by their first column."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.first: list[tuple[int, int]] = []
        self.later: dict[int, set[tuple[int, int]]] = {}

    def first_step(
        self, hidden_BTd: torch.Tensor, embed_BTd: torch.Tensor, wanted_BQ: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        self.first = [(base, int(embed_BTd[0, base, 0])) for base in wanted_BQ[0].tolist()]
        assert torch.equal(hidden_BTd[0, :, 0].long(), torch.arange(hidden_BTd.shape[1]))
        return super().first_step(hidden_BTd, embed_BTd, wanted_BQ)

    def next_step(
        self, hidden_BMd: torch.Tensor, embed_BMd: torch.Tensor, starts_BM: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        step = len(rows.chain) + 2
        pairs = zip((starts_BM[0] + step - 1).tolist(), embed_BMd[0, :, 0].long().tolist(), strict=True)
        self.later[step] = set(pairs)
        return super().next_step(hidden_BMd, embed_BMd, starts_BM, rows)


def numbered_document(num_tokens: int, prompt_len: int) -> Document:
    """Token i is i, and the first entry of hidden row i is i."""
    hidden = torch.randn(num_tokens, SHAPE.hidden_size)
    hidden[:, 0] = torch.arange(num_tokens)
    return Document(tokens=torch.arange(num_tokens), hidden=hidden.bfloat16(), prompt_len=prompt_len, greedy=True)


@pytest.mark.covers(23, 24, 26, 27, 53)
def test_six_tokens_by_hand(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens x0..x5, reply from x2. Base i takes x_{i+1}; the first counted label is x3, the last x5."""
    embed = frozen.embed_Vd.clone()
    embed[:, 0] = torch.arange(len(embed))
    numbered = Frozen(embed_Vd=embed, norm_d=frozen.norm_d, head_Vd=frozen.head_Vd, norm_eps=frozen.norm_eps)
    asked: list[list[int]] = []

    def record(frozen: Frozen, draft: torch.Tensor, target: torch.Tensor, sharpness: float, kind: str) -> DepthLoss:
        asked.append(target[:, 0].long().tolist())
        return DepthLoss(total=draft.sum(), num_rows=len(draft), hits=0)

    monkeypatch.setattr("seqmtp_serve.training.loss._depth_loss", record)
    spy = Spy()
    batch = make_batch([numbered_document(6, 2)], num_chains=3, depth=3, rng=random.Random(0))
    batch_losses(spy, batch, numbered, depth=3)
    assert spy.first == [(1, 2), (2, 3), (3, 4)]  # (h1, x2) -> x3, (h2, x3) -> x4, (h3, x4) -> x5
    assert {(2, 3), (3, 4)} <= spy.later[2]  # chains of bases 1 and 2
    assert (3, 4) in spy.later[3]  # chain of base 1
    # labels come from the target's row one before the label: h_{i+1} predicts x_{i+2}
    assert asked == [[2, 3, 4], [3, 4], [4]]


@pytest.mark.covers(25, 33)
def test_padding_does_not_count(module: MtpModule, frozen: Frozen) -> None:
    """A batch of two documents of different length loses what the two lose alone."""
    documents = [random_document(20, 6, seed=1), random_document(11, 4, seed=2)]

    def losses(docs: list[Document]) -> list[tuple[float, int]]:
        batch = make_batch(docs, num_chains=100, depth=3, rng=random.Random(0))
        return [(float(x.total.detach()), x.num_rows) for x in batch_losses(module, batch, frozen, depth=3)]

    together, alone = losses(documents), [losses([doc]) for doc in documents]
    for depth in range(3):
        assert together[depth][1] == sum(part[depth][1] for part in alone)
        assert together[depth][0] == pytest.approx(sum(part[depth][0] for part in alone), rel=1e-4)


@pytest.mark.covers(43)
def test_label_counts_by_depth() -> None:
    doc = random_document(20, 6, seed=1)
    batch = make_batch([doc], num_chains=100, depth=3, rng=random.Random(0))
    labels = 20 - 7  # x7..x19
    assert int(batch.live_BQ.sum()) == labels
    assert [int((batch.chain_len_BM >= k).sum()) for k in (1, 2, 3)] == [labels, labels - 1, labels - 2]
    assert batch.bases_BQ[0, 0] == first_counted_base(doc) == 5


def test_an_epoch_holds_every_document_once_in_an_order_of_its_seed() -> None:
    documents = [random_document(10 + i % 7, 4, seed=i) for i in range(40)]

    def epoch(seed: int, epoch: int) -> list[tuple[int, ...]]:
        batches = epoch_batches(documents, batch_rows=64, num_chains=2, depth=2, seed=seed, epoch=epoch)
        return [tuple(row) for batch in batches for row in batch.tokens[:, :8].tolist()]

    expected = sorted(tuple(doc.tokens[:8].tolist()) for doc in documents)
    assert sorted(epoch(1, 0)) == expected
    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)
