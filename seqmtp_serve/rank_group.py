"""torch's default process group, from its beginning to an end that leaves none of its threads.

The functions of `torch.distributed.nn.functional` have as default the group there was when that module was imported,
and torch imports it by itself, for a first optimizer say. A group that was there already is held by them for ever: to
destroy it then ends neither its connections nor its threads, and a thread of gloo's that lets go of a tensor while the
interpreter ends aborts the process (SIGABRT). So it is imported here, before there is any group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  # before any group, see above


def begin(library: str, **how: Any) -> None:
    """`init_process_group(library, **how)`: blocks until all ranks are there."""
    dist.init_process_group(library, **how)


def end() -> None:
    """End the group with its threads. What this rank began has ended, or the others are lost."""
    dist.destroy_process_group()
