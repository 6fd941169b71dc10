"""Every overlay renders, fits the schemas, fits itself; and a slip of one letter in any file is noticed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from tests.k8s.reachable import Place, reaches
from tests.k8s.rendered import HAS_KUBECTL, K8S, OVERLAYS, ROOT, DoesNotRender, Object, of_kind, pods, render, selects
from tests.k8s.schemas import RAY_SERVICE, closed, schema_faults
from tests.k8s.serve_config import serve_faults, settings_of
from tests.k8s.wiring import wiring_faults

pytestmark = pytest.mark.skipif(
    not HAS_KUBECTL and "CI" not in os.environ, reason="needs kubectl, for `kubectl kustomize`"
)
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


# Slips in values, which no schema sees: (file, what stands there, the slip).
VALUES = [
    ("base/podmonitors.yaml", "path: /metrics", "path: /metric"),
    ("base/rayservice.yaml", "path: /ready", "path: /read"),
    ("base/rayservice.yaml", "containerPort: 50051", "containerPort: 50055"),
    ("base/rayservice.yaml", "name: store-class", "name: store-clas"),
    ("base/rayservice.yaml", "redisAddress: gcs-store", "redisAddress: gcs-stor"),
    ("base/rayservice.yaml", "terminationGracePeriodSeconds: 180", "terminationGracePeriodSeconds: 90"),
    ("base/rayservice.yaml", "seqmtp.io/role: target", "seqmtp.io/role: targe"),
    ("base/kustomization.yaml", "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_HAPROXY"),
    ("base/services.yaml", "port: 6379", "port: 6378"),
    ("base/serviceaccounts.yaml", "name: seqmtp-worker", "name: seqmtp-worke"),
    ("base/namespace.yaml", "restricted", "restrictd"),
    ("base/disruption.yaml", "maxUnavailable: 1", "maxUnavailable: 0"),
    ("base/store.yaml", "valkey.sock", "valkey.soc"),
    ("base/store.yaml", "start/start.sh", "start/start.s"),
    ("base/store.yaml", "fieldPath: metadata.name", "fieldPath: metadata.nam"),
    ("base/store.yaml", "mountPath: /data", "mountPath: /dat"),
    ("base/store.yaml", "serviceName: store-peers", "serviceName: store-peer"),
    ("base/networkpolicies.yaml", "port: 52365", "port: 52366"),
    ("components/c2/valkey.conf", "appendfsync always", "appendfsync alway"),
    ("components/tls/kustomization.yaml", "TLS_CERTIFICATE=", "TLS_CERTIFICAT="),
    ("components/tls/kustomization.yaml", "tls/ca.crt", "tls/ca.cr"),
    ("components/tls/certificates.yaml", "- seqmtp-grpc", "- seqmtp-grp"),
    ("components/model-volume/mounts.yaml", "mountPath: /models", "mountPath: /model"),
    ("overlays/gpu/serve.yaml", "services.scaling:ByDrafts", "services.scaling:ByDraft"),
    ("overlays/gpu/serve.yaml", "api-key/key", "api-key/ke"),
    ("overlays/gpu/serve.yaml", "store/password", "store/passwor"),
    ("overlays/gpu/serve.yaml", "tls/tls.key", "tls/tls.ke"),
    ("overlays/gpu/serve.yaml", "drain_s: 20", "drain_s: 70"),
]


@needs_definitions
@pytest.mark.parametrize(("file", "stands", "slip"), VALUES, ids=lambda word: str(word))
def test_a_slip_in_a_value_is_noticed(file: str, stands: str, slip: str, tmp_path: Path) -> None:
    text = (K8S / file).read_text()
    assert stands in text
    copy = tmp_path / "slip"
    shutil.copytree(K8S, copy)
    (copy / file).write_text(text.replace(stands, slip, 1))
    assert _faults(_overlay_with(file), copy)


def _ray_ports(objects: Sequence[Object]) -> set[int]:
    """Those that every Ray process is told to take, its dashboard's agent's and the replicas' behind HAProxy."""
    told = [pod.group["rayStartParams"] for pod in pods(objects) if pod.is_ray]
    return {int(value) for each in told for name, value in each.items() if name.endswith("-port")} | {
        52365,
        30000,
        31000,
    }


def _scraped(objects: Sequence[Object]) -> list[tuple[str, int]]:
    """Pod and port, of every PodMonitor's endpoints; Ray's own are where Ray has them unless told otherwise."""
    found = [
        (pod.name, pod.port(endpoint["port"]) or 0)
        for monitor in of_kind(objects, "PodMonitor")
        for pod in pods(objects)
        if selects(monitor["spec"]["selector"], pod.labels)
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    ]
    assert {(pod.name, 8080) for pod in pods(objects) if pod.is_ray} | {("frontend", 8000), ("frontend", 9101)} == {
        *found
    }
    return found


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
    api_server = Place(pod={}, namespace="default")
    ray = {name: place[name] for name in ("headgroup", "frontend", "target", "proposer")}
    must = [
        (client, frontend, 8000),
        (frontend, frontend, rpc.coordinator_port),
        (frontend, target, rpc.target_port),
        (target, proposer, rpc.proposer_port),
        *((worker, store, 6379) for worker in (frontend, target, proposer, store)),
        *((worker, head, 6379) for worker in (frontend, target, proposer)),
        *((one, other, port) for one in ray.values() for other in ray.values() for port in _ray_ports(objects)),
        *((head, api_server, port) for port in (443, 6443)),
        (target, frontend, 30000),
        (head, gcs_store, 6379),
        (cleanup, gcs_store, 6379),
        (operator, head, 8265),
        *((prometheus, place[pod], port) for pod, port in _scraped(objects)),
        *((one, names, 53) for one in (target, store)),
        *((one, names, 53, "UDP") for one in (target, store)),
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


def test_the_documented_rule_lets_traces_and_metrics_out() -> None:
    """docs/observability.md shows the one object that a collector needs beside the manifests."""
    page = (ROOT / "docs" / "observability.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    rule, objects = yaml.safe_load(shown), render("gpu")
    assert schema_faults([rule]) == []
    collector = Place(pod={}, namespace="monitoring")
    for pod in pods(objects):
        place = Place(pod=pod.labels, namespace="seqmtp")
        assert not reaches(objects, place, collector, 4317)
        assert reaches([*objects, rule], place, collector, 4317) == pod.is_ray
