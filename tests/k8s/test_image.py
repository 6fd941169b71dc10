"""One Ray everywhere, no root, and an image made of what the repository has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.k8s.rendered import K8S, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_one_version_of_ray_and_python() -> None:
    (constraint,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    base = re.findall(r"^ARG RAY_IMAGE=rayproject/ray:([\d.]+)-py(\d)(\d+)-cpu$", DOCKERFILE, re.M)
    (requires,) = re.findall(r'^requires-python = ">=(\d)\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert base == [(constraint, *requires)]
    spec = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())["spec"]
    assert spec["rayClusterConfig"]["rayVersion"] == constraint


def test_the_image_tag_is_the_release() -> None:
    (release,) = re.findall(r'^version = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    images = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["images"]
    assert [each["newTag"] for each in images if each["name"] == "seqmtp-serve"] == [release]


def test_it_ends_as_a_user_that_kubernetes_can_tell_from_root() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)[-1] == "1000:100"


def test_what_is_copied_exists_and_is_let_in() -> None:
    copied = {
        word for line in re.findall(r"^COPY --chown=1000:100 (.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    }
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
