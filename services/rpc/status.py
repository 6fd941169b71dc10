"""Errors over the wire: one table from error class to gRPC code and HTTP status, and both ways through it.

A servicer ends a call with `abort`, which puts the typed error into the trailers (`seqmtp-error-bin`, an Error
message). A client turns any failed call back with `from_call`. A class without a row of its own has its parent's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from seqmtp_serve import errors
from seqmtp_serve.errors import SeqMTPError
from services.rpc.wire import common

TRAILER = "seqmtp-error-bin"

TABLE: dict[type[SeqMTPError], tuple[grpc.StatusCode, int]] = {
    errors.CallerError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.InvalidField: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.NoTokenLeft: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.ContextOverflow: (grpc.StatusCode.OUT_OF_RANGE, 400),
    errors.ModelNotFound: (grpc.StatusCode.NOT_FOUND, 404),
    errors.RequestNotFound: (grpc.StatusCode.NOT_FOUND, 404),
    errors.RequestCancelled: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    errors.IdempotencyConflict: (grpc.StatusCode.ALREADY_EXISTS, 409),
    errors.RateLimited: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 503),
    errors.NotReady: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.Draining: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.ProtocolError: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.AncestryMismatch: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.StaleVersion: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.Fenced: (grpc.StatusCode.ABORTED, 500),
    errors.IllegalTransition: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.StoreError: (grpc.StatusCode.INTERNAL, 500),
    errors.StoreUnreachable: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.StoreBehind: (grpc.StatusCode.DATA_LOSS, 409),
    errors.CheckpointError: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.TargetIncomplete: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.MtpIncomplete: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.TrainingError: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.BadCorpus: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.SharingBroken: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.LossDiverged: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.CheckpointNotWritten: (grpc.StatusCode.FAILED_PRECONDITION, 500),
    errors.RankLost: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.InternalError: (grpc.StatusCode.INTERNAL, 500),
    errors.SeqMTPError: (grpc.StatusCode.INTERNAL, 500),
}


def error_classes(root: type[SeqMTPError] = SeqMTPError) -> Iterator[type[SeqMTPError]]:
    """`root` and everything below it in the tree of errors.py, parents first.

    A module may refine an error for its own callers; over the wire that one is its parent.
    """
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_classes(child)


BY_CODE: dict[str, type[SeqMTPError]] = {cls.code: cls for cls in error_classes()}


def _row(error: SeqMTPError) -> tuple[grpc.StatusCode, int]:
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def grpc_code(error: SeqMTPError) -> grpc.StatusCode:
    """The gRPC status that a call ending in `error` has."""
    return _row(error)[0]


def http_status(error: SeqMTPError) -> int:
    """The HTTP status that a request ending in `error` has."""
    return _row(error)[1]


def to_message(error: SeqMTPError) -> common.Error:
    """The error as a message."""
    return common.Error(
        code=error.code,
        message=str(error),
        param=getattr(error, "param", None) or "",
        retry_after_s=getattr(error, "retry_after_s", 0.0),
    )


def from_message(message: common.Error) -> SeqMTPError:
    """The typed error again; a code that this version does not know becomes an InternalError that names it."""
    cls = BY_CODE.get(message.code)
    if cls is None or cls is SeqMTPError:
        return errors.InternalError(f"{message.message} (code {message.code or 'missing'})")
    if issubclass(cls, errors.RateLimited) and message.retry_after_s:
        return cls(message.message, param=message.param or None, retry_after_s=message.retry_after_s)
    if issubclass(cls, errors.CallerError):
        return cls(message.message, param=message.param or None)
    if issubclass(cls, errors.Unavailable) and message.retry_after_s:
        return cls(message.message, retry_after_s=message.retry_after_s)
    return cls(message.message)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SeqMTPError) -> NoReturn:
    """End a call with the typed error in its trailers. Always raises."""
    trailers = ((TRAILER, to_message(error).SerializeToString()),)
    await context.abort(grpc_code(error), str(error), trailers)
    raise AssertionError("abort returned")


def from_call(failure: grpc.aio.AioRpcError) -> SeqMTPError:
    """What a failed call means: the typed error in its trailers, or else what its bare status says."""
    for key, value in failure.trailing_metadata() or ():
        if key == TRAILER and isinstance(value, bytes):  # as every trailer whose name ends in -bin is
            return from_message(common.Error.FromString(value))
    sentence = f"{failure.details() or 'no detail'} ({failure.code().name})"
    if failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return errors.Unavailable(sentence)
    return errors.InternalError(sentence)
