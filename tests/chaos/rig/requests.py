"""The texts that clients ask for, and what plain decoding gives: free, constrained, stopped, several at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.local import LocalService
from seqmtp_serve.request import Request, SamplingParams, Shaping
from services.detokenizer import Detokenizer
from services.gateway.structured_fields import KINDS, json_grammar
from tests.services.tiny_model import CONFIG

SEEDED_TEMPERATURE = 0.8
END = 1  # the tiny model's end of text
STOP_LEN = 3  # characters, so tokens: a stop string spans rounds
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{12,24}$"},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 6,
            "maxItems": 9,
        },
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REGEX = "[a-m]{20,30}-[0-9]{20,30}(_[a-z]+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One choice of an answer without speculation, network or store. `text` is what of it may be shown."""

    tokens: tuple[int, ...]
    text: str
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request: its HTTP body, and what each of its choices must be."""

    body: dict[str, Any]
    references: tuple[Reference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request. `grammar` is its constraint as a target compiles it, `fields` as a body asks for it."""

    seeded: bool
    num_choices: int = 1
    stops: bool = False
    grammar: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


MIX = (
    Kind(seeded=False),
    Kind(seeded=True, num_choices=2),
    Kind(
        seeded=False,
        grammar=json_grammar(dict(SCHEMA)),
        fields={"response_format": {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}},
    ),
    Kind(seeded=True),
    Kind(seeded=False, stops=True),
    Kind(seeded=True, grammar=KINDS["regex"](REGEX), fields={"structured_outputs": {"regex": REGEX}}),
    Kind(seeded=False),
    Kind(seeded=True, num_choices=2, stops=True),
)


async def draw_wishes(
    model: Path, number: int, *, max_tokens: tuple[int, int], rng: Random, max_len: int
) -> list[Wish]:
    """Of each kind in turn, with prompts of 3 to 60 tokens, decoded one by one at depth 0."""
    engine = EngineConfig(weights="fp32", max_model_len=max_len, num_pages=2 * max_len // 64, max_batch=1)
    async with LocalService.open(
        str(model), decoder=Detokenizer, engine=engine, scheduler=SchedulerConfig(max_batch=1)
    ) as service:
        references = _References(service, open_checkpoint(str(model)).tokenizer())
        return [await references.of(MIX[index % len(MIX)], max_tokens, rng) for index in range(number)]


class _References:
    """What plain decoding gives, from a service without speculation."""

    def __init__(self, service: LocalService, tokenizer: Tokenizer) -> None:
        self._service, self._tokenizer, self._number = service, tokenizer, 0

    async def of(self, kind: Kind, max_tokens: tuple[int, int], rng: Random) -> Wish:
        """A new wish of this kind."""
        params = SamplingParams(
            temperature=SEEDED_TEMPERATURE if kind.seeded else 0.0,
            seed=rng.randrange(2**32) if kind.seeded else 0,
            seeded=kind.seeded,
            max_tokens=max_tokens[1] if kind.grammar else rng.randint(*max_tokens),
            ignore_eos=not kind.grammar,
            max_depth=0,
            shaping=Shaping(grammar=kind.grammar) if kind.grammar else None,
        )
        prompt = tuple(rng.randrange(2, CONFIG.vocab_size) for _ in range(rng.randint(3, 60)))
        request = Request(request_id="", prompt_ids=prompt, params=params, eos_token_ids=(END,))
        if kind.stops:
            stop = _late_stop((await self._decode(request)).text)
            request = replace(request, params=replace(params, stop=(stop,)))
        choices = [replace(request, choice=choice) for choice in range(kind.num_choices)]
        return Wish(body=_body(request, kind), references=tuple([await self._decode(choice) for choice in choices]))

    async def _decode(self, request: Request) -> Reference:
        self._number += 1
        rows = await self._service.generate(replace(request, request_id=f"reference-{self._number}"))
        tokens = tuple(token for row in rows for token in row.tokens)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in request.params.stop:
            text = text.partition(stop)[0]
        finish = rows[-1].finish
        assert finish is not None
        return Reference(tokens=tokens, text=text, finish=finish.value)


def _late_stop(text: str) -> str:
    """The piece of the text that comes for the first time as late as any."""
    pieces = [(at, text[at : at + STOP_LEN]) for at in range(len(text) - STOP_LEN)]
    return [piece for at, piece in pieces if text.find(piece) == at][-1]


def _body(request: Request, kind: Kind) -> dict[str, Any]:
    params = request.params
    body: dict[str, Any] = {
        "prompt": list(request.prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "stream": True,
        "speculation": {"trace": True},
    }
    body |= {"seed": params.seed} if params.seeded else {}
    body |= {"stop": list(params.stop)} if params.stop else {}
    return body | ({"n": kind.num_choices} if kind.num_choices > 1 else {}) | dict(kind.fields)
