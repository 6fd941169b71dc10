"""Which test shows which requirement: `python -m tests.requirements_table` prints docs/requirements.md.

A test names the requirements it shows with `@pytest.mark.covers(67, 68)`. Numbers without a test are listed too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent

TITLES = {
    7: "immutable manifest of architecture and checkpoint",
    8: "MTP layer ids follow the main layers",
    9: "owners of embedding and output head are declared",
    10: "fusion order, hidden contracts, fingerprints, rope, vocabulary are declared",
    11: "the manifest cannot change and its fingerprint travels",
    12: "state rows name the round-entry coordinate",
    13: "precision is declared in layers",
    14: "a target without MTP loads and implies no speculation",
    15: "hnorm, enorm, concat, eh_proj, block, shared head, in this order",
    16: "two norms with gains of their own, none after the projection",
    17: "the block is causal and has the main model's structure",
    18: "no residual around the fusion",
    19: "pre-final-norm output; the final norm is applied once",
    20: "shapes; eh_proj adds 2d² parameters",
    21: "depth k reads depth k−1, not the trunk",
    22: "a later token never changes an earlier row",
    23: "slices of depth one and of any depth",
    24: "input x(i+k), label x(i+k+1)",
    25: "trimming first or masking later gives one loss",
    26: "zero-based and one-based indices convert",
    27: "a six-token trace by hand",
    28: "rows compiled from a packed stream, with their errors",
    29: "the previous depth's row is a physical row",
    30: "each depth carries its rows' identities",
    31: "segments stay apart in rows and in attention",
    32: "a missing predecessor is an error",
    33: "a loss mask never prunes state",
    34: "positions are looked up by base",
    35: "adapters keep identity, position and visibility",
    36: "the paper's fixed 1/T is the default, and named",
    37: "the valid-row mean is available, and named",
    38: "empty depths: the declared policy",
    39: "λ/D times the sum over depths",
    40: "the λ schedule, its boundary declared",
    41: "numerator mask, denominator and reduction are recorded",
    42: "numerators and denominators are reduced before dividing",
    43: "label counts",
    44: "T > 0 and D ≥ 1",
    45: "the main loss has its own mask",
    46: "gradient ownership",
    47: "shared gradients: accumulated once, synchronised",
    48: "aliases before the optimizer",
    49: "physical aliases; replicas by fingerprint",
    50: "three ways to share, told apart",
    51: "detaching is a declared, different program",
    52: "embedding and head on one rank, or synchronised",
    53: "training consumes the shifted true tokens",
    54: "teacher-forced and self-fed acceptance are separate figures",
    55: "alternatives to teacher forcing are labelled",
    56: "an empty depth still takes part in the collectives",
    57: "storage is made dense before loading",
    58: "fusion order is explicit; an unknown one is refused",
    59: "swapping column blocks twice changes nothing",
    60: "both fusion orders give the same state and logits",
    61: "ids, shapes, vocabulary and rope are validated",
    62: "two release gates, judged apart",
    63: "duplicate embedding and head: verified, then aliased",
    64: "adapter parity; a doubled final norm is seen",
    67: "the one-token selection rule, every row",
    68: "the ratio judges the draft only",
    69: "corrections come from the residual",
    70: "q is the distribution really sampled from",
    71: "output is distributed as direct sampling",
    72: "greedy text equals plain decoding",
    73: "target KV covers P; the frontier is emitted once",
    74: "the parent hidden row is the last kept one, before the final norm",
    75: "the verify input is the frontier and the drafts",
    76: "only kept rows are published",
    77: "a correction or bonus has no KV",
    78: "no round after the end",
    79: "the bootstrap is counted once",
    80: "outputs never exceed the budget",
    81: "the end is decided before publication",
    83: "target, MTP and branch caches cannot alias",
    84: "a cache belongs to its depth",
    85: "a stale version is refused",
    86: "MTP rows of another ancestry are dropped, never edited",
    87: "rejected rows are never published",
    88: "a crash between stages leaves the version whole",
    89: "the frontier is an input of the next pass",
    90: "pages are freed and not reachable",
    91: "MTP keys come from MTP weights",
    92: "prefill runs depth after depth",
    93: "recurrent rollout is named and feeds back its own state",
    94: "more drafts than MTP modules",
    95: "acceptance by position",
    96: "selection stops at the first rejection",
    99: "MTP routes by its own state; experts touched are counted apart",
    100: "bytes of expert parallelism, by rank",
    101: "any number of ranks has the bits of one",
    102: "costs are disjoint",
    103: "the speed-up formula and its conditions",
    104: "a ledger of each request",
    105: "memory is measured by part",
    106: "speed-up comes from timed runs against the same engine",
    107: "ordinary decoding when the ledger says so",
    108: "training observables",
    109: "run-time observables",
    110: "counters reconcile",
    141: "gate: aliases proven",
    142: "gate: alignment and packing",
    143: "gate: loss form, denominators, reduction",
    144: "gate: gradient ownership",
    145: "gate: detached and attached, documented",
    146: "gate: λ logged",
    147: "gate: main-only and MTP-assisted evaluation apart",
    148: "gate: deleting the module",
    149: "manifest and gates at release",
    151: "exactness at release",
    152: "state invariants under abort, preemption, end and budget",
    153: "caches are isolated",
    154: "costs and memory measured",
    155: "fallback works",
    157: "lossless on the shipped model",
    159: "the graph of D = 2",
    160: "which true tokens a depth may consume",
    161: "parameters saved by a shared head",
    162: "extra depth against extra targets",
    163: "the module is testable alone",
    164: "independent heads are a baseline only",
    165: "no training API is read into the weights' documentation",
    166: "the paper's index range converts",
    167: "faulty code is caught",
}
FAULT = "failure laboratory: an injected fault is detected"


def covered(root: Path = TESTS) -> dict[int, list[str]]:
    """Requirement number to `file::test` names, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
                    for number in mark.args:
                        found[int(ast.literal_eval(number))].append(f"{path.relative_to(root)}::{node.name}")
    return dict(found)


def table() -> str:
    """The page, as markdown."""
    shown = covered()
    lines = [
        "# Requirements and the tests that show them",
        "",
        "Printed by `python -m tests.requirements_table`; a test keeps it current. The numbers are the project's own",
        "list, distilled from its source texts.",
        "",
        "| number | what | shown by |",
        "|---|---|---|",
    ]
    for number in sorted(set(TITLES) | set(shown)):
        title = TITLES.get(number, FAULT if 111 <= number <= 140 else "")
        names = shown.get(number, [])
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        cell = ", ".join(f"`{name}`" for name in names[:3]) + rest if names else "no test yet"
        lines.append(f"| {number} | {title} | {cell} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
