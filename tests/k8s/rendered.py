"""The overlays as `kubectl kustomize` renders them: a list of objects each. Needs kubectl, and no cluster."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu-demo", "gpu", "multi-host")
ROLES = {"frontend": "coordinator", "target": "target", "proposer": "proposer"}  # component -> its gRPC port
HAS_KUBECTL = shutil.which("kubectl") is not None

Object = Mapping[str, Any]


class DoesNotRender(Exception):
    """Kustomize's own words."""


@lru_cache
def render(overlay: str, k8s: Path = K8S) -> Sequence[Object]:
    """The objects of an overlay. Raises DoesNotRender."""
    command = ["kubectl", "kustomize", str(k8s / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode or done.stderr:
        raise DoesNotRender(done.stderr)
    return list(yaml.safe_load_all(done.stdout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One kind of pod, as it will be: its labels include those that controllers add."""

    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    group: Mapping[str, Any]  # of Ray's: the group it comes from; of a StatefulSet: nothing

    @property
    def is_ray(self) -> bool:
        return "ray.io/is-ray-node" in self.labels

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    def port(self, name: str | int) -> int | None:
        """The number of a named port, or the number itself."""
        named = {each["name"]: each["containerPort"] for each in self.container.get("ports", ())}
        return name if isinstance(name, int) else named.get(name)


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def ray_service(objects: Sequence[Object]) -> Mapping[str, Any]:
    """The one RayService's spec."""
    (service,) = of_kind(objects, "RayService")
    return service["spec"]  # type: ignore[no-any-return]


def pods(objects: Sequence[Object]) -> list[Pod]:
    """Ray's head and worker groups, and the stores."""
    return [*_ray_pods(ray_service(objects)["rayClusterConfig"]), *_store_pods(objects)]


def _ray_pods(cluster: Mapping[str, Any]) -> Iterator[Pod]:
    groups = [{"groupName": "headgroup", **cluster["headGroupSpec"]}, *cluster["workerGroupSpecs"]]
    for group in groups:
        template = group["template"]
        node_type = "head" if group["groupName"] == "headgroup" else "worker"
        added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type, "ray.io/group": group["groupName"]}
        labels = {**template["metadata"]["labels"], **added}
        yield Pod(name=group["groupName"], labels=labels, spec=template["spec"], group=group)


def _store_pods(objects: Sequence[Object]) -> Iterator[Pod]:
    for each in of_kind(objects, "StatefulSet"):
        template, name = each["spec"]["template"], each["metadata"]["name"]
        for ordinal in range(each["spec"]["replicas"]):
            added = {"statefulset.kubernetes.io/pod-name": f"{name}-{ordinal}"}
            yield Pod(name=name, labels={**template["metadata"]["labels"], **added}, spec=template["spec"], group={})


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector of the plain kind; an empty one selects everything."""
    assert set(selector) <= {"matchLabels"}, f"only matchLabels is read here, not {sorted(selector)}"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
