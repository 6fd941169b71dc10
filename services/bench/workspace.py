"""What this process holds by the kernel's account, and how much a call needs beyond what it leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from services.memory import give_back

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_growth(call: Callable[[], object]) -> int | None:
    """Bytes by which `call` raised this process' peak resident memory above where it stood before.

    Zero when memory freed earlier sufficed. None where the kernel keeps no peak that can be reset (it is Linux's).
    """
    gc.collect()
    try:
        _CLEAR.write_text("5")  # resets VmHWM, the peak, to what is resident now
        before = _kilobytes("VmHWM")
        call()
        return (_kilobytes("VmHWM") - before) * 1024
    except OSError:
        return None


def device_peak_growth(call: Callable[[], object], device: torch.device) -> int:
    """The same of what torch's allocator holds on a GPU."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def resident() -> int | None:
    """Bytes of this process' memory that are resident, after free memory was given back. None where no kernel says."""
    give_back()
    try:
        return _kilobytes("VmRSS") * 1024
    except OSError:
        return None


def _kilobytes(name: str) -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])
