"""A second device for machines that have none: tensors say they lie on `cuda:N`, compute on the CPU, and do not mix.

Each pretended tensor wraps the real one. Inside `pretending()` every operator is looked at: one that is given tensors
of two devices raises `Mixed`, as a GPU would, and stricter (a GPU takes indices from the CPU and copies them without a
word). 0-dimensional CPU tensors may be mixed in, as they may there. What leaves the device is counted in `Traffic`,
with the operator it left by. Values are the CPU's own, so whole texts can be compared with the CPU's.

It shows where tensors lie and what crosses. It says nothing about kernels, streams, memory or speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_META = torch.device("meta")
# What reads values on the host, by any of torch's ways.
_READS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "bincount")
# Only kernels of a CPU have these.
_CPU_KERNELS = ("_scaled_dot_product_flash_attention_for_cpu", "quantized.", "quantize_per_")


class Mixed(RuntimeError):
    """One operator, tensors of two devices."""


@dataclass(slots=True)
class Traffic:
    """Transfers to the host, by operator. Reset it with `clear`."""

    to_host: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.to_host.clear()


class Pretended(Tensor):
    """`held` under another device's name. To torch's C++ side it is a meta tensor: only so does that ask no driver."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> Pretended:
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        with torch.inference_mode(False):  # whether views may be made of it is asked of the held one alone
            made = Tensor._make_wrapper_subclass(cls, held.size(), **shape, dtype=held.dtype, device=_META)
        made.held, made.place = held, place
        return made

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_cuda(self) -> bool:
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.place}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Mixed(f"{func} was called outside of `pretending()`")


class _Pretend(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = (args, dict(kwargs or {})), str(func)
        wrappers: dict[int, Pretended] = {}
        places: set[torch.device] = set()

        def look(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Pretended):
                wrappers[id(tensor.held)] = tensor
                places.add(tensor.place)
                return tensor.held
            if tensor.dim():
                places.add(tensor.device)
            return tensor

        real_args, real_kwargs = tree_map_only(Tensor, look, given)
        is_copy = func in (torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
        if len(places) > 1 and not is_copy:
            raise Mixed(f"{name} was given tensors of {', '.join(sorted(map(str, places)))}")
        here = next(iter(wrappers.values())).place if wrappers else None
        asked = [each for each in (*args, *real_kwargs.values()) if isinstance(each, torch.device)]
        target = asked[0] if asked else here
        if target == _META:
            target = here
        if target is not None and target.type == "cuda" and any(kernel in name for kernel in _CPU_KERNELS):
            raise Mixed(f"{name} is a kernel of the CPU")
        real_args = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in real_args)
        if isinstance(real_kwargs.get("device"), torch.device):
            real_kwargs["device"] = torch.device("cpu")
        self._count(name, here, target, is_copy, args)
        out = func(*real_args, **real_kwargs)
        if asked and target != here:  # a transfer gives memory of its own, also where the CPU's would be shared
            out = tree_map_only(Tensor, lambda tensor: tensor.clone() if here is not None else tensor, out)
        if target is None or target.type == "cpu":
            return out

        def wrap(tensor: Tensor) -> Tensor:
            known = wrappers.get(id(tensor))
            return Pretended(tensor, target) if known is None else known

        return tree_map_only(Tensor, wrap, out)

    def _count(
        self, name: str, here: torch.device | None, target: torch.device | None, is_copy: bool, args: Any
    ) -> None:
        operator = name.removeprefix("aten.").split(".")[0]
        leaves = here is not None and target is not None and target.type == "cpu"
        leaves = leaves or (is_copy and not isinstance(args[0], Pretended) and isinstance(args[1], Pretended))
        if leaves or (here is not None and operator in _READS):
            self._traffic.to_host[operator] += 1


@contextmanager
def pretending(count: int = 2) -> Iterator[Traffic]:
    """`count` CUDA devices, as far as anybody can tell who does not compute with them."""
    traffic = Traffic()
    with (
        mock.patch.object(torch.version, "cuda", "pretended"),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=count),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "_lazy_init"),
    ):
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(list, device=…)` is then an operator like any other
        try:
            with _Pretend(traffic):
                yield traffic
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
