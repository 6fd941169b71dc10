"""`seqmtp train`: build a corpus, train on it, look at the run, export a checkpoint."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

_DRAFTS = 3  # positions of a self-fed chain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of `seqmtp train`."""
    commands = parser.add_subparsers(dest="train_command", metavar="COMMAND", required=True)
    corpus = commands.add_parser("corpus", help="the standard library of this Python as token ids, with its tokenizer")
    corpus.add_argument("--out", type=Path, required=True, help="folder for the token ids and the tokenizer")
    corpus.add_argument("--vocab", type=int, default=1024, help="size of the vocabulary")

    run = commands.add_parser("run", help="train; continues a run found in --out")
    run.add_argument("--recipe", default="v3-tiny", help="a built-in name, or the recipe.json of a run")
    run.add_argument("--corpus", type=Path, required=True, help="folder of `train corpus`")
    run.add_argument("--out", type=Path, required=True, help="folder of the run")
    run.add_argument("--ranks", type=int, default=1, help="processes, one thread each")
    run.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: one GPU a rank")
    run.add_argument("--layout", choices=("expert", "data"), default=None, help="share out the experts, or copy them")
    run.add_argument("--tokens", type=int, default=None, help="length of the run, in place of the recipe's")
    run.add_argument("--until", type=int, default=0, help="stop after this step; the same command continues")
    run.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")

    evaluation = commands.add_parser(
        "evaluate", help="held-out figures of the latest checkpoint, main-only and assisted"
    )
    evaluation.add_argument("--run", type=Path, required=True, help="folder of a run")
    evaluation.add_argument("--corpus", type=Path, required=True, help="folder of `train corpus`")
    evaluation.add_argument("--tokens", type=int, default=20_000, help="held-out tokens read teacher-forced")
    evaluation.add_argument("--prompts", type=int, default=96, help="held-out prompts continued and drafted self-fed")
    evaluation.add_argument("--reply", type=int, default=64, help="tokens of each continuation")
    evaluation.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0], help="of the continuations; 0 is greedy, others seeded"
    )
    evaluation.add_argument("--seed", type=int, default=0, help="of the seeded ones")

    refine = commands.add_parser("refine", help="train a run's MTP layer on the model's own text, the rest frozen")
    refine.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    refine.add_argument("--corpus", type=Path, required=True, help="whose training documents give the prompts")
    refine.add_argument("--out", type=Path, required=True, help="a new run folder; continues what was begun there")
    refine.add_argument("--tokens", type=int, default=320_000, help="tokens of own text")
    refine.add_argument("--prompt", type=int, nargs=2, default=[8, 256], help="tokens of a prompt: least and most")
    refine.add_argument("--reply", type=int, default=128, help="tokens of a continuation, at most")
    refine.add_argument("--hot-share", type=float, default=0.3, help="share of continuations that are not greedy")
    refine.add_argument("--temperature", type=float, default=0.7, help="of those")
    refine.add_argument("--steps", type=int, default=400, help="optimizer steps (default: %(default)s)")
    refine.add_argument("--batch-rows", type=int, default=8192, help="rows of a step, about (default: %(default)s)")
    refine.add_argument("--chains", type=int, default=64, help="self-fed chains a continuation and step")
    refine.add_argument(
        "--depth-weights", type=float, nargs="+", default=[1.0, 0.7, 0.5], help="loss weight of each self-fed depth"
    )
    refine.add_argument(
        "--divergence",
        choices=("kl", "tv"),
        default="kl",
        help="of the draft from the model: Kullback-Leibler or total variation (default: %(default)s)",
    )
    refine.add_argument("--sharpness", type=float, default=1.4, help="multiplies the main model's logits in the loss")
    refine.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    refine.add_argument("--seed", type=int, default=1, help="of samples and order (default: %(default)s)")
    refine.add_argument("--save-every", type=float, default=120, help="seconds between saved states of the loop")

    export = commands.add_parser("export", help="write the latest checkpoint in the released layout")
    export.add_argument("--run", type=Path, required=True, help="folder of a run")
    export.add_argument("--corpus", type=Path, required=True, help="whose tokenizer and record go with the weights")
    export.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    export.add_argument("--without-mtp", action="store_true", help="the main model only")

    ablation = commands.add_parser("ablate", help="extra depth against extra targets, at equal compute")
    ablation.add_argument("--recipe", default="v3-tiny", help="a built-in name, or a recipe.json")
    ablation.add_argument("--corpus", type=Path, required=True, help="folder of `train corpus`")
    ablation.add_argument("--out", type=Path, required=True, help="folder for the arms")
    ablation.add_argument("--tokens", type=int, required=True, help="what the arm without modules reads")
    ablation.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run of each arm a seed")
    ablation.add_argument("--weight", type=float, default=0.3, help="the loss weight of the arms with modules")
    ablation.add_argument("--held-out", type=int, default=20_000, help="held-out tokens read")

    plot = commands.add_parser("plot", help="draw progress.svg of a run")
    plot.add_argument("--run", type=Path, required=True, help="folder of a run")


def run(args: argparse.Namespace) -> int:
    """Run one sub-command on one thread; prints JSON where there is a result."""
    import torch

    torch.set_num_threads(1)
    result = _COMMANDS[args.train_command](args)
    if result is not None:
        print(json.dumps(result, indent=1))
    return 0


