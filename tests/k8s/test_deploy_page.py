"""docs/deploy.md speaks of every object that the overlays render, and of no other: kind, name, overlays, why."""

from __future__ import annotations

import re

import pytest

from tests.k8s.rendered import HAS_KUBECTL, OVERLAYS, ROOT, render

ROW = re.compile(r"^\| (?P<kind>[A-Z]\w+) \| `(?P<name>[a-z-]+)` \| (?P<overlays>[a-z, -]+) \| (?P<why>.+) \|$", re.M)


def spoken_of() -> dict[tuple[str, str], set[str]]:
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.split("## What each object is for")[1].split("Inside the RayService")[0]
    found = {}
    for row in ROW.finditer(section):
        assert len(row["why"].split()) >= 3, row[0]
        overlays = set(OVERLAYS) if row["overlays"] == "all" else set(row["overlays"].split(", "))
        found[row["kind"], row["name"]] = overlays
    return found


@pytest.mark.skipif(not HAS_KUBECTL, reason="needs kubectl, for `kubectl kustomize`")
def test_every_object_of_every_overlay_is_explained() -> None:
    rendered: dict[tuple[str, str], set[str]] = {}
    for overlay in OVERLAYS:
        for thing in render(overlay):
            name = thing["metadata"]["name"]
            if thing["kind"] == "ConfigMap":
                name = re.sub(r"-[a-z0-9]{10}$", "", name)  # kustomize's hash of the contents
            rendered.setdefault((thing["kind"], name), set()).add(overlay)
    assert spoken_of() == rendered
