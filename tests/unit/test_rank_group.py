"""The end of a group leaves no thread of it, also where torch met its first optimizer while the group was there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRAIN_AND_LEAVE = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from seqmtp_serve import rank_group

rank_group.begin("gloo", init_method=sys.argv[1], rank=0, world_size=1)
parameter = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.AdamW([parameter])  # imports what would hold the group
parameter.sum().backward()
dist.all_reduce(parameter.grad)
optimizer.step()
rank_group.end()
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")), sep="\\n")
"""


def test_the_end_of_a_group_leaves_none_of_its_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN_AND_LEAVE, (tmp_path / "rendezvous").as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "python" in ended.stdout
    assert [name for name in ended.stdout.splitlines() if "gloo" in name] == []
