"""The process group of a target group's ranks: they meet at the leader's address and exchange rows of the experts.

The dispatch backend says which library carries them, gloo for tensors on a CPU and NCCL on GPUs. torch is told which
interface to use and which socket to listen on: by itself it would look the host's name up, and its
store would listen everywhere.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from seqmtp_serve import rank_group
from seqmtp_serve.model.device import CPU

FORM_TIMEOUT = timedelta(seconds=60)  # all ranks are known to be here when forming starts


def open_rendezvous(host: str, world_size: int) -> tuple[dist.TCPStore, str]:
    """The leader's key-value store, where ranks find each other, and its address host:port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=FORM_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it from here on
    )
    return store, f"{host}:{port}"


def join_rendezvous(address: str, world_size: int) -> dist.TCPStore:
    """The same store, seen from another rank."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), world_size, is_master=False, timeout=FORM_TIMEOUT, wait_for_workers=False)


def form(
    store: dist.Store, rank: int, world_size: int, host: str, library: str = "gloo", device: torch.device = CPU
) -> None:
    """Make the default process group over `library` (`model/backends/dispatch.py`), for tensors on `device`.

    Blocks until every rank has called it, or raises after `FORM_TIMEOUT`. NCCL is told its device, and so makes its
    communicator here and now: what keeps it from doing so is said at start and not by the first step.

    A collective never waits for ever either: a rank that is lost ends the whole group long before its time is up. Where
    NCCL's collectives only queue work, it is the host's next look at a result that waits, under the same watchdog.
    """
    if (interface := interface_of(host)) is not None:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    bound = device if device.type == "cuda" and library == "nccl" else None
    rank_group.begin(library, store=store, rank=rank, world_size=world_size, timeout=FORM_TIMEOUT, device_id=bound)


def interface_of(host: str) -> str | None:
    """The network interface with address `host`; None for a wildcard or a name, which torch then resolves."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return interface
    return None
