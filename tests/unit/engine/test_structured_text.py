"""Constrained text: the same at every depth, in the grammar at every token, and the same again after a replay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from jsonschema import validate
from llguidance import LLMatcher

from seqmtp_serve import oracle
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from seqmtp_serve.request import Request, SamplingParams, Shaping
from seqmtp_serve.speculation.grammar import MAX_GRAMMAR_LEN, GrammarCompiler
from tests.services.byte_tokenizer import EOS, byte_tokenizer
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.engines import config

TOKENIZER = byte_tokenizer()
EOS_ID: int = TOKENIZER.token_to_id(EOS)
MODEL = replace(TINY, vocab_size=TOKENIZER.get_vocab_size() + 3)  # a model's vocabulary may be padded
TARGET = target_tensors(MODEL, seed=3)
MTP = mtp_tensors(TARGET, MODEL, seed=4)
COMPILER = GrammarCompiler(lambda: TOKENIZER, MODEL.vocab_size)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHORT = {"type": "array", "items": {"enum": ["left", "right", None, True]}, "minItems": 2, "maxItems": 4}


def json_grammar(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": " {1,2}"})


def is_valid(schema: dict[str, object]) -> Callable[[str], None]:
    return lambda text: validate(json.loads(text), schema)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


GRAMMARS: dict[str, tuple[str, Callable[[str], None]]] = {
    "object": (json_grammar(SCHEMA), is_valid(SCHEMA)),
    "array": (json_grammar(SHORT), is_valid(SHORT)),
    "regex": (
        LLMatcher.grammar_from_regex(r"(hello|world)( [0-9]{1,3}){1,4}"),
        matches(r"(hello|world)( [0-9]{1,3}){1,4}"),
    ),
    "choice": (LLMatcher.grammar_from_lark('start: "yes" | "no" | "naïve"'), matches("yes|no|naïve")),
    "lark": (LLMatcher.grammar_from_lark('start: "a" start "b" | "c"'), matches("a*cb*")),
}


def engine(*, proposing: bool = True) -> TargetEngine:
    settings = config(num_pages=400)
    link = DirectProposer(ProposerEngine(settings, MODEL, MtpConfig(), MTP)) if proposing else None
    return TargetEngine(settings, MODEL, TARGET, link, grammars=COMPILER)


def constrained(kind: str, index: int = 0, **params: object) -> Request:
    sampling = {"temperature": 0.0, "max_tokens": 60, "shaping": Shaping(grammar=GRAMMARS[kind][0])} | params
    return Request(
        request_id=f"{kind}-{index}-{sampling['temperature']}",
        prompt_ids=tuple(TOKENIZER.encode(f"prompt {index}").ids),
        params=SamplingParams(**sampling),  # type: ignore[arg-type]
        eos_token_ids=(EOS_ID,),
    )


def batch() -> list[Request]:
    sampled = {"temperature": 1.3, "seeded": True}
    return [
        constrained(kind, index, **(sampled | {"seed": index} if index else {}))
        for kind in GRAMMARS
        for index in range(3)
    ]


def text_of(stream: Stream) -> str:
    assert stream.output[-1] == EOS_ID
    return TOKENIZER.decode(stream.output[:-1], skip_special_tokens=False)


def plain(request: Request) -> list[int]:
    """Ordinary decoding by the reference: one forward a token, the grammar asked anew for each."""
    output: list[int] = []
    shaping = request.params.shaping
    assert shaping is not None
    while len(output) < request.params.max_tokens and output[-1:] != [EOS_ID]:
        matcher = COMPILER.compile(shaping.grammar, request.eos_token_ids)
        assert matcher.try_consume_tokens(output) == len(output)
        mask = matcher.compute_bitmask()
        allowed = tuple(token for token in range(MODEL.vocab_size) if mask[token // 8] >> token % 8 & 1)
        only = replace(request.params, shaping=replace(shaping, allowed_token_ids=allowed), max_tokens=1)
        step = replace(request, prompt_ids=(*request.prompt_ids, *output), params=only)
        output += oracle.generate(TARGET, MODEL, step)
    return output


@pytest.mark.covers(68, 72)
def test_constrained_text_is_that_of_plain_decoding_at_every_depth() -> None:
    requests = batch()
    alone = [stream.output for stream in Driver(engine(proposing=False), depth=0).run(*requests)]
    for depth in (1, 2, 3):
        streams = Driver(engine(), depth=depth).run(*requests)
        assert [stream.output for stream in streams] == alone
        rows = [row for stream in streams for row in stream.rows]
        assert sum(row.accepted for row in rows) > 0
        assert sum(row.accepted < row.drafted for row in rows) > 5
    ended = 0
    for stream in streams:
        if stream.output[-1] == EOS_ID:  # the others ran out of their budget: as far as they go they are in the grammar
            GRAMMARS[stream.request.request_id.split("-")[0]][1](text_of(stream))
            ended += 1
    assert ended > len(requests) * 2 // 3
    for index in (0, 3, 7, 9):
        assert alone[index] == plain(requests[index])


@pytest.mark.covers(86, 88)
def test_a_replay_finds_its_place_in_the_grammar() -> None:
    requests = batch()[:6]
    undisturbed = [stream.output for stream in Driver(engine()).run(*requests)]
    streams = [Stream.open(each) for each in requests]
    driver = Driver(engine())
    while not all(stream.done for stream in streams):
        running = [stream for stream in streams if not stream.done]
        driver.step(running)
        if driver.num_steps % 3 == 0:
            driver.preempt(running[driver.num_steps % len(running)])
    assert driver.refused == []
    assert [stream.output for stream in streams] == undisturbed


@pytest.mark.covers(68)
def test_drafts_under_the_ratio_contract_stay_in_the_grammar_too() -> None:
    requests = [constrained(kind, index, temperature=1.2, seed=index) for kind in GRAMMARS for index in range(3)]
    for stream in Driver(engine()).run(*requests):
        if stream.output[-1] == EOS_ID:
            GRAMMARS[stream.request.request_id.split("-")[0]][1](text_of(stream))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_outlasts_the_grammar_is_ends_of_text(ignore_eos: bool) -> None:
    """`min_tokens` and `ignore_eos` ask for more tokens than the grammar has."""
    lasting = {"ignore_eos": True, "max_tokens": 20} if ignore_eos else {"min_tokens": 12}
    for depth in (0, 3):
        (stream,) = Driver(engine(), depth=depth).run(constrained("choice", **lasting))
        words = [token for token in stream.output if token != EOS_ID]
        assert TOKENIZER.decode(words) in ("yes", "no", "naïve")
        assert stream.output[len(words) :] == [EOS_ID] * (len(stream.output) - len(words))


def test_min_tokens_puts_off_an_end_that_the_grammar_can_put_off() -> None:
    (stream,) = Driver(engine()).run(constrained("regex", min_tokens=14))
    assert len(stream.output) > 14
    GRAMMARS["regex"][1](text_of(stream))


def test_a_target_without_a_tokenizer_refuses_a_grammar() -> None:
    settings = config()
    driver, stream = Driver(TargetEngine(settings, MODEL, TARGET)), Stream.open(constrained("choice"))
    driver.step([stream])
    assert [row.error for row in driver.refused if "tokenizer" in row.message] == ["internal_error"]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (json_grammar({"type": "nope"}), "Invalid type: nope"),
        (json_grammar({"not": {}}), "Unimplemented"),
        (LLMatcher.grammar_from_regex("a("), "unclosed group"),
        (LLMatcher.grammar_from_lark("start: nothing"), "unknown name"),
        ("x" * (MAX_GRAMMAR_LEN + 1), "characters"),
    ],
)
def test_a_grammar_that_does_not_compile_says_why(grammar: str, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        COMPILER.compile(grammar, (EOS_ID,))


def test_one_grammar_is_compiled_once() -> None:
    opened = []
    compiler = GrammarCompiler(lambda: opened.append(1) or TOKENIZER, MODEL.vocab_size)  # type: ignore[func-returns-value]
    first = compiler.compile(GRAMMARS["object"][0], (EOS_ID,))
    second = compiler.compile(GRAMMARS["object"][0], (EOS_ID,))
    assert first.consume_token(TOKENIZER.encode("{").ids[0])
    assert second.consume_token(TOKENIZER.encode("{").ids[0]), "callers do not share a place in the grammar"
    assert (len(opened), len(compiler._compiled)) == (1, 1)
