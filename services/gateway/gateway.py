"""The gateway as one object: what its routes share, and the way from a body to a stream of deltas."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqmtp_serve.errors import IdempotencyConflict, RequestNotFound, SeqMTPError
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import Request
from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.gateway.answer import partial_answer
from services.gateway.answer_grammar import answer_grammar
from services.gateway.board import StatusBoard
from services.gateway.body import GenerationBody
from services.gateway.choice import ChoiceText, Delta, merge, read_choice
from services.gateway.coordinators import CoordinatorClient, CoordinatorStatus
from services.gateway.drain import Drain
from services.gateway.job import Job, Limits, plan_job
from services.gateway.letterhead import BODY, choice_ids, digest_of, job_id_of, num_choices, pack_letterhead
from services.gateway.measure import Measures
from services.gateway.reasoning import TAGS, ReasoningText, Thought, begin_after
from services.gateway.shapes import Shape
from services.gateway.shaping_fields import shaping_of
from services.gateway.structured_fields import check_grammar, grammar_of
from services.gateway.text_model import TextModel
from services.gateway.tools.dialects import HERMES
from services.gateway.tools.fields import NO_TOOLS, ToolUse
from services.gateway.tools.parser import ToolParser
from services.gateway.tools.tool_text import ToolText, special_tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Holds no state of a request: coordinators own generations, a handler only reads one."""

    coordinator: CoordinatorClient
    text: TextModel
    board: StatusBoard
    drain: Drain
    measures: Measures
    grammars: GrammarCompiler
    version: str
    reasons: bool = False  # thoughts are told apart from answers

    def limits(self, status: CoordinatorStatus) -> Limits:
        """What the served model allows."""
        return Limits(
            model=self.board.name_of(status),
            max_model_len=status.max_model_len,
            max_depth=status.max_depth,
            vocab_size=self.text.vocab_size,
            eos_token_ids=self.text.eos_token_ids,
            system_fingerprint=f"seqmtp-{self.version}-{status.numerics}-k{status.max_depth}",
        )

    async def plan(
        self,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        status: CoordinatorStatus,
        prefix: str,
        *,
        prompt_field: str,
        budget: tuple[str, int | None],
        key: str | None = None,
        prediction_ids: Sequence[int] = (),
        tools: ToolUse = NO_TOOLS,
        is_chat: bool = False,
    ) -> Job:
        """The job for a body, with the time and a drawn seed; its id is new, or that of its Idempotency-Key.

        `prefix` begins the ids of its dialect; `is_chat`: a thought is told apart from the answer, where the model has
        any. Raises InvalidField, also for a grammar that does not compile.
        """
        dialect = self.text.template.dialect if self.text.template is not None else HERMES
        special = special_tags((*dialect.tags, *TAGS), self.text.tokenizer)
        parses = is_chat and self.reasons
        thought = begin_after(prompts[0], self.text.tokenizer) if parses else Thought.UNPARSED
        grammar = answer_grammar(grammar_of(body), tools, dialect, special, thought)
        if grammar is not None:
            await check_grammar(self.grammars, grammar, self.text.eos_token_ids)
        job = plan_job(
            body,
            prompts,
            self.limits(status),
            job_id=f"{prefix}-{uuid.uuid4().hex}" if key is None else job_id_of(key, prefix),
            created=int(time.time()),
            drawn_seed=secrets.randbits(64),
            prompt_field=prompt_field,
            budget=budget,
            shaping=shaping_of(body, self.text.tokenizer, grammar.text if grammar else ""),
            prediction_ids=prediction_ids,
        )
        return replace(
            job,
            body_digest=digest_of(body, prefix),  # of a body that fits: it is written out for it
            functions=tuple(tools.functions),
            one_call=tools.one_call,
            thought=thought,
        )

    def generate(self, job: Job, meta: Mapping[str, str]) -> AsyncGenerator[Delta, None]:
        """Start the only choice of the job and read it, measured: one call."""
        (request,) = job.choices
        rows = self.coordinator.generate(request, {**meta, **pack_letterhead(job)})
        deltas = self.drain.watch(read_choice(rows, self.choice_text(job, request), 0))
        return self.measures.watch(job, deltas)

    async def start(self, job: Job, meta: Mapping[str, str]) -> list[Snapshot]:
        """Create every choice of the job, or find it: their records. The first choice is asked for alone.

        Raises IdempotencyConflict when they were created for another body. A refused job leaves nothing running.
        """
        kept = {**meta, **pack_letterhead(job)}
        first, *others = job.choices
        records = [await self.coordinator.start(first, kept)]
        try:
            records += await asyncio.gather(*(self.coordinator.start(request, kept) for request in others))
        except SeqMTPError:
            await self.cancel([request.request_id for request in job.choices])
            raise
        if any(record.meta.get(BODY) != job.body_digest for record in records):
            problem = "The Idempotency-Key was used before, for another body: choose a new one."
            raise IdempotencyConflict(problem, param="Idempotency-Key")
        return records

    async def find(self, job_id: str) -> list[Snapshot]:
        """The records of every choice of an answer. Raises RequestNotFound."""
        try:
            first = await self.coordinator.lookup(job_id)
        except RequestNotFound:
            first = await self.coordinator.lookup(f"{job_id}.0")
        _, *others = choice_ids(job_id, num_choices(first.meta))
        return [first, *await asyncio.gather(*map(self.coordinator.lookup, others))]

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """End these requests; what is committed stays readable."""
        await asyncio.gather(*map(self.coordinator.cancel, request_ids))

    def choice_text(self, job: Job, request: Request) -> ChoiceText:
        """The text of one choice of the job, from its first row."""
        tools = None
        if job.functions and self.text.template is not None:
            dialect, names = self.text.template.dialect, frozenset(job.functions)
            parser = ToolParser(dialect, names, key=request.request_id, one_call=job.one_call)
            tools = ToolText(parser, dialect, self.text.tokenizer)
        bos = self.text.bos_token_id
        reasoning = ReasoningText(job.thought, self.text.tokenizer) if job.thought else None
        return ChoiceText(
            request, self.text.tokenizer, echo=job.echo, bos_token_id=bos, tools=tools, reasoning=reasoning
        )

    def as_it_is(self, job: Job, shape: Shape, records: Sequence[Snapshot]) -> dict[str, Any]:
        """The answer as far as its records hold it now."""
        texts = [self.choice_text(job, record.request) for record in records]
        return partial_answer(job, shape, records, texts)

    def deltas(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Read every choice of a job that exists, from its first row."""
        streams = [
            read_choice(self.coordinator.attach(request), self.choice_text(job, request), index)
            for index, request in enumerate(job.choices)
        ]
        return self.drain.watch(merge(streams))
