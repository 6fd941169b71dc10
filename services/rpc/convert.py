"""Protobuf <-> ports values: one table of fields, read in both directions. Foreign names stop here.

    message = to_wire(StepPlan(step_id=1))
    plan = from_wire(StepPlan, message)

A record lists, for each field of a value, the codec of its message field (same name). Fields that fit no codec
(oneof, nested errors) have their own pair of functions below the table. Tests check that the table names every field
of both sides, and that every value survives the round trip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from seqmtp_serve import ports, request
from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.frontier.round_notes import RequestLedger, RoundNote
from services.rpc.codecs import (
    AS_IT_IS,
    BIASES,
    DICT,
    FINISH,
    IDS,
    OPTIONAL,
    PLAIN,
    SEQUENCES,
    SOME_TENSOR,
    SPARSE,
    TENSOR,
    TUPLE,
    Codec,
)
from services.rpc.wire import common, coordinator, proposer, target

Value = TypeVar("Value")


def one(kind: type[Any], *, optional: bool = False) -> Codec:
    """A nested value."""
    return Codec(pack=lambda value: to_wire(value), unpack=lambda message: from_wire(kind, message), optional=optional)


def many(kind: type[Any]) -> Codec:
    """A tuple of nested values."""
    return Codec(
        pack=lambda values: [to_wire(value) for value in values],
        unpack=lambda messages: tuple(from_wire(kind, message) for message in messages),
    )


def _plain(names: str, **others: Codec) -> dict[str, Codec]:
    return dict.fromkeys(names.split(), PLAIN) | others


@lru_cache(maxsize=256)
def _pack_choice(choice: DepthChoice) -> str:
    """Kept a while: every request of a step has the step's choice among its notes."""
    return json.dumps(choice.to_json(), separators=(",", ":"))


CHOICE = Codec(
    pack=_pack_choice,
    unpack=lambda entry: DepthChoice.from_json(json.loads(entry)) if entry else None,
)
REF = one(request.Ref)
REQUEST = one(request.Request)
LOGPROBS = many(request.TokenLogprobs)

# value -> (message, its fields). Order is that of ports.py: sorted by who receives them.
TABLE: Mapping[type[Any], tuple[type[Any], dict[str, Codec]]] = {
    request.Shaping: (
        common.Shaping,
        _plain(
            "grammar repetition_penalty frequency_penalty presence_penalty",
            allowed_token_ids=TUPLE,
            bad_words=SEQUENCES,
            logit_bias=BIASES,
        ),
    ),
    request.SamplingParams: (
        common.SamplingParams,
        _plain(
            "temperature top_k top_p min_p seed seeded max_tokens min_tokens ignore_eos "
            "include_stop_str_in_output max_depth",
            stop=TUPLE,
            stop_token_ids=TUPLE,
            shaping=one(request.Shaping, optional=True),
            logprobs=OPTIONAL,
            prompt_logprobs=OPTIONAL,
        ),
    ),
    request.Request: (
        common.Request,
        _plain(
            "request_id choice",
            prompt_ids=IDS,
            params=one(request.SamplingParams),
            eos_token_ids=TUPLE,
            prediction_ids=IDS,
        ),
    ),
    request.Ref: (common.Ref, _plain("request_id epoch version digest")),
    request.TokenLogprobs: (
        common.TokenLogprobs,
        _plain("logprob rank", top_ids=TUPLE, top_logprobs=TUPLE),
    ),
    request.CommittedRow: (
        common.CommittedRow,
        _plain(
            "request_id version drafted accepted origins cached depth_reason predicted forced copied epoch digest",
            tokens=TUPLE,
            finish=FINISH,
            timings_ms=DICT,
            logprobs=LOGPROBS,
            prompt_logprobs=LOGPROBS,
        ),
    ),
    ports.Admit: (target.Admit, {"ref": REF, "request": REQUEST, "output_ids": IDS}),
    ports.Prefill: (target.Prefill, _plain("start stop last next_floor", ref=REF, next_depth=OPTIONAL)),
    ports.Verify: (target.Verify, _plain("depth predicted floor next_floor", ref=REF, next_depth=OPTIONAL)),
    ports.Publish: (target.Publish, _plain("keep", ref=REF)),
    ports.Release: (target.Release, _plain("request_id epoch")),
    ports.StepPlan: (
        target.StepPlan,
        _plain(
            "step_id deadline_ms",
            release=many(ports.Release),
            publish=many(ports.Publish),
            admit=many(ports.Admit),
            prefill=many(ports.Prefill),
            verify=many(ports.Verify),
        ),
    ),
    ports.RowResult: (
        target.RowResult,
        _plain(
            "drafted accepted cached predicted forced copied",
            ref=REF,
            tokens=TUPLE,
            next_copied=TUPLE,
            chances=TUPLE,
            logprobs=LOGPROBS,
            prompt_logprobs=LOGPROBS,
        ),
    ),
    ports.StepCosts: (
        target.StepCosts,
        _plain(
            "forward draft_wait select pack mtp num_rows mtp_touched feed fed_rows fed_bytes draft_prob "
            "num_draft_probs queued"
        ),
    ),
    ports.ExpertWork: (target.ExpertWork, _plain("rank num_pairs num_touched sent_bytes")),
    ports.StepReport: (
        target.StepReport,
        _plain(
            "step_id free_pages proposer_ready refused_drafts draining",
            rows=many(ports.RowResult),
            costs=one(ports.StepCosts),
            experts=many(ports.ExpertWork),
        ),
    ),
    ports.TargetInfo: (
        target.TargetInfo,
        _plain(
            "group_id model max_model_len vocab_size page_size num_pages max_batch max_depth numerics "
            "manifest_fingerprint",
            kernels=DICT,
        ),
    ),
    ports.Snapshot: (
        coordinator.Record,
        _plain(
            "epoch version digest owner acquired lease_left_s",
            request=one(request.Request),
            meta=DICT,
            rows=many(request.CommittedRow),
            finish=FINISH,
        ),
    ),
    RoundNote: (
        coordinator.RoundNote,
        _plain(
            "version depth reason place floor",
            copy_survivals=TUPLE,
            draft_chances=TUPLE,
            choice=CHOICE,
            timings_ms=DICT,
        ),
    ),
    RequestLedger: (
        coordinator.RequestLedger,
        {"record": one(ports.Snapshot), "notes": many(RoundNote)},
    ),
    ports.FeedRows: (
        proposer.FeedRows,
        _plain(
            "first_base depth floor reset",
            ref=REF,
            hidden=TENSOR,
            hidden_scales=SOME_TENSOR,
            next_ids=TUPLE,
            request=one(request.Request, optional=True),
        ),
    ),
    ports.Draft: (
        proposer.Draft,
        _plain("mtp_ms mtp_touched", ref=REF, tokens=TUPLE, draft_probs=SPARSE, chances=TUPLE),
    ),
}


