"""The pretended device itself: it computes, it tells devices apart, it counts what leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqmtp_serve.model.linear import Int8Linear
from tests.unit.pretend_device import Mixed, pretending

GPU = torch.device("cuda", 0)


def rows(device: Any = GPU) -> Tensor:
    return torch.arange(12.0, device=device).view(3, 4)


def test_what_is_made_moved_and_computed_there_stays_there() -> None:
    with pretending():
        made = (
            rows(),
            torch.tensor([1.0], device=GPU),
            torch.ones(2).to(GPU),
            rows() @ rows().T,
            rows()[1:],
            rows() > 1,
        )
        assert all(each.device == GPU for each in made)
        changed = rows()
        changed.view(2, 6)[1].mul_(2.0)  # a view shares its memory
        assert changed.tolist() == [[0, 1, 2, 3], [4, 5, 12, 14], [16, 18, 20, 22]]
        torch.softmax(rows(), 0, out=changed)
        assert torch.equal(changed.cpu(), rows("cpu").softmax(0))
        assert torch.empty_like(rows()).device == rows().new_zeros(2).device == GPU
        assert (rows() * torch.tensor(2.0)).device == GPU, "a number may come along"


@pytest.mark.parametrize(
    "mix",
    [
        lambda: rows() + rows("cpu"),
        lambda: rows() + rows("cuda:1"),
        lambda: torch.cat((rows(), rows("cpu"))),
        lambda: rows()[torch.tensor([0, 2])],  # a GPU would take these, and copy them each time
        lambda: rows("cpu").index_select(0, torch.tensor([1], device=GPU)),
        lambda: rows().index_copy_(0, torch.tensor([1]), torch.ones(1, 4)),
        lambda: torch.softmax(rows(), 0, out=rows("cpu")),
        lambda: rows().masked_fill_(torch.ones(3, 4, dtype=torch.bool), 0.0),
    ],
)
def test_tensors_of_two_devices_do_not_mix(mix: Callable[[], Tensor]) -> None:
    with pretending(), pytest.raises(Mixed):
        mix()


def test_kernels_of_a_cpu_do_not_run_there() -> None:
    linear = Int8Linear(torch.randn(16, 4), levels=63)
    assert linear(rows("cpu")).shape == (3, 16)
    with pretending(), pytest.raises(Mixed, match="kernel of the CPU"):
        linear(rows())


def test_a_tensor_is_of_no_use_once_the_device_is_gone() -> None:
    with pretending():
        left = rows()
    with pytest.raises(Mixed, match="outside"):
        left.add(1.0)


@pytest.mark.parametrize(
    ("read", "operators"),
    [
        (lambda: rows().tolist(), 1),
        (lambda: rows().cpu(), 1),
        (lambda: float(rows().sum()), 1),
        (lambda: bool((rows() > 1).any()), 1),
        (lambda: rows().nonzero(), 1),
        (lambda: torch.empty(3, 4).copy_(rows()), 1),
        (lambda: torch.ones(3, 4).to(GPU), 0),
        (lambda: rows().clone().to(GPU), 0),
        (lambda: rows() @ rows().T, 0),
    ],
)
def test_what_the_host_has_to_wait_for_is_counted(read: Callable[[], Any], operators: int) -> None:
    with pretending() as traffic:
        read()
    assert sum(traffic.to_host.values()) == operators, traffic.to_host


def test_there_is_no_way_past_it() -> None:
    with pretending(), pytest.raises(TypeError, match="numpy"):
        rows().numpy()
