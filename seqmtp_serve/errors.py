"""Every error a caller can meet: whose fault it is, and whether a retry can help.

    SeqMTPError
    ├── CallerError                     the request is wrong; the same request will fail again
    │   ├── InvalidField                a field is malformed, out of range, or not supported
    │   ├── NoTokenLeft                 its bans, bias and constraints left no token that may come
    │   ├── ContextOverflow             prompt plus budget exceed the model's context
    │   ├── ModelNotFound               no such model here
    │   ├── RequestNotFound             no such request id, or its replay window has passed
    │   ├── RequestCancelled            it was cancelled before its text was over
    │   ├── IdempotencyConflict         the key was used before, for another request
    │   └── RateLimited                 the caller's own limit is used up; retry after `retry_after_s`
    ├── Unavailable                     nothing wrong with the request; retry after `retry_after_s`
    │   ├── Overloaded                  queue, pages or store are full
    │   ├── NotReady                    no target group (or store) is reachable yet
    │   └── Draining                    this worker is ending; another one goes on
    ├── ProtocolError                   a peer's message does not fit this state; it changed nothing
    │   ├── AncestryMismatch            the row or draft was computed from another prefix
    │   ├── StaleVersion                the message is about a version that has passed
    │   ├── Fenced                      a newer epoch owns the request: the sender must let go of it at once
    │   └── IllegalTransition           the event is not legal in the state it met
    ├── StoreError                      the frontier store
    │   ├── StoreUnreachable            no answer in time; the call may be repeated as it was
    │   └── StoreBehind                 the store lags behind what a reader was already given
    ├── CheckpointError                 files that cannot be served; names the tensor or field
    │   ├── TargetIncomplete            the target gate failed: nothing can be served
    │   └── MtpIncomplete               the MTP gate failed: the target still serves, at depth 0
    ├── TrainingError                   a training run cannot go on; its last checkpoint is intact
    │   ├── BadCorpus                   the corpus is not what its record says, or not what the model can read
    │   ├── SharingBroken               a tensor meant to be shared is not, or the optimizer holds it twice
    │   ├── LossDiverged                the loss is no number; nothing of that step was applied
    │   ├── CheckpointNotWritten        no room, or no permission: the checkpoint before is still the latest
    │   └── RankLost                    a process of the run ended; start the run again to continue
    └── InternalError                   an invariant of ours broke; the request ends, the process goes on

gRPC and HTTP codes for each are in one table, `services/rpc/status.py`, and a test checks that it is complete.
"""

from __future__ import annotations


class SeqMTPError(Exception):
    """Root. `code` is a stable machine word; the message is one sentence that says what to do about it."""

    code = "internal_error"
    retryable = False


class CallerError(SeqMTPError):
    """The request itself is wrong."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidField(CallerError):
    """A field is malformed, out of range or not supported; `param` names it."""

    code = "invalid_value"


class NoTokenLeft(CallerError):
    """What the request allows and bans left no token that may come; what was committed before stays readable."""

    code = "no_token_left"


class ContextOverflow(CallerError):
    """Prompt plus budget do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(CallerError):
    """The named model is not served here."""

    code = "model_not_found"


class RequestNotFound(CallerError):
    """No such request, or its replay window has passed."""

    code = "request_not_found"


class RequestCancelled(CallerError):
    """The request was cancelled, or nobody read it for its grace time. What was committed stays readable."""

    code = "request_cancelled"


class IdempotencyConflict(CallerError):
    """The same Idempotency-Key with another body."""

    code = "idempotency_conflict"


class RateLimited(CallerError):
    """The caller's API key has used up what it may."""

    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Unavailable(SeqMTPError):
    """The service cannot take the request now."""

    code = "unavailable"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Queue, pages or store memory are full."""

    code = "overloaded"


class NotReady(Unavailable):
    """No target group or no store is reachable yet."""

    code = "not_ready"


class Draining(Unavailable):
    """The worker that was asked is ending. Whatever it had is in the records: ask another one, at once."""

    code = "draining"


class ProtocolError(SeqMTPError):
    """A peer's message does not fit the receiver's state; the receiver changed nothing."""

    code = "protocol_error"


class AncestryMismatch(ProtocolError):
    """The message's digest names another prefix than the receiver's."""

    code = "ancestry_mismatch"


class StaleVersion(ProtocolError):
    """The message is about a version that has passed (or has not come)."""

    code = "stale_version"


class Fenced(ProtocolError):
    """A newer epoch owns the request."""

    code = "fenced"


class IllegalTransition(ProtocolError):
    """The event is not legal in the state it met."""

    code = "illegal_transition"


class StoreError(SeqMTPError):
    """The frontier store failed or refused."""

    code = "store_error"


class StoreUnreachable(StoreError):
    """No answer in time. Every store call is idempotent: repeat it as it was."""

    code = "store_unreachable"
    retryable = True


class StoreBehind(StoreError):
    """The store is behind a row that a reader already has."""

    code = "store_behind"


class CheckpointError(SeqMTPError):
    """The checkpoint cannot be served; the message names the tensor or field."""

    code = "checkpoint_error"


class TargetIncomplete(CheckpointError):
    """The target gate failed."""

    code = "target_incomplete"


class MtpIncomplete(CheckpointError):
    """The MTP gate failed; the target may still serve at depth 0."""

    code = "mtp_incomplete"


class TrainingError(SeqMTPError):
    """A training run cannot go on. Its last checkpoint is intact; the message says what to do before continuing."""

    code = "training_error"


class BadCorpus(TrainingError):
    """The corpus does not fit its own record, or the model."""

    code = "bad_corpus"


class SharingBroken(TrainingError):
    """A shared tensor has memory of its own, or the optimizer does not hold each tensor once."""

    code = "sharing_broken"


class LossDiverged(TrainingError):
    """The loss or a gradient is no finite number; the step was not applied."""

    code = "loss_diverged"


class CheckpointNotWritten(TrainingError):
    """Writing a checkpoint failed; the one before is untouched."""

    code = "checkpoint_not_written"


class RankLost(TrainingError):
    """A process of the run ended."""

    code = "rank_lost"
    retryable = True


class InternalError(SeqMTPError):
    """An invariant of this program broke."""
