"""The shortest coordinator: keeps a batch of sequences on one target engine and commits whatever a step chose.

Nothing is stored and nothing can fail over: it is for timing an engine, not for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError
from seqmtp_serve.frontier.ancestry import extend_digest, initial_digest
from seqmtp_serve.ports import Admit, Prefill, Publish, Release, RowResult, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref, Request, SamplingParams


@dataclass(slots=True, kw_only=True)
class Stepper:
    """A batch of greedy sequences, all prefilled and bootstrapped. `step` runs one round of every one of them.

    A round has at most `depth` drafts, and no more are made.
    """

    engine: TargetEngine
    depth: int
    refs: dict[str, Ref] = field(default_factory=dict)
    publish: list[Publish] = field(default_factory=list)
    num_steps: int = 0

    def admit(self, prompts: Sequence[Sequence[int] | None], *, length: int, chunk: int) -> None:
        """Prefill every prompt, all `length` long, `chunk` rows a step, and bootstrap it.

        None is a prompt of another rank: ranks of a group must take as many steps, so it is stepped along without rows.
        """
        for index, prompt in enumerate(prompts):
            request_id = f"{self.num_steps}-{index}"
            if prompt is not None:
                params = SamplingParams(temperature=0.0, max_tokens=1 << 30, ignore_eos=True, max_depth=self.depth)
                request = Request(request_id=request_id, prompt_ids=tuple(prompt), params=params)
                digest = initial_digest(request.prompt_ids)
                self.refs[request_id] = Ref(request_id=request_id, epoch=1, version=0, digest=digest)
                self._run(admit=(Admit(ref=self.refs[request_id], request=request, output_ids=()),))
            else:
                self._run()
            for start in range(0, length, chunk):
                stop = min(start + chunk, length)
                own = (request_id,) if prompt is not None else ()
                self._run(
                    prefill=tuple(
                        Prefill(ref=self.refs[name], start=start, stop=stop, last=stop == length) for name in own
                    )
                )

    def step(self) -> StepReport:
        """One round."""
        return self._run(verify=tuple(Verify(ref=ref, depth=self.depth) for ref in self.refs.values()))

    def release(self) -> None:
        """Forget the whole batch."""
        self._run(release=tuple(Release(request_id=name, epoch=ref.epoch) for name, ref in self.refs.items()))
        self.refs.clear()
        self.publish.clear()

    def _run(
        self,
        *,
        admit: tuple[Admit, ...] = (),
        prefill: tuple[Prefill, ...] = (),
        verify: tuple[Verify, ...] = (),
        release: tuple[Release, ...] = (),
    ) -> StepReport:
        self.num_steps += 1
        published, self.publish = () if release else tuple(self.publish), []
        plan = StepPlan(
            step_id=self.num_steps, publish=published, admit=admit, prefill=prefill, verify=verify, release=release
        )
        report = self.engine.step(plan)
        for row in report.rows:
            self._commit(row)
        return report

    def _commit(self, row: RowResult) -> None:
        if row.error is not None:
            raise InternalError(f"the engine refused its step: {row.message}")
        if row.tokens:
            old = self.refs[row.ref.request_id]
            ref = replace(old, version=old.version + 1, digest=extend_digest(old.digest, row.tokens))
            self.refs[ref.request_id] = ref
            self.publish.append(Publish(ref=ref, keep=row.accepted + 1 if old.version else 0))
