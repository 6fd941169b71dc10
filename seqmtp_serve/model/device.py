"""Where an engine computes: the device its setting names, if this process has it, and weights on their way there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from seqmtp_serve.errors import InvalidField

CPU = torch.device("cpu")
_PARAM = "engine.device"


def usable_device(name: str) -> torch.device:
    """The device `cpu`, `cuda` (this process' first) or `cuda:N`. Raises InvalidField for one that is not here."""
    kind, _, index = name.partition(":")
    if name == "cpu":
        return CPU
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise InvalidField(f"device {name!r} is not cpu, cuda or cuda:N", param=_PARAM)
    if torch.version.cuda is None:
        message = f"device {name}: torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
        raise InvalidField(f"{message}, or leave the device at cpu", param=_PARAM)
    if not torch.cuda.is_available():
        message = f"device {name}: torch was built for CUDA {torch.version.cuda} and finds no device it can use"
        raise InvalidField(f"{message}: see what `nvidia-smi` says, and CUDA_VISIBLE_DEVICES", param=_PARAM)
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        known = ", ".join(f"cuda:{each}" for each in range(count))
        message = f"device {name}: this process sees {known} (CUDA_VISIBLE_DEVICES says which those are)"
        raise InvalidField(message, param=_PARAM)
    return torch.device("cuda", int(index or 0))


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given. A CPU has, whenever it is asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """The same tensors, each moved when it is read."""
    return tensors if device.type == "cpu" else _Moved(tensors, device)


class _Moved(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
