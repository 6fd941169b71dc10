"""`make audit`: what is known of the pinned packages, as a verdict that cannot be mistaken.

    exit 0  every package was looked up, and nothing is known against any
    exit 1  something is known: package, version, advisory and the release that mends it are printed
    exit 3  some package could not be looked up (no network, or an index without advisories): nothing is said of it

pip-audit itself passes over what it cannot look up, and ends with 0: without this an audit without the network would be
a clean one. The bill of materials (CycloneDX) is written first: it needs nobody.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOUND, UNKNOWN = 1, 3
ROOT = Path(__file__).parents[1]


def verdict(report: Mapping[str, Any]) -> tuple[int, str]:
    """Exit code and words for a report of `pip-audit --format json`. Pure."""
    packages = report["dependencies"]
    known = list(_known(packages))
    skipped = [each for each in packages if "skip_reason" in each]
    audited = len(packages) - len(skipped)
    lines = [*known, f"{audited} of {len(packages)} packages looked up, {len(known)} advisories"]
    if skipped:
        lines.append(f"{len(skipped)} could not be, so this is no clean audit; the first: {skipped[0]['skip_reason']}")
    return FOUND if known else UNKNOWN if skipped or not packages else 0, "\n".join(lines)


def _known(packages: list[Mapping[str, Any]]) -> Iterator[str]:
    for each in packages:
        for found in each.get("vulns", ()):
            mended = ", ".join(found["fix_versions"]) or "no release yet"
            yield f"{each['name']} {each['version']}: {found['id']}, mended in {mended}"


def main(tools: Path, constraints: Path = ROOT / "constraints.txt", bill: Path = ROOT / "results" / "sbom.json") -> int:
    """Write the bill of materials, ask for advisories, say what came of it. `tools`: where both programs are."""
    bill.parent.mkdir(parents=True, exist_ok=True)
    project = ("--pyproject", str(ROOT / "pyproject.toml"))
    output = ("--output-format", "JSON", "--output-file", str(bill))
    subprocess.run([tools / "cyclonedx-py", "requirements", str(constraints), *project, *output], check=True)
    print(f"bill of materials: {bill}")
    asked = [tools / "pip-audit", "--no-deps", "--disable-pip", "--format", "json", "-r", str(constraints)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    try:
        code, words = verdict(json.loads(done.stdout))
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        code, words = UNKNOWN, f"no package could be looked up, so this is no audit: {last}"
    print(words)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
