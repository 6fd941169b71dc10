"""One rank of a run: `python -m seqmtp_serve.training.joint.worker`, started by `launch.py`; alone, called directly.

A typed error ends the rank with a file that says so, for the launcher to raise again.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from seqmtp_serve.errors import RankLost, SeqMTPError, TrainingError
from seqmtp_serve.training.joint.corpus import read_corpus
from seqmtp_serve.training.joint.plot import draw_progress
from seqmtp_serve.training.joint.recipe import recipe_from_record
from seqmtp_serve.training.joint.trainer import JointTrainer, append_line
from seqmtp_serve.training.ranks import Alone, Joined, Ranks

RECIPE = "recipe.json"
FAULT, TYPED_ERROR = 1, 3  # exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is told. `until` is a step; 0 means the recipe's last. `backend`: "gloo", or "nccl" on GPUs."""

    corpus: str
    folder: str
    ranks: int = 1
    until: int = 0
    save_every_s: float = 300.0
    backend: str = "gloo"


def run_rank(job: Job, rank: int, ranks: Ranks) -> None:
    """Train to the end of the job. Rank 0 writes the log, the bar and the plot."""
    torch.set_num_threads(1)
    folder, parent = Path(job.folder), os.getppid()
    recipe = recipe_from_record(json.loads((folder / RECIPE).read_text(encoding="utf-8")))
    corpus = read_corpus(Path(job.corpus), "train", recipe.model.vocab_size)
    trainer = JointTrainer(recipe, corpus, folder, ranks)
    end = min(job.until or recipe.optimization.steps, recipe.optimization.steps)
    with tqdm(total=end, initial=trainer.progress.step, unit="step", disable=rank != 0, mininterval=2) as bar:
        for line in trainer.run(save_every_s=job.save_every_s, until=end):
            if job.ranks > 1 and os.getppid() != parent:
                raise RankLost("the process that started this rank is gone; start the run again to continue")
            if rank == 0:
                append_line(folder, line)
                draw_progress(folder, every_s=60)
                bar.set_postfix(main=f"{line['main']['loss']:.3f}", mtp=f"{line['mtp'][0]['loss']:.3f}", refresh=False)
                bar.update()
    if rank == 0:
        draw_progress(folder, every_s=0)


def start_rank(job: Job, rank: int) -> None:
    """Join the others, run, leave. Raises what the run raises."""
    ranks = Joined(rank, job.ranks, Path(job.folder) / "rendezvous", backend=job.backend)
    run_rank(job, rank, ranks)
    ranks.leave()


def run_alone(job: Job) -> None:
    """The single-rank form, in this process."""
    run_rank(job, 0, Alone())


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.error.json"


def main() -> None:
    job, rank = Job(**json.loads(sys.argv[1])), int(sys.argv[2])
    try:
        start_rank(job, rank)
    except (SeqMTPError, ValueError) as fault:
        typed = fault if isinstance(fault, SeqMTPError) else TrainingError(str(fault))
        error_file(Path(job.folder), rank).write_text(json.dumps({"code": typed.code, "message": str(typed)}))
        os._exit(TYPED_ERROR)  # peers may be waiting inside a collective: leave without asking them
    except Exception:
        traceback.print_exc()
        os._exit(FAULT)  # likewise


def command(job: Job, rank: int) -> list[str]:
    """The command line of a rank."""
    return [sys.executable, "-m", "seqmtp_serve.training.joint.worker", json.dumps(asdict(job)), str(rank)]


if __name__ == "__main__":
    main()
