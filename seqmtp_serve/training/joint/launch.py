"""Start the ranks of a run and watch them: the first to end badly ends the others, and is named."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from seqmtp_serve.errors import RankLost, TrainingError
from seqmtp_serve.training.joint.run_files import latest
from seqmtp_serve.training.joint.worker import TYPED_ERROR, Job, command, error_file, run_alone

_POLL_S = 0.2
_SETTLE_S = 1.0  # a rank that met an error writes it down within this, while its peers see only a closed connection


class RankGroup:
    """The processes of one run, one a rank."""

    def __init__(self, job: Job) -> None:
        folder = Path(job.folder)
        for stale in [folder / "rendezvous", *folder.glob("rank*.error.json")]:
            stale.unlink(missing_ok=True)
        self._folder = folder
        self.processes = [subprocess.Popen(command(job, rank)) for rank in range(job.ranks)]

    def wait(self) -> None:
        """Return when all ranks are done. Raises a rank's own typed error, or RankLost."""
        try:
            while any(process.poll() is None for process in self.processes):
                if any(process.returncode for process in self.processes):
                    break
                time.sleep(_POLL_S)
            if any(process.returncode for process in self.processes):
                time.sleep(_SETTLE_S)
                raise self._fault()
        finally:
            self.stop()

    def stop(self) -> None:
        """End every rank; returns when all are gone."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _fault(self) -> TrainingError:
        codes = [process.poll() for process in self.processes]
        for rank, code in enumerate(codes):
            if code == TYPED_ERROR:
                found = json.loads(error_file(self._folder, rank).read_text(encoding="utf-8"))
                return _typed(found["code"], found["message"])
        killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        failed = killed or [rank for rank, code in enumerate(codes) if code]
        whole = latest(self._folder)
        step = f"step {whole['progress']['step']} is intact" if whole else "no step was saved yet"
        return RankLost(f"rank {failed[0]} ended with code {codes[failed[0]]}; {step}: start the run again to continue")


def _typed(code: str, message: str) -> TrainingError:
    kinds: list[type[TrainingError]] = TrainingError.__subclasses__()
    return next((kind(message) for kind in kinds if kind.code == code), TrainingError(message))


def run_job(job: Job) -> None:
    """Train to the end of the job, in this process or in one a rank."""
    if job.ranks == 1:
        run_alone(job)
    else:
        RankGroup(job).wait()
