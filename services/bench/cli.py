"""`seqmtp bench KIND`: figures as JSON on standard output, progress on standard error."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from time import perf_counter
from typing import Any

from services.bench.arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit 1 with a sentence when the system under test fails."""
    from seqmtp_serve.errors import SeqMTPError
    from services.bench.table import as_table

    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background has it ignored; we stop what we start
    try:
        report = asyncio.run(_measure(args))
    except SeqMTPError as fault:
        print(f"seqmtp bench: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if args.json else as_table(report))
    return 0 if report.get("complete", True) else 1


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    kinds = {
        "all": _all,
        "speculation": _speculation,
        "proposers": _proposers,
        "engine": _engine,
        "hidden": _hidden,
        "prefix": _prefix,
        "scale": _scale,
        "startup": _startup,
    }
    return await kinds[args.bench](args)


async def _all(args: argparse.Namespace) -> dict[str, Any]:
    from services.bench.every import measure_all
    from services.bench.parts import parts_of

    parts = parts_of(args.model, quick=args.quick, only=args.only)
    return await measure_all(args.model, parts, seconds=60 * args.minutes, output=args.output)


async def _engine(args: argparse.Namespace) -> dict[str, Any]:
    from seqmtp_serve.config import Kernels
    from services.bench.engine import EngineWorkload, measure_engine
    from services.settings_sources import load

    workload = EngineWorkload(
        batches=tuple(sorted({*args.rows} - {0})),
        depths=tuple(sorted({0, *args.depths})),
        context=args.context,
        steps=args.steps,
        repeats=args.repeats,
    )
    kernels = Kernels(
        attention=args.attention_backend,
        prefill=args.prefill_backend,
        experts=args.moe_backend,
        dispatch=args.all2all_backend,
    )
    served = load({"model": {"path": args.model}, "engine": {"device": args.device}}).engine
    config = workload.engine(
        numerics=args.numerics or served.numerics,
        weights=args.weights or served.weights,
        num_threads=args.num_threads,
        kernels=kernels,
        device=args.device,
    )
    return measure_engine(args.model, args.mtp, workload, config, num_ranks=args.ep)


async def _speculation(args: argparse.Namespace) -> dict[str, Any]:
    began = perf_counter()  # before the slow imports
    from services.bench.speculation import measure
    from services.bench.url_backend import UrlBackend

    workload = _workload(args)
    numbers = [depth for depth in workload.depths if isinstance(depth, int)]
    if args.url:
        remote = UrlBackend(args.url)
        await remote.connect()
        return await measure(remote, workload, began)

    from seqmtp_serve.config import EngineConfig
    from services.bench.local_backend import LocalSystem, open_local

    system = LocalSystem(
        model=args.model,
        mtp=args.mtp,
        speculates=any(workload.depths),
        engine=EngineConfig(
            numerics=args.numerics,
            weights=_weights(args),
            num_threads=args.num_threads,
            max_depth=max(*numbers, 1),
            max_batch=max(workload.concurrencies),
            prefix_cache_pages=0,  # each pass computes the same prompts
            prompt_lookup=args.prompt_lookup,
        ),
    )
    async with open_local(system) as local:
        report = await measure(local, workload, began)
        if args.depth_ledger:
            args.depth_ledger.write_text("".join(json.dumps(entry) + "\n" for entry in local.depth_ledger))
        return report


async def _proposers(args: argparse.Namespace) -> dict[str, Any]:
    began = perf_counter()
    from services.bench.proposers import System, measure_proposers

    workload = _workload(args)
    max_depth = max(depth for depth in workload.depths if isinstance(depth, int))
    systems = [
        System(name=name, mtp=args.mtp, max_batch=max(workload.concurrencies), max_depth=max_depth)
        for name in args.systems
    ]
    return await measure_proposers(args.model, systems, workload, began)


def _workload(args: argparse.Namespace) -> Any:
    from services.bench.prompts import prompts_for, read_kinds
    from services.bench.speculation import Workload

    numbers = {depth for depth in args.depths if depth != "auto"}
    return Workload(
        kinds=read_kinds(args.kinds, args.prompts or prompts_for(args.model), args.num_prompts),
        depths=(*sorted({0, *numbers}), *(("auto",) if "auto" in args.depths else ())),
        concurrencies=args.concurrency,
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        prompts_a_stream=args.prompts_a_stream,
        seconds=args.seconds,
    )


async def _hidden(args: argparse.Namespace) -> dict[str, Any]:
    from seqmtp_serve.config import EngineConfig
    from services.bench.hidden import HiddenWorkload, measure_hidden
    from services.settings_sources import load

    served = load({"model": {"path": args.model}}).engine
    workload = HiddenWorkload(
        windows=args.windows,
        dtypes=args.dtypes,
        num_prompts=args.num_prompts,
        prompt_chars=args.prompt_chars,
        max_tokens=args.max_tokens,
        depth=args.depth,
    )
    config = EngineConfig(
        numerics=args.numerics,
        weights=args.weights or served.weights,
        num_threads=args.num_threads,
        max_model_len=served.max_model_len,
        num_pages=args.num_prompts * -(-served.max_model_len // 64),
        max_batch=args.num_prompts,
        max_depth=args.depth,
        prefix_cache_pages=0,
        prompt_lookup=False,  # a copy needs no hidden row
    )
    return await asyncio.to_thread(measure_hidden, args.model, args.mtp, workload, config)


async def _prefix(args: argparse.Namespace) -> dict[str, Any]:
    from seqmtp_serve.config import EngineConfig
    from services.bench.local_backend import LocalSystem, open_local
    from services.bench.prefix import PrefixWorkload, measure_prefix
    from services.bench.url_backend import UrlBackend

    workload = PrefixWorkload(words=args.words, depth=args.depth, max_tokens=args.max_tokens, repeats=args.repeats)
    if args.url:
        remote = UrlBackend(args.url)
        await remote.connect()
        return await measure_prefix(remote, workload)
    engine = EngineConfig(weights=_weights(args), num_threads=args.num_threads, max_depth=max(1, args.depth))
    system = LocalSystem(model=args.model, mtp=args.mtp, speculates=args.depth > 0, engine=engine)
    async with open_local(system) as local:
        return await measure_prefix(local, workload)


async def _scale(args: argparse.Namespace) -> dict[str, Any]:
    from seqmtp_serve.simulated import SimulatedCosts
    from services.bench.scale import ScaleWorkload, measure_scale

    workload = ScaleWorkload(
        streams=args.streams,
        batch=args.batch,
        max_tokens=args.max_tokens,
        cohorts=args.cohorts,
        costs=SimulatedCosts(step_ms=args.step_ms),
    )
    return await measure_scale(args.model, workload)


async def _startup(args: argparse.Namespace) -> dict[str, Any]:
    from tempfile import TemporaryDirectory

    from services.bench.startup import measure_startup, serve_command
    from services.free_port import free_port

    port = free_port()
    with TemporaryDirectory(prefix="seqmtp-bench-", ignore_cleanup_errors=True) as data_dir:
        return await measure_startup(serve_command(args.model, args.serve_args, port, data_dir), port)


def _weights(args: argparse.Namespace) -> Any:
    from services.settings_sources import load

    return args.weights or load({"model": {"path": args.model}}).engine.weights
