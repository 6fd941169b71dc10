"""The gateway as one object: what its routes share, and the way from a body to a stream of deltas."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from services.gateway.board import StatusBoard
from services.gateway.body import GenerationBody
from services.gateway.choice import Delta, merge, read_choice
from services.gateway.coordinators import CoordinatorClient, CoordinatorStatus
from services.gateway.job import Job, Limits, plan_job
from services.gateway.measure import Measures
from services.gateway.shapes import Shape
from services.gateway.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Holds no state of a request: coordinators own generations, a handler only reads one."""

    coordinator: CoordinatorClient
    text: TextModel
    board: StatusBoard
    measures: Measures
    version: str

    def limits(self, status: CoordinatorStatus) -> Limits:
        """What the served model allows."""
        return Limits(
            model=self.board.name_of(status),
            max_model_len=status.max_model_len,
            max_depth=status.max_depth,
            vocab_size=self.text.vocab_size,
            eos_token_ids=self.text.eos_token_ids,
            system_fingerprint=f"seqmtp-{self.version}-{status.numerics}",
        )

    def plan(
        self,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        status: CoordinatorStatus,
        shape: Shape,
        *,
        prompt_field: str,
        budget: tuple[str, int | None],
    ) -> Job:
        """The job for a body, with a new id, the time and a drawn seed."""
        return plan_job(
            body,
            prompts,
            self.limits(status),
            job_id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            drawn_seed=secrets.randbits(64),
            prompt_field=prompt_field,
            budget=budget,
        )

    def deltas(self, job: Job, meta: Mapping[str, str]) -> AsyncGenerator[Delta, None]:
        """Start every choice of the job and read them all, measured."""
        streams = [
            read_choice(self.coordinator, request, self.text.tokenizer, index, meta)
            for index, request in enumerate(job.choices)
        ]
        return self.measures.watch(job, merge(streams))
