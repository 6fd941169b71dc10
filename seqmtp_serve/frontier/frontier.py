"""The carried frontier of one request: what is committed, and what the target must have to go on.

At round entry the output is P + [f]: target KV covers exactly P, f was emitted once and has no KV. Before the
bootstrap there is no f and P is the prompt. A frontier is a value: a round makes a new one, or leaves the old one as
it was (a crash between stages changes nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from seqmtp_serve.errors import IllegalTransition
from seqmtp_serve.frontier.ancestry import DIGEST_LEN, extend_digest, initial_digest
from seqmtp_serve.request import Ref, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The record at one version. `digest` is the ancestry digest of `prompt_ids` and every row of `output_ids`."""

    request_id: str
    epoch: int
    version: int
    digest: bytes
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    finished: bool = False

    @classmethod
    def start(cls, request: Request, epoch: int) -> Frontier:
        """Version 0: admitted, nothing emitted."""
        return cls(
            request_id=request.request_id,
            epoch=epoch,
            version=0,
            digest=initial_digest(request.prompt_ids),
            prompt_ids=request.prompt_ids,
        )

    @property
    def ref(self) -> Ref:
        """The name of this state in every message about it."""
        return Ref(request_id=self.request_id, epoch=self.epoch, version=self.version, digest=self.digest)

    @property
    def token(self) -> int | None:
        """f: emitted, without target KV; the first input of the next round. None before the bootstrap."""
        return self.output_ids[-1] if self.output_ids else None

    @property
    def total_len(self) -> int:
        """Prompt and output: also the absolute position of the next token to be chosen."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def kv_len(self) -> int:
        """len(P): rows of canonical target KV. The parent hidden state sits at position kv_len - 1."""
        return self.total_len - (1 if self.output_ids else 0)

    def advance(self, tokens: Sequence[int], *, finished: bool = False, digest: bytes | None = None) -> Frontier:
        """The state after one committed row. A row with no token is legal only as the end of the request.

        `digest` is that of the new state, if it was computed before.

        Raises IllegalTransition after the end, for an empty row that goes on, and for a bootstrap of more than one
        token: nothing has been verified there.
        """
        if self.finished:
            raise IllegalTransition(f"{self.request_id} has ended at version {self.version}: no round may follow")
        if not tokens and not finished:
            raise IllegalTransition(f"{self.request_id}: a row that does not end the request must hold a token")
        if not self.output_ids and len(tokens) > 1:
            raise IllegalTransition(f"{self.request_id}: the bootstrap is one token, got {len(tokens)}")
        return replace(
            self,
            version=self.version + 1,
            digest=digest or extend_digest(self.digest, tokens),
            output_ids=self.output_ids + tuple(tokens),
            finished=finished,
        )

    def check(self) -> None:
        """Assert the invariants of one state (those across states are the store's)."""
        assert min(self.epoch, self.version) >= 0
        assert len(self.digest) == DIGEST_LEN
        assert self.prompt_ids, "a prompt has at least one token"
        assert self.finished or (self.version == 0) == (not self.output_ids)
        assert self.version <= len(self.output_ids) + (1 if self.finished else 0)
        assert (*self.prompt_ids, *self.output_ids)[self.kv_len :] == (() if self.token is None else (self.token,))