def _corpus(args: argparse.Namespace) -> Any:
    from seqmtp_serve.training.joint.stdlib_corpus import build_stdlib_corpus

    return build_stdlib_corpus(args.out, vocab_size=args.vocab)


def _run(args: argparse.Namespace) -> None:
    from seqmtp_serve.training.joint.launch import run_job
    from seqmtp_serve.training.joint.worker import Job

    begin(args.out, chosen_recipe(args.recipe, layout=args.layout, tokens=args.tokens))
    run_job(
        Job(
            corpus=str(args.corpus),
            folder=str(args.out),
            ranks=args.ranks,
            until=args.until,
            save_every_s=args.save_every,
            backend=args.backend,
        )
    )


def chosen_recipe(name: str, *, layout: str | None, tokens: int | None) -> Any:
    """A built-in recipe, or one from a file, with the changes of the command line."""
    from seqmtp_serve.errors import InvalidField
    from seqmtp_serve.training.joint.recipe import recipe_from_record
    from seqmtp_serve.training.joint.recipes import RECIPES

    if name in RECIPES:
        recipe = RECIPES[name]
    elif Path(name).is_file():
        recipe = recipe_from_record(json.loads(Path(name).read_text(encoding="utf-8")))
    else:
        raise InvalidField(f"recipe: {name!r} is neither a file nor one of {', '.join(RECIPES)}", param="recipe")
    plan = replace(recipe.optimization, tokens=tokens) if tokens else recipe.optimization
    return replace(recipe, optimization=plan, layout=layout or recipe.layout)


def begin(folder: Path, recipe: Any) -> None:
    """Put the recipe into the run's folder, or check that the run there has this one."""
    from seqmtp_serve.errors import TrainingError
    from seqmtp_serve.training.joint.worker import RECIPE

    folder.mkdir(parents=True, exist_ok=True)
    path, record = folder / RECIPE, json.loads(json.dumps(recipe.record()))
    if not path.exists():
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    elif json.loads(path.read_text(encoding="utf-8")) != record:
        raise TrainingError(f"{path}: the run here has another recipe; give it with --recipe {path}, or another --out")


def _evaluate(args: argparse.Namespace) -> Any:
    from seqmtp_serve.training.joint.corpus import read_corpus
    from seqmtp_serve.training.joint.evaluate import evaluate
    from seqmtp_serve.training.joint.export import trained_model
    from seqmtp_serve.training.joint.self_fed import self_fed

    recipe, model, _ = trained_model(args.run)
    corpus = read_corpus(args.corpus, "held_out", recipe.model.vocab_size)
    window = recipe.optimization.window
    found = evaluate(model, corpus, window=window, most_tokens=args.tokens)
    found["self_fed"] = [
        self_fed(
            model,
            corpus,
            prompts=args.prompts,
            prompt_len=window // 4,
            reply_len=args.reply,
            depth=_DRAFTS,
            temperature=temperature,
            seed=args.seed,
        )
        for temperature in args.temperatures
    ]
    return found


def _refine(args: argparse.Namespace) -> Any:
    from seqmtp_serve.training.joint.corpus import read_corpus
    from seqmtp_serve.training.joint.export import trained_model
    from seqmtp_serve.training.joint.own_samples import SamplePlan
    from seqmtp_serve.training.joint.refine import RefinePlan, refine
    from seqmtp_serve.training.trainer import FitSettings

    recipe = trained_model(args.run)[0]
    samples = SamplePlan(
        tokens=args.tokens,
        seed=args.seed,
        prompt_lens=(args.prompt[0], args.prompt[1]),
        reply_len=args.reply,
        hot_share=args.hot_share,
        temperature=args.temperature,
    )
    fit = FitSettings(
        steps=args.steps,
        seed=args.seed,
        lr=args.lr,
        batch_rows=args.batch_rows,
        num_chains=args.chains,
        depth_weights=tuple(args.depth_weights),
        sharpness=args.sharpness,
        divergence=args.divergence,
        compute_dtype="float32",
    )
    corpus = read_corpus(args.corpus, "train", recipe.model.vocab_size)
    return refine(args.run, corpus, args.out, RefinePlan(samples=samples, fit=fit), save_every_s=args.save_every)


def _export(args: argparse.Namespace) -> Any:
    from seqmtp_serve.training.joint.export import export_run

    return export_run(args.run, args.corpus, args.out, with_mtp=not args.without_mtp)["parameters"]


def _ablate(args: argparse.Namespace) -> Any:
    from seqmtp_serve.training.joint.ablation import ablate

    base = chosen_recipe(args.recipe, layout=None, tokens=args.tokens)
    return ablate(base, args.corpus, args.out, seeds=args.seeds, weight=args.weight, most_tokens=args.held_out)


def _plot(args: argparse.Namespace) -> None:
    from seqmtp_serve.errors import InvalidField
    from seqmtp_serve.training.joint.plot import PICTURE, draw_progress

    if not draw_progress(args.run, every_s=0):
        raise InvalidField(f"{args.run}: no log, or no matplotlib: pip install 'seqmtp-serve[train]'", param="run")
    print(args.run / PICTURE)


_COMMANDS = {
    "corpus": _corpus,
    "run": _run,
    "evaluate": _evaluate,
    "refine": _refine,
    "export": _export,
    "ablate": _ablate,
    "plot": _plot,
}
