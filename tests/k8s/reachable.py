"""What network policies let through: Kubernetes' own rule, for label selectors of the plain kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.rendered import Object, of_kind, selects


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A pod's labels, and where it is. Policies apply in the namespace `seqmtp` alone."""

    pod: Mapping[str, str]
    namespace: str
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


def reaches(objects: Sequence[Object], source: Place, goal: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let out of `source` and into `goal`."""
    at = (protocol, port)
    return _passes(objects, source, goal, at, "Egress") and _passes(objects, goal, source, at, "Ingress")


def _passes(objects: Sequence[Object], here: Place, there: Place, at: tuple[str, int], way: str) -> bool:
    """Pods that no policy selects are open; on all others only what some policy allows passes."""
    policies = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if here.namespace == "seqmtp"
        and way in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], here.pod)
    ]
    return not policies or any(_allows(rule, there, at, way) for spec in policies for rule in spec.get(way.lower(), ()))


def _allows(rule: Mapping[str, Any], there: Place, at: tuple[str, int], way: str) -> bool:
    protocol, port = at
    peers = rule.get("from" if way == "Ingress" else "to")
    return any(low <= port <= high for low, high in _ranges(rule, protocol)) and (
        peers is None or any(_is(peer, there) for peer in peers)
    )


def _ranges(rule: Mapping[str, Any], protocol: str) -> Iterator[tuple[int, int]]:
    for each in rule["ports"]:
        if each["protocol"] == protocol:
            yield each["port"], each.get("endPort", each["port"])


def _is(peer: Mapping[str, Any], place: Place) -> bool:
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": place.namespace, **place.namespace_labels}
        if not selects(peer["namespaceSelector"], labels):
            return False
    elif place.namespace != "seqmtp":
        return False
    return selects(peer.get("podSelector", {}), place.pod)
