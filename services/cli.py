"""The `seqmtp` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> exit code`.

Only the chosen module is imported: `seqmtp --help` touches neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from seqmtp_serve import __version__
from seqmtp_serve.errors import SeqMTPError
from services.cli_examples import EXAMPLES

# name -> (module, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("services.serve", "serve a model over the OpenAI API"),
    "chat": ("services.console.chat", "talk to a service, each token in the colour of its origin"),
    "complete": ("services.console.complete", "go on with a text"),
    "top": ("services.console.top", "a live board of a service: E[R], tokens a second, workers"),
    "timeline": ("services.console.timeline", "draw an answer's rounds, one lane a process, as SVG"),
    "inspect": ("services.inspect", "say what a checkpoint holds, and whether it can be served"),
    "export": ("services.export", "write a checkpoint anew: without its MTP layers, or without fp8"),
    "seal": ("services.seal", "record the values of an MTP part, so that a later change shows"),
    "fit": ("seqmtp_serve.training.cli", "fit an MTP module to a frozen model"),
    "train": ("seqmtp_serve.training.joint.cli", "train a small DeepSeek-V3-layout model with its MTP modules"),
    "bench": ("services.bench.cli", "measure: all of it, or one kind"),
    "backends": ("services.backends", "say which kernels this machine can run, and why not the others"),
    "config": ("services.config_command", "show the settings in force, or their schema"),
    "collect-env": ("services.console.collect_env", "say what a bug report needs to know of this machine"),
}
FIRST_STEPS = """first steps:
  seqmtp serve                     the shipped chat model at http://127.0.0.1:8000, with a page to chat on
  seqmtp chat                      talk to it here, and see which tokens were drafted
  seqmtp top                       watch what speculation earns
  seqmtp COMMAND --help            flags of a command, with examples"""
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
EXIT_BAD_USAGE = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand and exit with its code. A typed error is one line on stderr and code 1 (2: settings)."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words else "--help"
    if chosen in ("version", "--version", "-V"):
        print(f"seqmtp-serve {__version__}")
        return
    if chosen not in COMMANDS:
        _overview().parse_args(words or ["--help"])  # prints help, or the complaint about an unknown command
        return
    module_name, purpose = COMMANDS[chosen]
    module = import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"seqmtp {chosen}", description=f"{purpose[0].upper()}{purpose[1:]}.")
    module.add_arguments(parser)
    if chosen in EXAMPLES:
        parser.epilog, parser.formatter_class = EXAMPLES[chosen].strip("\n"), argparse.RawDescriptionHelpFormatter
    args = parser.parse_args(words[1:])
    try:
        code = module.run(args)
        sys.stdout.flush()
        sys.exit(code)
    except SeqMTPError as error:
        print(f"seqmtp: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_USAGE if error.code == "invalid_value" else 1)
    except BrokenPipeError:  # whoever read the output, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_UNREAD)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seqmtp",
        description="Exactly-once speculative serving for models with multi-token-prediction modules.",
        epilog=FIRST_STEPS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=18),
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    commands.add_parser("version", help="print the version")
    return parser


if __name__ == "__main__":
    main()
