"""Selection over a batch: each item's own rows, whether they lie as a block or not, and whoever had to go."""

import pytest
import torch

from seqmtp_serve.engine.batch import Item, select
from seqmtp_serve.engine.pages import Lease, Owner
from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Ref, Request, SamplingParams
from seqmtp_serve.speculation.row_params import RecentRowParams

VOCAB = 12


def item(name: str, *drafts: int) -> Item:
    request = Request(request_id=name, prompt_ids=(1, 2), params=SamplingParams(temperature=0.0), eos_token_ids=())
    ref = Ref(request_id=name, epoch=1, version=0, digest=b"d" * 16)
    lease = Lease(owner=Owner.TARGET, generation=1)
    sequence = TargetSequence(request=request, ref=ref, tokens=[1, 2], lease=lease, num_prefix=2)
    draft = Draft(ref=ref, tokens=drafts) if drafts else None
    return Item(sequence=sequence, start=1, token_ids=(2, *drafts), draft=draft)


def rows(*tokens: int | None) -> torch.Tensor:
    """One row a token, which it makes the largest; None: a row that cannot be sampled from."""
    logits_nV = torch.zeros(len(tokens), VOCAB)
    for logits_V, token in zip(logits_nV, tokens, strict=True):
        logits_V[0 if token is None else token] = float("nan") if token is None else 5.0
    return logits_nV


def selected(items: list[Item], logits_nV: torch.Tensor) -> tuple[dict[str, list[int]], set[str]]:
    before_nV = logits_nV.clone()
    tokens, bad = select(logits_nV, items, RecentRowParams(torch.device("cpu")))
    torch.testing.assert_close(logits_nV, before_nV, rtol=0, atol=0, equal_nan=True)  # nobody wrote into them
    return tokens, set(bad)


def test_rows_that_lie_as_a_block() -> None:
    found = selected([item("a", 3, 4), item("b", 3, 4)], rows(3, 4, 5, 3, 6, 7))
    assert found == ({"a": [3, 4, 5], "b": [3, 6]}, set())


def test_items_of_unequal_depth() -> None:
    found = selected([item("a", 3, 4), item("b"), item("c", 6)], rows(3, 4, 5, 8, 6, 7))
    assert found == ({"a": [3, 4, 5], "b": [8], "c": [6, 7]}, set())


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        ((None, 4, 5, 8, 6, 7), {"b": [8], "c": [6, 7]}),
        # Two are left, and as many rows in all as two of the longest would have.
        ((3, 4, 5, None, 6, 7), {"a": [3, 4, 5], "c": [6, 7]}),
        ((3, 4, 5, 8, None, 7), {"a": [3, 4, 5], "b": [8]}),
    ],
)
def test_who_cannot_be_sampled_from_leaves_the_others_their_rows(
    broken: tuple[int | None, ...], left: dict[str, list[int]]
) -> None:
    tokens, bad = selected([item("a", 3, 4), item("b"), item("c", 6)], rows(*broken))
    assert tokens == left
    assert bad == {"a", "b", "c"} - left.keys()
