"""A request as every process sees it, and the rows it turns into. Plain values: no torch, no IO."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

MAX_LOGPROBS = 20  # most likely tokens shown beside each: OpenAI's bound


class Contract(StrEnum):
    """How a draft is verified (design: exactness). All are exact for the target's own distribution.

    GREEDY is the point-mass case. RATIO accepts y with probability min(1, p(y)/q(y)) (Leviathan et al., arXiv
    2211.17192). COUPLED shares position-keyed Gumbel noise between draft and target (Daliri et al., arXiv
    2408.07978): the text does not depend on the draft, so a seeded request is the same text at any depth.
    """

    GREEDY = "greedy"
    RATIO = "ratio"
    COUPLED = "coupled"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What a request does to the target's logits before temperature and filters, at every row, in vLLM's order.

    1. `allowed_token_ids`: every other token is out (empty: all are allowed), and so is what `grammar` (in llguidance's
       JSON form; empty: none) does not take after the output.
    2. `bad_words`: token sequences, whose last token is out where the output ends in the others.
    3. `min_tokens`: see `SamplingParams`.
    4. `logit_bias`: (token, added logit), each token once.
    5. `repetition_penalty`: a positive logit of a token in prompt or output is divided by it, another one multiplied.
    6. `frequency_penalty` is subtracted once for each time a token is in the output, `presence_penalty` once if it is.
    """

    allowed_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What the target's distribution is, and where the text ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 switch the filter off. `seed` keys every draw
    by (seed, choice, absolute position, purpose). `seeded` says whether the caller chose the seed: such a request is
    verified by the coupled contract. `max_depth` bounds the drafts of a round; 0 is ordinary decoding. `shaping` None:
    the logits are taken as they are.

    `logprobs` and `prompt_logprobs` change no token: with each token come its log-probability and those of so many of
    the most likely ones; None: with none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    seeded: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_depth: int = 3
    shaping: Shaping | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def contract(self) -> Contract:
        """The verification contract these parameters ask for."""
        if self.temperature == 0.0:
            return Contract.GREEDY
        return Contract.COUPLED if self.seeded else Contract.RATIO


def fault_of(params: SamplingParams) -> str | None:
    """What no distribution can be made of, in words; None: nothing. Engines take parameters as they are."""
    shaping = params.shaping or Shaping()
    ranges = {
        "temperature": (params.temperature, 0.0, math.inf),
        "top_p": (params.top_p, 0.0, 1.0),
        "min_p": (params.min_p, 0.0, 1.0),
        "top_k": (params.top_k, 0, math.inf),
        "max_tokens": (params.max_tokens, 0, math.inf),
        "min_tokens": (params.min_tokens, 0, math.inf),
        "max_depth": (params.max_depth, 0, math.inf),
        "logprobs": (params.logprobs or 0, 0, MAX_LOGPROBS),
        "prompt_logprobs": (params.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        "repetition_penalty": (shaping.repetition_penalty, 0.0, math.inf),
        "frequency_penalty": (shaping.frequency_penalty, -math.inf, math.inf),
        "presence_penalty": (shaping.presence_penalty, -math.inf, math.inf),
        **{f"logit_bias of {token}": (bias, -math.inf, math.inf) for token, bias in shaping.logit_bias},
    }
    for name, (value, low, high) in ranges.items():
        if not (math.isfinite(value) and low <= value <= high):
            return f"{name} is {value}"
    for name, number in (("top_p", params.top_p), ("repetition_penalty", shaping.repetition_penalty)):
        if number == 0.0:
            return f"{name} is 0"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation: one prompt, one choice. `n` choices are n requests that differ in `choice` only.

    `prediction_ids` is what the caller expects of the output: a second source of drafts, which changes no token.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Which state of which request a message is about. Every cross-process message carries one.

    `version` counts committed rows (0 before the bootstrap row). `digest` is the 16-byte ancestry digest of the prompt
    and every committed token up to that version (`frontier/ancestry.py`).
    """

    request_id: str
    epoch: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What the target thought of one token before temperature, filters and bans: natural logarithms, float32.

    `rank` 1: no token was more likely. `top_ids` are the most likely tokens, the likeliest first, equals by their id;
    the token itself need not be among them. Nothing is below -9999, which stands for everything less.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRow:
    """The tokens one round (or the bootstrap) added. Row `version` turns version-1 into version.

    `drafted` and `accepted` count the round's proposals (0 and 0 at bootstrap and at depth 0); `origins` gives each
    token's origin, one letter a token: b bootstrap, a accepted draft of the module, l accepted draft copied from the
    request's own text (looked up), p accepted draft from the request's prediction, f accepted draft that its grammar
    forced, c correction, n bonus or plain next token. `predicted`: the round's drafts came from the prediction;
    `copied`: they were copied. `forced` of them, from the first, were forced by the grammar.
    `logprobs` has one entry a token if the request asks for them, else none; `prompt_logprobs` comes with the
    bootstrap: one entry for each prompt token from the second on. `epoch` is that of the owner that committed it, and
    `digest` the ancestry digest after it: they say where the row stands, not what is in it, and do not count for
    equality.
    """

    request_id: str
    version: int
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    origins: str = ""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    predicted: bool = False
    forced: int = 0
    copied: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = field(default=0, compare=False)  # of the bootstrap row: prompt positions found in a cache
    timings_ms: dict[str, float] = field(default_factory=dict, compare=False)  # of the live row; not in the record
    depth_reason: str = field(default="", compare=False)  # why the round was asked at its depth; not in the record
    epoch: int = field(default=0, compare=False)
    digest: bytes = field(default=b"", compare=False)

    @property
    def ref(self) -> Ref:
        """The name of the state after it."""
        return Ref(request_id=self.request_id, epoch=self.epoch, version=self.version, digest=self.digest)
