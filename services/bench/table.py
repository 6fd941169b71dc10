"""A bench report for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_HEAD = (
    "kind         depth  conc      tps   E[R]  acceptance        c_main   c_mtp c_verify  c_pack  c_sync"
    "       S  S(ledger) S(bound) hidden  /best fixed (95 %)   text"
)


def as_table(report: Mapping[str, Any]) -> str:
    """The same figures as the JSON, as lines."""
    kinds = {
        "parts": _all,
        "proposers": _proposers,
        "runs": _speculation,
        "cells": _engine,
        "hidden": _hidden,
        "prompts": _prefix,
        "scale": _scale,
    }
    kind = next((kinds[name] for name in kinds if name in report), _startup)
    return "\n".join(kind(report))


def _speculation(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, numerics {report['numerics']}, {report['machine']}, {report['date']}"
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    yield _HEAD
    yield from _runs(report["runs"])


def _proposers(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, numerics {report['numerics']}, {report['machine']}, {report['date']}"
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    for system in dict.fromkeys(run["system"] for run in report["proposers"]):
        yield system
        yield _HEAD
        yield from _runs([run for run in report["proposers"] if run["system"] == system])
    yield "system       kind         depth  conc  of plain  of colocated  of one cohort"
    for run in report["proposers"]:
        ratios = (
            "-" if run[name] is None else f"{run[name]:.2f}" for name in ("of_plain", "of_colocated", "of_one_cohort")
        )
        plain, colocated, one_cohort = ratios
        yield (
            f"{run['system']:<13}{run['kind']:<12}{run['depth']:>6}{run['concurrency']:>6}{plain:>10}{colocated:>14}"
            f"{one_cohort:>15}"
        )


def _all(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, {report['machine']}, {report['date']}, {report['seconds']} s"
    for name, part in report["parts"].items():
        yield f"{name:<16}{part['outcome']:<12}{part['seconds']:>7} s of {part['share_s']}  {part['command']}"
    for aim in report["aims"]:
        bound = f"≥ {aim['at_least']}" if "at_least" in aim else f"≤ {aim['at_most']}"
        word = {True: "met", False: "missed", None: "not measured"}[aim["met"]]
        value = "-" if aim["measured"] is None else aim["measured"]
        yield f"{word:<13}{value:>10}  {bound:<8}{aim['part']}: {aim['aim']}"
    for part in report["parts"].values():
        if part["report"] is not None:
            yield ""
            yield as_table(part["report"])


def _hidden(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, weights {report['weights']}, {report['machine']}, {report['date']}"
    yield f"prompts of {min(report['prompt_tokens'])} to {max(report['prompt_tokens'])} tokens"
    yield "window  dtype  places  acceptance        E[R]  prompt bytes      ms  round bytes      ms"
    for one in report["hidden"]:
        rates = " ".join(f"{rate:.3f}" for rate in one["acceptance_by_position"])
        yield (
            f"{one['window'] or 'all':>6}{one['dtype']:>7}{one['places']:>8}  {rates:<18}{one['e_r']:.3f}"
            f"{one['prompt_bytes']:>14}{one['prompt_ms']:>8.2f}{one['round_bytes']:>13}{one['round_ms']:>8.3f}"
        )


def _runs(runs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for run in runs:
        rates = " ".join(f"{rate:.2f}" for rate in run["acceptance_by_position"])
        costs = run["ledger_ms"] or {}
        cells = [
            f"{costs.get(name, float('nan')):7.2f}" for name in ("c_main", "c_mtp", "c_verify", "c_pack", "c_sync")
        ]
        by_ledger, bound, hidden, of_best = (
            "-" if run[name] is None else f"{run[name]:.2f}"
            for name in ("speedup_ledger", "speedup_bound", "hidden_share", "of_best_fixed")
        )
        if interval := run["of_best_fixed_interval"]:
            of_best += f" ({interval[0]:.2f} to {interval[1]:.2f})"
        equal = "equal" if run["text_equal"] else "DIFFERS"
        yield (
            f"{run['kind']:<12}{run['depth']:>6}{run['concurrency']:>6}"
            f"{run['tps']:>9.1f}{run['e_r']:>7.2f}  {rates:<16}"
            f"{' '.join(cells)} {run['speedup']:>7.2f}{by_ledger:>11}{bound:>9}{hidden:>7}{of_best:>22}  {equal}"
        )


def _engine(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{report['model']} ({report['family']}, stored {'+'.join(report['storage'])}), weights {report['weights']}, "
        f"numerics {report['numerics']}, EP {report['ep_size']}, {report['machine']}, {report['date']}"
    )
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    yield (
        "batch depth   rows  ms/step   (cpu)  forward (best)    mtp  select   pack  verify/main (best)  tokens/round"
        "  tokens/s"
    )
    for cell in report["cells"]:
        ratio, best = (
            "-" if cell[name] is None else f"{cell[name]:.3f}"
            for name in ("c_verify_over_c_main", "c_verify_over_c_main_best")
        )
        yield (
            f"{cell['batch']:>5}{cell['depth']:>6}{cell['rows']:>7.1f}{cell['ms_per_step']:>9.3f}{cell['cpu_ms_per_step']:>8.3f}"
            f"{cell['forward_ms']:>9.3f}{cell['forward_ms_best']:>7.2f}{cell['mtp_ms']:>7.3f}{cell['select_ms']:>8.3f}"
            f"{cell['pack_ms']:>7.3f}{ratio:>13}{best:>7}{cell['tokens_per_round']:>14.3f}{cell['tokens_per_s']:>10.1f}"
        )
    for rank, ledger in enumerate(report["memory_bytes"]):
        yield f"rank {rank} holds, in MiB, with {ledger['batch']} sequences"
        for name, size in ledger.items():
            if name not in ("batch", "experts"):
                yield f"  {name:<16}{'not measured' if size is None else f'{size / 2**20:>12.3f}'}"


def _prefix(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, numerics {report['numerics']}, {report['machine']}, {report['date']}"
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    yield "words  prompt  cached  first token cold      hit   ratio  ms/token cold      hit   ratio  text"
    for one in report["prompts"]:
        yield (
            f"{one['words']:>5}{one['prompt_tokens']:>8}{one['cached_tokens']:>8}{one['first_token_ms_cold']:>15.1f} ms"
            f"{one['first_token_ms_hit']:>9.1f}{one['first_token_ratio']:>8.2f}{one['token_ms_cold']:>15.2f}"
            f"{one['token_ms_hit']:>9.2f}{one['token_ratio']:>8.2f}  {'equal' if one['text_equal'] else 'DIFFERS'}"
        )


def _scale(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, {report['machine']}, {report['date']}"
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    for run in report["scale"]:
        yield (
            f"{run['streams']} streams: {run['tokens_per_s']:.0f} tokens/s, added to a step {run['added_ms_a_step']} ms"
            f" (declared {run['declared_ms_a_step']}), hidden share {run['hidden_share']}, emit delay"
            f" {run['emit_delay_ms']}, wrong {run['num_wrong']}"
        )
        for name in ("cpu_us_a_token", "cores_used", "kib_a_stream"):
            yield f"  {name:<16}" + "  ".join(f"{role} {value}" for role, value in run[name].items())


def _startup(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, {report['machine']}, {report['date']}"
    yield f"$ {report['command']}"
    yield f"ready after         {report['ready_s']:.1f} s"
    yield f"first token         {report['first_token_s']:.3f} s (then {report['first_token_warm_s']:.3f} s)"
    yield f"memory (PSS)        {report['pss_mib']:.0f} MiB"
    for one in report["processes"]:
        yield f"  {one['pss_mib']:>8.1f}  {one['name']}"
    left = ", ".join(report["left_behind"]) or "nothing"
    yield f"stopped after       {report['stop_s']:.1f} s, left behind: {left}"
