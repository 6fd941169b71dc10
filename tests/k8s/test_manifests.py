"""Every overlay renders, fits the schemas, fits itself; and a slip of one letter in any file is noticed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.k8s.reachable import Place, reaches
from tests.k8s.rendered import HAS_KUBECTL, K8S, OVERLAYS, DoesNotRender, Object, pods, render
from tests.k8s.schemas import RAY_SERVICE, closed, schema_faults
from tests.k8s.serve_config import serve_faults, settings_of
from tests.k8s.wiring import wiring_faults

pytestmark = pytest.mark.skipif(not HAS_KUBECTL, reason="needs kubectl, for `kubectl kustomize`")
needs_definitions = pytest.mark.skipif(
    not RAY_SERVICE.exists(), reason=f"needs KubeRay's custom resource definitions in {RAY_SERVICE.parent}"
)
CHECKS: tuple[Callable[[Sequence[Object]], list[str]], ...] = (schema_faults, serve_faults, wiring_faults)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("check", CHECKS[1:], ids=lambda check: check.__name__)
def test_an_overlay_has_no_fault(check: Callable[[Sequence[Object]], list[str]], overlay: str) -> None:
    assert check(render(overlay)) == []


@needs_definitions
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_the_closed_schemas(overlay: str) -> None:
    assert schema_faults(render(overlay)) == []


def test_a_closed_schema_refuses_what_it_does_not_list() -> None:
    listed = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "string"}}}}}
    assert closed(listed)["additionalProperties"] is False
    assert closed(listed)["properties"]["a"]["additionalProperties"] is False
    free = {"type": "object", "additionalProperties": {"type": "string"}}
    assert closed(free) == free


KEY = re.compile(r"^(?P<before>\s*(?:- )?\"?)(?P<key>[A-Za-z][\w./-]*)(?P<after>\"?:(?:\s|$))")
DIRECTIVE = re.compile(r"^(?P<before>)(?P<key>[a-z][a-z-]+)(?P<after>\s\S)")
# A slip in these is a slip in a free text: another label, another name of a node.
FREE = {"nvidia.com/gpu.product"}


def _files() -> list[str]:
    found = [path for suffix in ("*.yaml", "*.conf") for path in K8S.rglob(suffix)]
    return sorted(path.relative_to(K8S).as_posix() for path in found)


def _slips(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The text with the last letter of one key missing: the a key in the middle, and the last."""
    rows = text.splitlines(keepends=True)
    keys = [row for row, line in enumerate(rows) if (hit := pattern.match(line)) and hit["key"] not in FREE]
    chosen = sorted({keys[len(keys) // 2], keys[-1]})
    return [
        "".join(
            pattern.sub(lambda hit: hit["before"] + hit["key"][:-1] + hit["after"], line) if at == row else line
            for at, line in enumerate(rows)
        )
        for row in chosen
    ]


def _faults(overlay: str, k8s: Path) -> list[str]:
    """As the tests above find them; objects that are as they were need no second look at their schema."""
    try:
        objects = render(overlay, k8s)
    except DoesNotRender as error:
        return [str(error)]
    whole = render(overlay)
    try:
        changed = [each for each in objects if each not in whole]
        return [*schema_faults(changed), *serve_faults(objects), *wiring_faults(objects)]
    except Exception as error:  # a check that stumbles over the slip has found it
        return [repr(error)]


def _overlay_with(file: str) -> str:
    """One that is made of the file."""
    folder = file.split("/")[1]
    return {"c1": "cpu-demo", "c3": "multi-host"}.get(folder, folder if folder in OVERLAYS else "gpu")


@needs_definitions
@pytest.mark.parametrize("file", _files())
def test_a_slip_in_any_file_is_noticed(file: str, tmp_path: Path) -> None:
    text = (K8S / file).read_text()
    for number, slipped in enumerate(_slips(text, KEY if file.endswith(".yaml") else DIRECTIVE)):
        assert slipped != text
        copy = tmp_path / f"slip-{number}"  # a folder of its own: renderings are kept by path
        shutil.copytree(K8S, copy)
        (copy / file).write_text(slipped)
        assert _faults(_overlay_with(file), copy), f"not noticed:\n{slipped}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_must_talk_can_and_nothing_else(overlay: str) -> None:
    objects = render(overlay)
    rpc = settings_of(objects).rpc
    place = {pod.name: Place(pod=pod.labels, namespace="seqmtp") for pod in pods(objects)}
    client = Place(pod={}, namespace="shop", namespace_labels={"seqmtp.io/clients": "yes"})
    stranger = Place(pod={}, namespace="elsewhere")
    prometheus = Place(pod={}, namespace="monitoring")
    operator = Place(pod={"app.kubernetes.io/name": "kuberay-operator"}, namespace="kuberay")
    cleanup = Place(pod={"ray.io/node-type": "redis-cleanup"}, namespace="seqmtp")
    names = Place(pod={}, namespace="kube-system")
    frontend, target, proposer, store, gcs_store, head = (
        place[name] for name in ("frontend", "target", "proposer", "store", "gcs-store", "headgroup")
    )
    must = [
        (client, frontend, 8000),
        (frontend, frontend, rpc.coordinator_port),
        (frontend, target, rpc.target_port),
        (target, proposer, rpc.proposer_port),
        *((worker, store, 6379) for worker in (frontend, target, proposer, store)),
        *((worker, head, 6379) for worker in (frontend, target, proposer)),
        *((head, worker, 10500) for worker in (frontend, target, proposer)),
        (target, frontend, 30000),
        (head, gcs_store, 6379),
        (cleanup, gcs_store, 6379),
        (operator, head, 8265),
        *((prometheus, pod, 8080) for pod in (head, frontend, target, proposer)),
        (prometheus, frontend, 9101),
        (target, names, 53),
    ]
    must_not = [
        *((stranger, place, port) for place, port in ((frontend, 8000), (head, 8265), (target, rpc.target_port))),
        *((client, place, port) for place, port in ((target, 8000), (store, 6379), (head, 8265), (head, 6379))),
        (frontend, proposer, rpc.proposer_port),
        (proposer, target, rpc.target_port),
        (head, store, 6379),
        (frontend, gcs_store, 6379),
        (store, gcs_store, 6379),
        (store, stranger, 443),
        (target, stranger, 443),
    ]
    assert [flow for flow in must if not reaches(objects, *flow)] == []
    assert [flow for flow in must_not if reaches(objects, *flow)] == []
    assert reaches(objects, target, target, 40000) == (overlay == "multi-host")
