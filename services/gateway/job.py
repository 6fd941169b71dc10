"""From a request body to generations: ids, token budgets and sampling parameters. Pure; draws are arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.request import Request, SamplingParams, Shaping
from services.gateway.body import MAX_CHOICES, GenerationBody
from services.gateway.reasoning import Thought
from services.gateway.room import Room

TOP_SEED = 2**64
MAX_PROMPT_SCORES = 2**18  # of one prompt, with the most likely tokens: 2 MB in its record


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served model allows. `max_depth` is the drafts of a round at most; `max_model_len` counts tokens."""

    model: str
    max_model_len: int
    max_depth: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    system_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request as one generation for each choice; `choices[i]` is choice i of the answer."""

    id: str
    created: int  # Unix seconds
    model: str
    choices: tuple[Request, ...]
    num_prompt_tokens: int  # each prompt counted once, however many choices it has
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    trace: bool = False
    system_fingerprint: str = ""
    background: bool = False
    body_digest: str = ""  # of what was asked
    echo: bool = False  # each text begins with its prompt
    functions: tuple[str, ...] = ()  # that the model was offered: calls of them are told apart from text
    one_call: bool = False
    thought: Thought = Thought.UNPARSED  # where each output begins
    told: Mapping[str, Any] = field(default_factory=dict)  # what the answer repeats of its request
    prompt_logprobs: int | None = None  # as `SamplingParams` has it, if they are to be shown for themselves


def plan_job(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    *,
    job_id: str,
    created: int,
    drawn_seed: int,
    prompt_field: str,
    budget: tuple[str, int | None],
    shaping: Shaping | None = None,
    prediction_ids: Sequence[int] = (),
) -> Job:
    """Fan a body out over its prompts and choices. `drawn_seed` is used when the caller gave none.

    Randomness is keyed by (seed, choice within the prompt): a prompt's choices do not depend on its neighbours.
    Raises InvalidField, or ContextOverflow when a prompt or its budget does not fit.
    """
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise InvalidField(f"At most {MAX_CHOICES} choices in one request: prompts times n.", param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidField("'stream_options' is only for streams: set 'stream'.", param="stream_options")
    for token in body.stop_token_ids or ():
        if token >= limits.vocab_size:
            raise InvalidField(
                f"There is no token {token}: the vocabulary has {limits.vocab_size}.", param="stop_token_ids"
            )
    is_off = body.speculation is not None and body.speculation.enabled is False
    predicted = () if is_off else tuple(prediction_ids[: limits.max_model_len])  # no output is longer
    requests: list[Request] = []
    for prompt in prompts:
        params = sampling_params(body, len(prompt), limits, drawn_seed=drawn_seed, budget=budget, param=prompt_field)
        params = replace(params, shaping=shaping)
        for choice in range(body.num_choices):
            suffix = f".{len(requests)}" if len(prompts) * body.num_choices > 1 else ""
            requests.append(
                Request(
                    request_id=job_id + suffix,
                    prompt_ids=tuple(prompt),
                    params=params,
                    choice=choice,
                    eos_token_ids=limits.eos_token_ids,
                    prediction_ids=predicted,
                )
            )
    options, wanted = body.stream_options, body.wanted_logprobs()
    return Job(
        id=job_id,
        created=created,
        model=limits.model,
        choices=tuple(requests),
        num_prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        trace=body.trace,
        system_fingerprint=limits.system_fingerprint,
        background=bool(body.background),
        echo=wanted.echo,
        prompt_logprobs=wanted.shown_prompt,
    )


def sampling_params(
    body: GenerationBody,
    prompt_len: int,
    limits: Limits,
    *,
    drawn_seed: int,
    budget: tuple[str, int | None],
    param: str,
) -> SamplingParams:
    """The target's distribution and the end of the text, for one prompt."""
    max_tokens = output_budget(prompt_len, limits.max_model_len, budget, param)
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidField(f"'min_tokens' is more than the {max_tokens} tokens that may come.", param="min_tokens")
    stop = body.stop or ()
    wanted = body.wanted_logprobs()
    if wanted.prompt is not None and prompt_len * (wanted.prompt + 1) > MAX_PROMPT_SCORES:
        problem = f"Log-probabilities of {prompt_len} prompt tokens are too many: ask for fewer top tokens."
        raise InvalidField(problem, param="logprobs" if wanted.shown_prompt is None else "prompt_logprobs")
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=drawn_seed if body.seed is None else body.seed % TOP_SEED,
        seeded=body.seed is not None,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        max_depth=draft_depth(body, limits.max_depth),
        logprobs=wanted.output,
        prompt_logprobs=wanted.prompt,
    )


def draft_depth(body: GenerationBody, max_depth: int) -> int:
    """Drafts a round may have: as asked, at most what the server has. It changes the speed, never the text."""
    asked = body.speculation
    if asked is None:
        return max_depth
    if asked.enabled is False:
        return 0
    return max_depth if asked.max_depth is None else min(asked.max_depth, max_depth)


def output_budget(prompt_len: int, max_model_len: int, budget: tuple[str, int | None], param: str) -> int:
    """Tokens that may come. Without a budget: what is left of the context. Raises ContextOverflow, InvalidField."""
    name, asked = budget
    if prompt_len == 0:
        raise InvalidField("The prompt is empty.", param=param)
    room = Room(max_model_len, param)
    room.check(prompt_len)
    left = max_model_len - prompt_len
    if asked is not None and asked > left:
        problem = f"The prompt has {prompt_len} and '{name}' asks for {asked} more: at most {left} fit."
        raise room.overflow(problem, name)
    return left if asked is None else asked
