"""Every value survives the wire, and the table names every field of both sides."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmtp_serve import ports
from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs
from seqmtp_serve.frontier.round_notes import RequestLedger, RoundNote
from seqmtp_serve.frontier.step_times import StepTime
from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request, SamplingParams, Shaping, TokenLogprobs
from services.rpc import codecs, convert
from services.rpc.wire import common

token = st.integers(0, 2**32 - 1)
tokens = st.lists(token, max_size=6).map(tuple)
count = st.integers(0, 2**32 - 1)
real = st.floats(allow_nan=False)
name = st.text(max_size=12)
digest = st.binary(min_size=16, max_size=16)
hidden = st.builds(torch.randn, st.integers(0, 4), st.integers(1, 5))


def built(kind, **strategies):
    return st.builds(kind, **strategies)


def many(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


finite = st.floats(allow_nan=False, allow_infinity=False)
share = st.floats(0, 1)
shapings = built(
    Shaping,
    allowed_token_ids=tokens,
    grammar=name,
    bad_words=many(tokens),
    logit_bias=many(st.tuples(token, finite)),
    repetition_penalty=st.floats(0, exclude_min=True, allow_infinity=False),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), finite),
)
params = built(
    SamplingParams,
    temperature=st.floats(0, allow_infinity=False),
    top_k=count,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=share,
    seed=st.integers(0, 2**64 - 1),
    seeded=st.booleans(),
    max_tokens=count,
    min_tokens=count,
    stop=many(name),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    max_depth=count,
    shaping=st.none() | shapings,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
requests = built(
    Request,
    request_id=name,
    prompt_ids=tokens,
    params=params,
    choice=count,
    eos_token_ids=tokens,
    prediction_ids=tokens,
)
refs = built(Ref, request_id=name, epoch=count, version=count, digest=digest)
sparse = many(many(st.tuples(token, real)))

single = st.floats(allow_nan=False, width=32)
logprobs = many(
    built(
        TokenLogprobs, logprob=single, rank=count, top_ids=tokens, top_logprobs=st.lists(single, max_size=4).map(tuple)
    )
)

rows = built(
    CommittedRow,
    request_id=name,
    version=count,
    tokens=tokens,
    drafted=count,
    accepted=count,
    origins=name,
    finish=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | name | token,
    timings_ms=st.dictionaries(name, real, max_size=3),
    depth_reason=name,
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    predicted=st.booleans(),
    copied=st.booleans(),
    epoch=count,
    digest=digest,
)

decisions = built(
    DepthInputs,
    survivals=many(many(real)),
    hopes=many(many(real)),
    made=many(many(real)),
    rows=many(many(real)),
    starts=many(real),
    worths=many(real),
    times=many(st.none() | built(StepTime, full_ms=real, draft_ms=real, unsure_ms=real)),
    current=count,
)
notes = built(
    RoundNote,
    version=count,
    depth=count,
    reason=name,
    place=count,
    copy_survivals=many(real),
    draft_chances=many(real),
    floor=real,
    choice=st.none()
    | built(DepthChoice, depths=tokens, reason=name, row_price=real, pass_price=real, inputs=st.none() | decisions),
    timings_ms=st.dictionaries(name, real, max_size=3),
)

VALUES = {
    Shaping: shapings,
    SamplingParams: params,
    Request: requests,
    Ref: refs,
    TokenLogprobs: built(TokenLogprobs, logprob=single, rank=count),
    CommittedRow: rows,
    ports.Admit: built(ports.Admit, ref=refs, request=requests, output_ids=tokens),
    ports.Prefill: built(
        ports.Prefill,
        ref=refs,
        start=count,
        stop=count,
        last=st.booleans(),
        next_depth=st.none() | count,
        next_floor=real,
    ),
    ports.Verify: built(
        ports.Verify, ref=refs, depth=count, next_depth=st.none() | count, predicted=count, floor=real, next_floor=real
    ),
    ports.Publish: built(ports.Publish, ref=refs, keep=count),
    ports.Release: built(ports.Release, request_id=name, epoch=count),
    ports.RowResult: built(
        ports.RowResult,
        ref=refs,
        tokens=tokens,
        drafted=count,
        accepted=count,
        error=st.none() | name,
        message=name,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
        predicted=st.booleans(),
        copied=st.booleans(),
        next_copied=many(real),
        chances=many(real),
    ).map(lambda row: row if row.error is not None else replace(row, message="")),
    ports.StepCosts: built(
        ports.StepCosts,
        **dict.fromkeys(("forward", "draft_wait", "select", "pack", "mtp", "mtp_touched", "feed"), real),
        **dict.fromkeys(("num_rows", "fed_rows", "fed_bytes"), count),
    ),
    ports.ExpertWork: built(ports.ExpertWork, rank=count, num_pairs=count, num_touched=count, sent_bytes=count),
    ports.TargetInfo: built(
        ports.TargetInfo,
        **dict.fromkeys(("group_id", "model", "numerics", "manifest_fingerprint"), name),
        **dict.fromkeys(("max_model_len", "vocab_size", "page_size", "num_pages", "max_batch", "max_depth"), count),
        kernels=st.dictionaries(name, name, max_size=3),
    ),
    ports.FeedRows: built(
        ports.FeedRows,
        ref=refs,
        first_base=count,
        hidden=hidden,
        next_ids=tokens,
        depth=count,
        floor=real,
        reset=st.booleans(),
        request=st.none() | requests,
    ),
    ports.Snapshot: built(
        ports.Snapshot,
        request=requests,
        epoch=count,
        version=count,
        digest=digest,
        rows=many(rows),
        finish=st.none() | st.sampled_from(FinishReason),
        owner=name,
        meta=st.dictionaries(name, name, max_size=3),
        acquired=st.booleans(),
        lease_left_s=real,
    ),
    RoundNote: notes,
    ports.Draft: built(
        ports.Draft,
        ref=refs,
        tokens=tokens,
        draft_probs=sparse,
        chances=many(real),
        mtp_ms=real,
        mtp_touched=real,
    ),
}
VALUES[RequestLedger] = built(RequestLedger, record=VALUES[ports.Snapshot], notes=many(notes))
VALUES[ports.StepPlan] = built(
    ports.StepPlan,
    step_id=count,
    deadline_ms=real,
    release=many(VALUES[ports.Release]),
    publish=many(VALUES[ports.Publish]),
    admit=many(VALUES[ports.Admit]),
    prefill=many(VALUES[ports.Prefill]),
    verify=many(VALUES[ports.Verify]),
)
VALUES[ports.StepReport] = built(
    ports.StepReport,
    step_id=count,
    rows=many(VALUES[ports.RowResult]),
    costs=VALUES[ports.StepCosts],
    free_pages=count,
    proposer_ready=st.booleans(),
    draining=st.booleans(),
    refused_drafts=count,
    experts=many(VALUES[ports.ExpertWork]),
)


def same(left, right):
    """Field by field, as tensors compare element by element."""
    for each in fields(left):
        a, b = getattr(left, each.name), getattr(right, each.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, each.name


def test_the_table_has_every_value():
    assert set(VALUES) == set(convert.TABLE)


@pytest.mark.parametrize("kind", convert.TABLE, ids=lambda kind: kind.__name__)
def test_every_value_survives_the_round_trip(kind):
    @settings(max_examples=40)
    @given(value=VALUES[kind])
    def survives(value):
        message = convert.to_wire(value)
        parsed = type(message).FromString(message.SerializeToString())
        same(value, convert.from_wire(kind, parsed))

    survives()


# Fields of a value and of its message that do not pair by name, with the reason.
VALUE_ONLY = {CommittedRow: {"stop_reason"}, ports.RowResult: {"error", "message"}}
MESSAGE_ONLY = {
    ports.StepPlan: {"traceparent"},  # of a trace, not of the plan
    CommittedRow: {"stop_string", "stop_token_id"},
    ports.RowResult: {"error"},
    ports.TargetInfo: {"proposer_ready", "proposer_detail", "draining"},  # live state, not what the group can do
    ports.Draft: {"error"},  # a refused feed is not a draft: the service answers it apart
}


@pytest.mark.parametrize("kind", convert.TABLE, ids=lambda kind: kind.__name__)
def test_no_field_is_forgotten(kind):
    message_type, by_name = convert.TABLE[kind]
    assert {each.name for each in fields(kind)} == set(by_name) | VALUE_ONLY.get(kind, set())
    assert set(message_type.DESCRIPTOR.fields_by_name) == set(by_name) | MESSAGE_ONLY.get(kind, set())


def test_bfloat16_rows_keep_their_bits():
    rows = torch.randn(3, 8).to(torch.bfloat16)
    assert torch.equal(codecs.unpack_tensor(codecs.pack_tensor(rows)), rows)


def test_packing_copies_so_the_sender_may_overwrite_its_rows():
    rows = torch.ones(2, 4)
    message = codecs.pack_tensor(rows)
    rows.zero_()
    assert torch.equal(codecs.unpack_tensor(message), torch.ones(2, 4))


@pytest.mark.parametrize(
    "message",
    [
        common.Tensor(data=b"\0" * 8, shape=[3], dtype=common.DTYPE_F32),
        common.Tensor(data=b"\0" * 8, shape=[2]),
        common.Tensor(data=b"", shape=[2**31, 2**31], dtype=common.DTYPE_BF16),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(message):
    with pytest.raises(ValueError, match="tensor"):
        codecs.unpack_tensor(message)


def test_token_ids_of_a_broken_length_are_refused():
    with pytest.raises(ValueError, match="uint32"):
        codecs.unpack_ids(b"\0" * 6)


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.inf),
        ("logit_bias", math.nan),
        ("logprobs", 2**31 - 1),
        ("prompt_logprobs", 21),
    ],
)
def test_numbers_of_which_no_distribution_can_be_made_do_not_get_in(field, number):
    """An engine that met them would stop, and with it everybody else's requests."""
    plain, shaping = SamplingParams(), Shaping()
    if field == "logit_bias":
        bad = replace(plain, shaping=replace(shaping, logit_bias=((3, number),)))
    elif hasattr(shaping, field):
        bad = replace(plain, shaping=replace(shaping, **{field: number}))
    else:
        bad = replace(plain, **{field: number})
    with pytest.raises(ValueError, match=field):
        convert.from_wire(SamplingParams, convert.to_wire(bad))
    assert convert.from_wire(SamplingParams, convert.to_wire(plain)) == plain