def _pack_stop_reason(row: request.CommittedRow, message: common.CommittedRow) -> None:
    if isinstance(row.stop_reason, str):
        message.stop_string = row.stop_reason
    elif row.stop_reason is not None:
        message.stop_token_id = row.stop_reason


def _unpack_stop_reason(message: common.CommittedRow) -> dict[str, Any]:
    name = message.WhichOneof("stop_reason")
    return {"stop_reason": getattr(message, name) if name else None}


def _pack_error(row: ports.RowResult, message: target.RowResult) -> None:
    if row.error is not None:
        message.error.code, message.error.message = row.error, row.message


def _unpack_error(message: target.RowResult) -> dict[str, Any]:
    return {"error": message.error.code if message.HasField("error") else None, "message": message.error.message}


# Fields of a value that are not one field of its message: (fill the message in, read the fields back).
EXTRA: Mapping[type[Any], tuple[Callable[[Any, Any], None], Callable[[Any], dict[str, Any]]]] = {
    request.CommittedRow: (_pack_stop_reason, _unpack_stop_reason),
    ports.RowResult: (_pack_error, _unpack_error),
}


# The same table, ready for sending: what a plain field holds needs no call, and its default need not be sent.
_PACKING = {
    kind: (
        message,
        tuple(
            (name, None if codec in AS_IT_IS else codec.pack, codec not in (PLAIN, TUPLE))
            for name, codec in fields.items()
        ),
    )
    for kind, (message, fields) in TABLE.items()
}


# And for reading: likewise.
_UNPACKING = {
    kind: tuple(
        (name, None if codec in (PLAIN, OPTIONAL) else codec.unpack, codec.optional) for name, codec in fields.items()
    )
    for kind, (_, fields) in TABLE.items()
}


def to_wire(value: Any, *, without: Container[str] = ()) -> Any:
    """The message for a value of the table, all fields but some. Raises ValueError for a number no field can hold."""
    kind = type(value)
    message_type, fields = _PACKING[kind]
    packed = {}
    for name, pack, sends_default in fields:
        if name in without:
            continue
        field = getattr(value, name)
        if (field is not None) if sends_default else field:
            packed[name] = field if pack is None else pack(field)
    message = message_type(**packed)
    if kind in EXTRA:
        EXTRA[kind][0](value, message)
    return message


def from_wire(kind: type[Value], message: Any) -> Value:
    """The value in a message; a field that the sender left out has protobuf's default (0, "", empty).

    Raises ValueError for what no sender of ours sends: engines count on numbers that make sense.
    """
    unpacked = {}
    for name, unpack, optional in _UNPACKING[kind]:
        if not optional or message.HasField(name):
            field = getattr(message, name)
            unpacked[name] = field if unpack is None else unpack(field)
    if kind in EXTRA:
        unpacked |= EXTRA[kind][1](message)
    value = kind(**unpacked)
    if isinstance(value, request.SamplingParams) and (fault := request.fault_of(value)) is not None:
        raise ValueError(fault)
    return value
