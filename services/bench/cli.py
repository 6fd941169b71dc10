"""`seqmtp bench KIND`: figures as JSON on standard output, progress on standard error."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="speculation|engine|prefix|scale|startup")
    speculation = kinds.add_parser("speculation", help="the same prompts at several depths and concurrencies")
    speculation.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    speculation.add_argument("--mtp", metavar="PATH", help="folder of the MTP module")
    speculation.add_argument("--url", help="measure a running service instead of one in this process")
    speculation.add_argument("--prompts", type=Path, metavar="JSONL", help='lines of {"prompt"} or {"turns"}')
    speculation.add_argument("--num-prompts", type=_positive, default=16)
    speculation.add_argument("--max-tokens", type=_positive, default=128)
    speculation.add_argument("--kinds", type=_names, default=("chat",), help="of: chat, predictable, random")
    speculation.add_argument(
        "--prompts-a-stream",
        type=_positive,
        metavar="N",
        help="fewer prompts where few streams are slow (default: all)",
    )
    speculation.add_argument(
        "--depths", type=_depths, default=(0, 1, 2, 3), metavar="N,N,auto", help="auto: the depth controller's"
    )
    speculation.add_argument("--depth-ledger", type=Path, metavar="JSONL", help="write the controller's decisions here")
    speculation.add_argument("--concurrency", type=_counts, default=(1, 8), metavar="N,N")
    speculation.add_argument("--repeats", type=_positive, default=3)
    speculation.add_argument("--numerics", choices=("invariant", "fast"), default="invariant")
    speculation.add_argument("--weights", choices=("int8", "fp32"), help="default: as the model is served")
    speculation.add_argument("--num-threads", type=_positive, default=1)
    speculation.add_argument("--json", action="store_true", help="JSON instead of a table")

    engine = kinds.add_parser("engine", help="milliseconds a target step by rows and depth, and memory by owner")
    engine.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    engine.add_argument("--mtp", metavar="PATH", help="folder of the MTP module")
    engine.add_argument("--rows", type=_counts, default=(1, 2, 4, 8, 32), metavar="N,N", help="sequences in a batch")
    engine.add_argument("--depths", type=_counts, default=(0, 1), metavar="N,N")
    engine.add_argument("--ep", type=_positive, default=1, metavar="N", help="ranks that share experts and sequences")
    engine.add_argument("--context", type=_positive, default=64, help="prompt tokens of each sequence")
    engine.add_argument("--steps", type=_positive, default=16)
    engine.add_argument("--repeats", type=_positive, default=3)
    engine.add_argument("--numerics", choices=("invariant", "fast"), default="invariant")
    engine.add_argument("--weights", choices=("int8", "fp32"), help="default: as the model is served")
    engine.add_argument("--num-threads", type=_positive, default=1)
    engine.add_argument("--json", action="store_true", help="JSON instead of a table")

    prefix = kinds.add_parser("prefix", help="the same prompt twice: what the prefix cache spares the second time")
    prefix.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    prefix.add_argument("--mtp", metavar="PATH", help="folder of the MTP module")
    prefix.add_argument("--url", help="measure a running service instead of one in this process")
    prefix.add_argument("--words", type=_counts, default=(100, 400, 1000), metavar="N,N", help="words of a prompt")
    prefix.add_argument("--depth", type=int, default=1, help="drafts a round")
    prefix.add_argument("--max-tokens", type=_positive, default=48)
    prefix.add_argument("--repeats", type=_positive, default=5)
    prefix.add_argument("--weights", choices=("int8", "fp32"), help="default: as the model is served")
    prefix.add_argument("--num-threads", type=_positive, default=1)
    prefix.add_argument("--json", action="store_true", help="JSON instead of a table")

    scale = kinds.add_parser("scale", help="what gateway, coordinator and store carry, with a simulated target")
    scale.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="whose tokenizer is used; nothing else of it is")
    scale.add_argument("--streams", type=_counts, default=(64, 256, 1000), metavar="N,N", help="at once")
    scale.add_argument("--batch", type=_positive, default=64, help="of them running; the others wait")
    scale.add_argument("--max-tokens", type=_positive, default=64)
    scale.add_argument("--cohorts", type=_positive, default=1)
    scale.add_argument("--step-ms", type=float, default=25.0, help="declared time of a target pass")
    scale.add_argument("--json", action="store_true", help="JSON instead of a table")

    startup = kinds.add_parser("startup", help="time to ready, first token and memory of a service it starts")
    startup.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    startup.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="passed on to seqmtp serve")
    startup.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit 1 with a sentence when the system under test fails."""
    from seqmtp_serve.errors import SeqMTPError
    from services.bench.table import as_table

    try:
        report = _engine(args) if args.bench == "engine" else asyncio.run(_service(args))
    except SeqMTPError as fault:
        print(f"seqmtp bench: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if args.json else as_table(report))
    return 0


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    from services.bench.engine import EngineWorkload, measure_engine

    workload = EngineWorkload(
        batches=tuple(sorted({*args.rows} - {0})),
        depths=tuple(sorted({0, *args.depths})),
        context=args.context,
        steps=args.steps,
        repeats=args.repeats,
    )
    config = workload.engine(numerics=args.numerics, weights=_weights(args), num_threads=args.num_threads)
    return measure_engine(args.model, args.mtp, workload, config, num_ranks=args.ep)


async def _service(args: argparse.Namespace) -> dict[str, Any]:
    kinds = {"speculation": _speculation, "prefix": _prefix, "scale": _scale, "startup": _startup}
    return await kinds[args.bench](args)


async def _speculation(args: argparse.Namespace) -> dict[str, Any]:
    from services.bench.prompts import prompts_for, read_kinds
    from services.bench.speculation import Workload, measure
    from services.bench.url_backend import UrlBackend

    numbers = {depth for depth in args.depths if depth != "auto"}
    auto = ("auto",) if "auto" in args.depths else ()
    workload = Workload(
        kinds=read_kinds(args.kinds, args.prompts or prompts_for(args.model), args.num_prompts),
        depths=(*sorted({0, *numbers}), *auto),
        concurrencies=args.concurrency,
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        prompts_a_stream=args.prompts_a_stream,
    )
    if args.url:
        remote = UrlBackend(args.url)
        await remote.connect()
        return await measure(remote, workload)

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
        ),
    )
    async with open_local(system) as local:
        report = await measure(local, workload)
        if args.depth_ledger:
            args.depth_ledger.write_text("".join(json.dumps(entry) + "\n" for entry in local.depth_ledger))
        return report


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

    from services.bench.startup import free_port, measure_startup, serve_command

    port = free_port()
    with TemporaryDirectory(prefix="seqmtp-bench-", ignore_cleanup_errors=True) as data_dir:
        return await measure_startup(serve_command(args.model, args.serve_args, port, data_dir), port)


def _weights(args: argparse.Namespace) -> Any:
    from services.settings import load

    return args.weights or load({"model": {"path": args.model}}).engine.weights


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _depths(text: str) -> tuple[int | str, ...]:
    return tuple("auto" if part == "auto" else _counts(part)[0] for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError("must not be negative")
    return values
