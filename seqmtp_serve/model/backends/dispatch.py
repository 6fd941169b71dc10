"""How rows reach experts on other ranks: which of the dispatchers of `model/` can run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from seqmtp_serve.model.all_to_all import AllToAllDispatcher
from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.dispatch import Dispatcher, LocalDispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchCase:
    """A group of `world_size` ranks whose rows lie on `device`."""

    world_size: int
    num_experts: int
    device: str


class DispatchBackend(Protocol):
    """`make` is called in every rank, once the process group is there."""

    @property
    def name(self) -> str: ...

    @property
    def library(self) -> str:
        """torch.distributed's name of what carries tensors; empty for none."""
        ...

    def unavailable(self) -> str: ...

    def refuses(self, case: DispatchCase) -> str: ...

    def make(self, case: DispatchCase) -> Dispatcher: ...


class Local:
    """Every expert is in this process."""

    name, library = "local", ""

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: DispatchCase) -> str:
        return "" if case.world_size == 1 else f"{case.world_size} ranks hold the experts"

    def make(self, case: DispatchCase) -> Dispatcher:
        return LocalDispatcher()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll:
    """`torch.distributed`'s all-to-all over one of its libraries."""

    name: str
    library: str  # gloo, nccl
    device: str

    def unavailable(self) -> str:
        if not dist.is_available():
            return "torch was built without torch.distributed"
        return "" if dist.is_backend_available(self.library) else f"torch was built without {self.library}"

    def refuses(self, case: DispatchCase) -> str:
        if case.world_size == 1:
            return "one rank holds every expert"
        return "" if case.device == self.device else f"rows lie on {case.device}, {self.library} carries {self.device}"

    def make(self, case: DispatchCase) -> Dispatcher:
        return AllToAllDispatcher(case.num_experts)


DISPATCH: Registry[DispatchBackend] = Registry(
    "dispatch",
    (
        Local(),
        AllToAll(name="all-to-all-nccl", library="nccl", device="cuda"),
        AllToAll(name="all-to-all-gloo", library="gloo", device="cpu"),
    ),
    setting="dispatch",
)
