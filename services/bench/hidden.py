"""`seqmtp bench hidden`: what hidden rows cost on their way to the proposer, and what sending fewer of them costs.

The target writes each text once, by plain decoding, and all its hidden rows are kept. Then the module drafts from every
place of every text, once for each form of the rows: so all forms are asked the same questions, and a difference is
theirs alone. Texts are greedy, so a draft is accepted where it is the text.

    acceptance[j]   drafts 0 .. j all accepted, over places: unconditional
    e_r             1 + their sum
    round_bytes     of the E[R] rows that a round sends; round_ms: to pack, serialise, parse and unpack two rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.hidden_rows import HiddenDtype, HiddenPolicy, num_bytes, pack, unpack
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.local import target_engine
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref, Request
from services.bench.local_backend import open_encoder
from services.bench.machine import describe_machine
from services.bench.prompts import long_prompts
from services.bench.stepper import Stepper
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import proposer

CHUNK = 256
ROUND_ROWS = 2
TIMED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenWorkload:
    """`windows` (0: all rows) are tried in fp32, `dtypes` with all rows."""

    windows: tuple[int, ...] = (0, 512, 128, 32)
    dtypes: tuple[HiddenDtype, ...] = ("fp32", "fp16", "bf16", "int8")
    num_prompts: int = 12
    prompt_chars: int = 3000
    max_tokens: int = 64
    depth: int = 3

    def policies(self) -> list[HiddenPolicy]:
        """Every form, each once."""
        windows = [HiddenPolicy(window=window) for window in self.windows]
        return list(dict.fromkeys([*windows, *(HiddenPolicy(dtype=dtype) for dtype in self.dtypes)]))


class Recorder:
    """A `ports.Proposer` that keeps what it is fed and never has a draft."""

    ready, generation = True, 1

    def __init__(self) -> None:
        self.fed: defaultdict[str, list[FeedRows]] = defaultdict(list)

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        for one in feeds:
            self.fed[one.ref.request_id].append(one)

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and its greedy reply, up to its end: `hidden[i]` is of position i, `next_ids[i]` the token after it."""

    request: Request
    hidden: Tensor  # [n, d]
    next_ids: tuple[int, ...]  # n

    @property
    def first_base(self) -> int:
        """The last position of the prompt: from there on drafts are asked for."""
        return len(self.request.prompt_ids) - 1

    @classmethod
    def of(cls, feeds: Sequence[FeedRows], eos_token_ids: Sequence[int]) -> Text:
        """Cut behind the first token that ends a text."""
        request = feeds[0].request
        assert request is not None, "the first feed opens the sequence"
        next_ids = tuple(token for feed in feeds for token in feed.next_ids)
        stop = len(request.prompt_ids)
        while stop < len(next_ids) and next_ids[stop - 1] not in eos_token_ids:
            stop += 1
        return cls(request=request, hidden=torch.cat([feed.hidden for feed in feeds])[:stop], next_ids=next_ids[:stop])


def measure_hidden(model: str, mtp: str | None, workload: HiddenWorkload, config: EngineConfig) -> dict[str, Any]:
    """Write the texts, draft from them in every form, and return the report. Progress goes to standard error.

    Raises ModelNotFound, TargetIncomplete, MtpIncomplete, or InvalidField for a model without a chat template.
    """
    checkpoint = open_checkpoint(model, mtp)
    tensors = checkpoint.mtp_tensors()
    if checkpoint.mtp_config is None:
        raise MtpIncomplete(f"{checkpoint.name} has no MTP part")
    policies = workload.policies()
    with tqdm(total=1 + len(policies), unit="form", desc="bench") as progress:
        texts = write_texts(checkpoint, model, workload, config)
        progress.update()
        engine = ProposerEngine(config, checkpoint.config, checkpoint.mtp_config, tensors)
        forms = []
        for policy in policies:
            forms.append(_form(engine, texts, policy, workload.depth))
            progress.update()
    return {
        "model": checkpoint.name,
        "numerics": config.numerics,
        "weights": config.weights,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "prompt_tokens": [len(text.request.prompt_ids) for text in texts],
        "hidden": forms,
    }


