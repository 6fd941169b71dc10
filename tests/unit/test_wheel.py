"""The wheel is whole: with the generated protobuf code, which works where there is nothing to generate it from."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_carries_the_generated_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    generated = {f"services/rpc/pb/seqmtp/v1/{path.stem}_pb2.py" for path in ROOT.glob("proto/seqmtp/v1/*.proto")}
    assert len(generated) == 5
    assert generated <= set(names)
    assert "services/store/commit.lua" in names
    assert "services/gateway/ui/index.html" in names
    assert not [name for name in names if name.startswith(("tests/", "proto/", "deploy/"))]
    ask = "from services.rpc.wire import target; print(target.StepPlan(step_id=7).step_id, target.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=tmp_path,
        env={"PYTHONPATH": str(wheel), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("7 ")
    assert str(wheel) in ran.stdout


def test_the_generator_in_the_build_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (hook,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["dependencies"]
    assert hook in (ROOT / "constraints.txt").read_text().splitlines()
