"""What a service imports is memory and start-up time it costs."""

import subprocess
import sys

import pytest

from services.rpc.build import ROOT


@pytest.mark.parametrize("role", ["coordinator", "gateway"])
def test_a_service_without_weights_imports_no_torch(role: str):
    program = f"import sys, services.{role}.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
