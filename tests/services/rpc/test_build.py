"""Generated code follows its sources."""

import subprocess
import sys

from services.rpc import build


def test_generated_code_is_current_after_import():
    import services.rpc.wire  # noqa: F401

    assert build.is_current()


def test_an_edited_source_makes_it_old(monkeypatch, tmp_path):
    (tmp_path / "new.proto").write_text('syntax = "proto3";\n')
    monkeypatch.setattr(build, "PROTO", tmp_path)
    assert not build.is_current()


def test_a_fresh_interpreter_imports_the_stubs():
    program = "from services.rpc.wire import target_rpc; print(target_rpc.TargetStub.__name__)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=build.ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "TargetStub"
