"""Generated code follows its sources."""

import ast
import importlib
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


def test_every_method_of_every_service_has_a_type():
    import services.rpc.wire  # noqa: F401

    services_seen = set()
    for path in (build.ROOT / build.PACKAGE).rglob("*_pb2_grpc.pyi"):
        module = importlib.import_module(".".join(path.relative_to(build.ROOT).with_suffix("").parts))
        for declared in ast.parse(path.read_text()).body:
            if isinstance(declared, ast.ClassDef) and declared.name.endswith("Servicer"):
                methods = {
                    each.name for each in declared.body if isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef)
                }
                assert methods == {name for name in vars(getattr(module, declared.name)) if name[0].isupper()}
                services_seen.add(declared.name)
    assert services_seen == {"CoordinatorServicer", "GangServicer", "ProposerServicer", "TargetServicer"}


def test_a_fresh_interpreter_imports_the_stubs():
    program = "from services.rpc.wire import target_rpc; print(target_rpc.TargetStub.__name__)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=build.ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "TargetStub"
