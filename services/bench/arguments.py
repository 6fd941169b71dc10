"""The words of `seqmtp bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    every = _kind(
        kinds.add_parser("all", help="every kind in turn, each with a share of the time left; the aims beside them")
    )
    every.add_argument(
        "--minutes", type=float, default=15.0, help="for all together; a kind that takes longer is ended"
    )
    every.add_argument("--quick", action="store_true", help="the least of each kind: whether all of it works")
    every.add_argument("--only", type=_names, metavar="NAME,NAME", help="these parts")
    every.add_argument("--output", type=Path, metavar="JSON", help="written anew after each part")

    speculation = _kind(kinds.add_parser("speculation", help="the same prompts at several depths and concurrencies"))
    _add_engine(speculation)
    speculation.add_argument("--url", help="measure a running service instead of one in this process")
    _add_prompts(speculation)
    speculation.add_argument(
        "--depths", type=_depths, default=(0, 1, 2, 3), metavar="N,N,auto", help="auto: the depth controller's"
    )
    speculation.add_argument(
        "--prompt-lookup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="drafts may be copied from the request's own text; not with --url",
    )
    speculation.add_argument("--depth-ledger", type=Path, metavar="JSONL", help="write the controller's decisions here")
    speculation.add_argument("--concurrency", type=_counts, default=(1, 8), metavar="N,N", help="streams at a time")

    proposers = _kind(
        kinds.add_parser(
            "proposers", help="services side by side: the module in a process of its own, and in the target's"
        )
    )
    proposers.add_argument("--mtp", metavar="PATH", help="folder of the MTP module")
    _add_prompts(proposers)
    proposers.add_argument(
        "--systems",
        type=_names,
        default=("remote", "remote-2", "remote-auto", "colocated"),
        metavar="NAME,NAME",
        help="remote or colocated; with -2: of two cohorts; with -auto: with depth control",
    )
    proposers.add_argument("--depths", type=_counts, default=(0, 1, 2), metavar="N,N", help="drafts a round")
    proposers.add_argument("--concurrency", type=_counts, default=(1, 4), metavar="N,N", help="streams at a time")

    engine = _kind(kinds.add_parser("engine", help="milliseconds a target step by rows and depth, and memory by owner"))
    _add_engine(engine)
    engine.set_defaults(numerics=None)  # as the model is served on its device
    engine.add_argument("--rows", type=_counts, default=(1, 2, 4, 8, 32), metavar="N,N", help="sequences in a batch")
    engine.add_argument("--depths", type=_counts, default=(0, 1), metavar="N,N", help="drafts a sequence")
    engine.add_argument("--ep", type=_positive, default=1, metavar="N", help="ranks that share experts and sequences")
    engine.add_argument("--context", type=_positive, default=64, help="prompt tokens of each sequence")
    engine.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda (a rank's own), cuda:N")
    engine.add_argument("--steps", type=_positive, default=16, help="measured steps (default: %(default)s)")
    engine.add_argument("--repeats", type=_positive, default=3, help="of each cell (default: %(default)s)")
    for flag in ("--attention-backend", "--prefill-backend", "--moe-backend", "--all2all-backend"):
        engine.add_argument(flag, default="auto", metavar="NAME", help="see `seqmtp backends` (default: auto)")

    hidden = _kind(
        kinds.add_parser("hidden", help="acceptance by window and form of the hidden rows, and what they cost")
    )
    _add_engine(hidden)
    hidden.add_argument("--windows", type=_counts, default=(0, 512, 128, 32), metavar="N,N", help="0: all rows")
    hidden.add_argument(
        "--dtypes",
        type=_names,
        default=("fp32", "fp16", "bf16", "int8"),
        metavar="NAME,NAME",
        help="forms of the rows on their way",
    )
    hidden.add_argument("--num-prompts", type=_positive, default=12, help="how many (default: %(default)s)")
    hidden.add_argument("--prompt-chars", type=_positive, default=2800, help="characters of a prompt, at least")
    hidden.add_argument("--max-tokens", type=_positive, default=64, help="of an answer (default: %(default)s)")
    hidden.add_argument("--depth", type=_positive, default=3, help="drafts a round (default: %(default)s)")

    prefix = _kind(
        kinds.add_parser("prefix", help="the same prompt twice: what the prefix cache spares the second time")
    )
    _add_engine(prefix)
    prefix.add_argument("--url", help="measure a running service instead of one in this process")
    prefix.add_argument("--words", type=_counts, default=(100, 400, 1000), metavar="N,N", help="words of a prompt")
    prefix.add_argument("--depth", type=int, default=1, help="drafts a round")
    prefix.add_argument("--max-tokens", type=_positive, default=48, help="of an answer (default: %(default)s)")
    prefix.add_argument("--repeats", type=_positive, default=5, help="of each prompt (default: %(default)s)")

    scale = _kind(kinds.add_parser("scale", help="what gateway, coordinator and store carry, with a simulated target"))
    scale.add_argument("--streams", type=_counts, default=(64, 256, 1000), metavar="N,N", help="at once")
    scale.add_argument("--batch", type=_positive, default=64, help="of them running; the others wait")
    scale.add_argument("--max-tokens", type=_positive, default=64, help="of an answer (default: %(default)s)")
    scale.add_argument(
        "--cohorts",
        type=_positive,
        default=1,
        help="2: one half of the batch verifies while the other drafts (default: %(default)s)",
    )
    scale.add_argument("--step-ms", type=float, default=25.0, help="declared time of a target pass")

    startup = _kind(kinds.add_parser("startup", help="time to ready, first token and memory of a service it starts"))
    startup.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="passed on to seqmtp serve")


def _kind(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What every kind takes. `scale` uses nothing of the model but its tokenizer."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a built-in name, a folder or a .gguf file (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Of kinds that compute in this process."""
    parser.add_argument("--mtp", metavar="PATH", help="folder of the MTP module")
    parser.add_argument(
        "--numerics",
        choices=("invariant", "fast"),
        default="invariant",
        help="invariant: same bits for any batch (default: invariant; on a GPU fast)",
    )
    parser.add_argument("--weights", choices=("int8", "fp32", "bf16"), help="default: as the model is served")
    parser.add_argument(
        "--num-threads", type=_positive, default=1, help="threads of the matrix products (default: %(default)s)"
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    """Which prompts, how many, how often."""
    parser.add_argument("--prompts", type=Path, metavar="JSONL", help='lines of {"prompt"} or {"turns"}')
    parser.add_argument("--num-prompts", type=_positive, default=16, help="how many of them (default: %(default)s)")
    parser.add_argument("--max-tokens", type=_positive, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--kinds", type=_names, default=("chat",), help="of: chat, predictable, random")
    parser.add_argument(
        "--prompts-a-stream",
        type=_positive,
        metavar="N",
        help="fewer prompts where few streams are slow (default: all)",
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=_positive,
        metavar="S",
        help="measure each cell less often where all would take longer, start-up included",
    )


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