def write_texts(checkpoint: Checkpoint, model: str, workload: HiddenWorkload, config: EngineConfig) -> list[Text]:
    """Greedy replies to long prompts, one batch, with every hidden row."""
    _, encode = open_encoder(model)
    recorder = Recorder()
    stepper = Stepper(engine=target_engine(checkpoint, config, recorder), depth=workload.depth)
    room = config.max_model_len - workload.max_tokens - workload.depth - 1
    for prompt in long_prompts(checkpoint.name, workload.num_prompts, workload.prompt_chars):
        ids = encode(prompt)[-room:]
        stepper.admit([ids], length=len(ids), chunk=CHUNK)
    for _ in range(workload.max_tokens):
        stepper.step()
    return [Text.of(feeds, checkpoint.eos_token_ids) for feeds in recorder.fed.values()]


def accepted(engine: ProposerEngine, texts: Sequence[Text], policy: HiddenPolicy, depth: int) -> list[list[int]]:
    """For each text, how many drafts in a row were the text, at each place that has `depth` tokens after it."""
    found: list[list[int]] = [[] for _ in texts]
    longest = max(len(text.next_ids) - text.first_base for text in texts)
    for place in range(longest - depth):
        feeds = []
        for text in texts:
            base = text.first_base + place
            if base + depth < len(text.next_ids):
                feeds.append(_feed(text, base, base + 1, policy, depth) if place else _prompt(text, policy, depth))
        answers = {answer.ref.request_id: answer for answer in engine.propose(feeds)}
        for text, counts in zip(texts, found, strict=True):
            answer = answers.get(text.request.request_id)
            if isinstance(answer, Draft):
                base = text.first_base + place
                truth = text.next_ids[base + 1 : base + 1 + depth]
                counts.append(
                    next((at for at, token in enumerate(truth) if answer.tokens[at : at + 1] != (token,)), depth)
                )
    engine.propose((), [text.request.request_id for text in texts])
    return found


def _prompt(text: Text, policy: HiddenPolicy, depth: int = 0) -> FeedRows:
    """The feed that opens the sequence."""
    stop = text.first_base + 1
    return _feed(text, policy.first_base(stop, stop), stop, policy, depth, opens=True)


def _feed(text: Text, start: int, stop: int, policy: HiddenPolicy, depth: int, *, opens: bool = False) -> FeedRows:
    rows_nd, scales_n = pack(text.hidden[start:stop], policy.dtype)
    ref = Ref(request_id=text.request.request_id, epoch=1, version=stop, digest=bytes(16))
    return FeedRows(
        ref=ref,
        first_base=start,
        hidden=rows_nd,
        hidden_scales=scales_n,
        next_ids=text.next_ids[start:stop],
        depth=depth,
        reset=opens,
        request=text.request if opens else None,
    )


def _form(engine: ProposerEngine, texts: Sequence[Text], policy: HiddenPolicy, depth: int) -> dict[str, Any]:
    counts = [count for each in accepted(engine, texts, policy, depth) for count in each]
    rates = [sum(count > at for count in counts) / max(1, len(counts)) for at in range(depth)]
    prompts = [_prompt(text, policy) for text in texts]
    one_round = _feed(texts[0], 0, ROUND_ROWS, policy, depth)
    return {
        "window": policy.window or None,
        "dtype": policy.dtype,
        "places": len(counts),
        "acceptance_by_position": [round(rate, 4) for rate in rates],
        "e_r": round(1 + sum(rates), 4),
        "prompt_bytes": round(sum(_bytes(feed) for feed in prompts) / len(prompts)),
        "prompt_ms": round(median(_wire_ms(feed, policy) for feed in prompts), 4),
        "round_bytes": round(_bytes(one_round) / ROUND_ROWS * (1 + sum(rates))),
        "round_ms": round(median(_wire_ms(one_round, policy) for _ in range(TIMED)), 4),
    }


def _bytes(feed: FeedRows) -> int:
    return num_bytes(feed.hidden, feed.hidden_scales)


def _wire_ms(feed: FeedRows, policy: HiddenPolicy) -> float:
    """From float32 rows to float32 rows in another process, without the network between."""
    rows_nd = unpack(feed.hidden, feed.hidden_scales)
    started = perf_counter()
    hidden, scales = pack(rows_nd, policy.dtype)
    message = to_wire(replace(feed, hidden=hidden, hidden_scales=scales)).SerializeToString()
    arrived = from_wire(FeedRows, proposer.FeedRows.FromString(message))
    unpack(arrived.hidden, arrived.hidden_scales)
    return (perf_counter() - started) * 1e3
