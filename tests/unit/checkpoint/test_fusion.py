"""The projection-order oracle: facts a shape cannot show."""

from __future__ import annotations

import pytest
import torch

from seqmtp_serve.checkpoint.fusion import projection_for_he

WEIGHT = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
HIDDEN, EMBEDDING = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])


@pytest.mark.covers(58, 59, 60)
def test_both_declarations_give_their_own_state_on_an_asymmetric_fixture() -> None:
    he, eh = torch.cat((HIDDEN, EMBEDDING)), torch.cat((EMBEDDING, HIDDEN))
    assert (projection_for_he(WEIGHT, 2, "he") @ he).tolist() == [9, 21]
    assert (projection_for_he(WEIGHT, 2, "eh") @ he).tolist() == [7, 19] == (WEIGHT @ eh).tolist()


@pytest.mark.covers(59)
def test_swaps_whole_column_blocks_and_is_its_own_inverse() -> None:
    swapped = projection_for_he(WEIGHT, 2, "eh")
    assert swapped.tolist() == [[3, 4, 1, 2], [7, 8, 5, 6]]
    assert torch.equal(projection_for_he(swapped, 2, "eh"), WEIGHT)
    assert projection_for_he(WEIGHT, 2, "he") is WEIGHT


@pytest.mark.covers(58)
@pytest.mark.parametrize("order", ["", None, "EH", "h"])
def test_an_undeclared_order_is_an_error(order: str) -> None:
    with pytest.raises(ValueError, match="declare checkpoint fusion order: he or eh"):
        projection_for_he(WEIGHT, 2, order)


@pytest.mark.covers(20, 61)
@pytest.mark.parametrize("shape", [(2, 3), (4, 2), (2, 4, 1)])
def test_another_shape_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"fusion weight must have shape \[d, 2d\]"):
        projection_for_he(torch.zeros(shape), 2, "he")
