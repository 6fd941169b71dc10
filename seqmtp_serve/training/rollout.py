"""Sample the target's own replies: a batch of slots, each refilled as soon as its sequence ends.

A task without a user turn (``prompt=None``) first lets the model write the user turn itself and then answers it
(Magpie, arXiv 2406.08464). With an ``opening`` the model goes on from there, which is how it writes articles to
summarise: the turn then ends at a sentence of the asked length, and each of the ``asks`` gets a reply of its own, for
which the slot's length goes back to the end of the article. Everything random comes from one seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from seqmtp_serve.training.chat import REPLY_OPENS, USER_OPENS
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.target import FrozenTarget, SlotCache

_MIN_TURN, _MAX_TURN = 5, 160  # tokens of a user turn the model wrote itself
_LOOP_SPAN, _LOOP_PERIOD = 96, 32  # a reply whose last 96 tokens repeat with a period <= 32 ends there
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What follows an article, and the temperature of the reply to it."""

    closing: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One conversation to roll out; ``temperature`` 0 is greedy and applies to the reply."""

    prompt: list[int] | None  # token ids of the user turn
    temperature: float
    max_reply: int
    opening: tuple[int, ...] = ()  # of a user turn the model writes itself
    asks: tuple[Ask, ...] = ()  # each follows such a turn once; () is the bare turn
    turn_len: int = 0  # tokens after which such a turn ends at its next sentence; 0: where the model ends it
    turn_temperature: float = 1.0
    stop_loops: bool = True  # end a reply that only repeats itself
    label: int = 0  # comes back with the document


@dataclass(slots=True)
class _Slot:
    task: Task
    tokens: list[int]
    hidden: torch.Tensor
    length: int = 0  # rows already in the cache
    temperature: float = 0.0
    turn_end: int = 0  # tokens of prefix and self-written turn; 0 while it is written, or when the task gave the turn
    reply_start: int | None = None
    forced: list[int] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)


class Sampler:
    """Rolls tasks out over ``num_slots`` slots of ``max_len`` positions; finished ones come out of :meth:`run`."""

    def __init__(
        self,
        target: FrozenTarget,
        encode: Encode,
        *,
        eos_id: int,
        num_slots: int,
        max_len: int,
        seed: int,
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._target, self._eos = target, eos_id
        self._cache = SlotCache(target.shape, num_slots, max_len, cache_dtype)
        self._random = torch.Generator().manual_seed(seed)
        self._reply_opens = encode(REPLY_OPENS)
        self._prefix = encode(USER_OPENS)
        self._sentence_ends = {token for text in (".", '."', ".\n", ".\n\n", "!", "?") for token in encode(text)[-1:]}
        self._slots: list[_Slot | None] = [None] * num_slots
        self.num_sampled = 0
        prefix_cache = SlotCache(target.shape, 1, max_len, cache_dtype)
        self._prefix_hidden = target.extend(torch.tensor(self._prefix), prefix_cache, 0, 0).bfloat16()
        self._prefix_keys = prefix_cache.keys[:, 0, :, : len(self._prefix)].clone()
        self._prefix_values = prefix_cache.values[:, 0, :, : len(self._prefix)].clone()

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[int, Document]]:
        """Yield each finished document; ends when the tasks are used up and all slots are empty."""
        while True:
            for index, slot in enumerate(self._slots):
                if slot is None and (task := next(tasks, None)) is not None:
                    self._slots[index] = self._open(index, task)
            if not any(slot is not None for slot in self._slots):
                return
            yield from self._step()

    def _open(self, index: int, task: Task) -> _Slot:
        prefix_len, max_len = len(self._prefix), self._cache.max_len
        tokens = list(self._prefix)
        if task.prompt is not None:
            tokens += task.prompt + self._reply_opens
        else:
            tokens += task.opening
        if len(tokens) >= max_len:
            raise ValueError(f"prompt of {len(tokens)} tokens does not fit a slot of {max_len}")
        hidden = torch.zeros(max_len, self._target.shape.hidden_size, dtype=torch.bfloat16)
        hidden[:prefix_len] = self._prefix_hidden
        self._cache.keys[:, index, :, :prefix_len] = self._prefix_keys
        self._cache.values[:, index, :, :prefix_len] = self._prefix_values
        # the last known token always goes through step(), so that one place samples
        inner = torch.tensor(tokens[prefix_len:-1], dtype=torch.long)
        if len(inner):
            hidden[prefix_len : len(tokens) - 1] = self._target.extend(inner, self._cache, index, prefix_len).bfloat16()
        slot = _Slot(task=task, tokens=tokens, hidden=hidden, length=len(tokens) - 1, asks=list(task.asks))
        slot.temperature = task.turn_temperature
        if task.prompt is not None:
            slot.reply_start, slot.temperature = len(tokens), task.temperature
        return slot

    def _step(self) -> Iterator[tuple[int, Document]]:
        slots = self._slots
        tokens_B = torch.tensor([slot.tokens[-1] if slot else 0 for slot in slots])
        positions_B = torch.tensor([slot.length if slot else 0 for slot in slots])
        hidden_Bd = self._target.step(tokens_B, positions_B, self._cache)
        heat_B = torch.tensor([slot.temperature if slot else 0.0 for slot in slots])
        logits_BV = self._target.logits(hidden_Bd)
        logits_BV[[index for index, slot in enumerate(slots) if slot and self._too_short(slot)], self._eos] = -torch.inf
        sampled = draw(logits_BV, heat_B, self._random)
        stored_Bd = hidden_Bd.bfloat16()
        for index, slot in enumerate(slots):
            if slot is None:
                continue
            slot.hidden[slot.length] = stored_Bd[index]
            slot.length += 1
            if slot.forced:
                slot.tokens.append(slot.forced.pop(0))
                continue
            slot.tokens.append(sampled[index])
            self.num_sampled += 1
            if slot.reply_start is None:
                if not self._user_turn_goes_on(slot):
                    slots[index] = None
            elif self._reply_ended(slot):
                yield slot.task.label, self._close(slot)
                if slot.asks and slot.turn_end:
                    del slot.tokens[slot.turn_end :]
                    slot.length = slot.turn_end - 1
                    self._ask(slot)
                else:
                    slots[index] = None

    def _too_short(self, slot: _Slot) -> bool:
        """A turn of an asked length that the model may not end yet."""
        return slot.reply_start is None and len(slot.tokens) - len(self._prefix) < slot.task.turn_len

    def _user_turn_goes_on(self, slot: _Slot) -> bool:
        """True while the self-written user turn is usable; opens the reply when the turn ends."""
        task, turn_len = slot.task, len(slot.tokens) - len(self._prefix)
        if slot.tokens[-1] == self._eos:
            slot.forced, slot.temperature = self._reply_opens[1:], task.temperature
            slot.reply_start = len(slot.tokens) + len(slot.forced)
        elif task.turn_len and turn_len >= task.turn_len and slot.tokens[-1] in self._sentence_ends:
            slot.turn_end = len(slot.tokens)
            self._ask(slot)
        else:
            room = self._cache.max_len - len(slot.tokens) - len(self._reply_opens)
            return room > 0 and turn_len <= task.turn_len + _MAX_TURN
        return turn_len >= _MIN_TURN and not is_looping(slot.tokens)

    def _ask(self, slot: _Slot) -> None:
        ask = slot.asks.pop(0)
        slot.forced, slot.temperature = [*ask.closing, *self._reply_opens], ask.temperature
        slot.reply_start = len(slot.tokens) + len(slot.forced)

    def _reply_ended(self, slot: _Slot) -> bool:
        assert slot.reply_start is not None
        reply = slot.tokens[slot.reply_start :]
        full = len(reply) >= slot.task.max_reply or len(slot.tokens) >= self._cache.max_len
        return full or reply[-1] == self._eos or (slot.task.stop_loops and is_looping(reply))

    def _close(self, slot: _Slot) -> Document:
        """The first document of an article counts its sampled rows too, so it is not a greedy one."""
        assert slot.reply_start is not None
        with_article = slot.turn_end > 0 and len(slot.asks) + 1 == len(slot.task.asks)
        return Document(
            tokens=torch.tensor(slot.tokens),
            hidden=slot.hidden[: len(slot.tokens)].clone(),
            prompt_len=len(self._prefix) + len(slot.task.opening) if with_article else slot.reply_start,
            greedy=slot.temperature == 0 and not with_article,
        )


def is_looping(reply: list[int]) -> bool:
    """Whether the last 96 tokens repeat one pattern of at most 32 tokens."""
    tail = reply[-_LOOP_SPAN:]
    if len(tail) < _LOOP_SPAN:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _LOOP_PERIOD + 1))


def draw(logits_BV: torch.Tensor, temperature_B: torch.Tensor, random: torch.Generator) -> list[int]:
    """Greedy where the temperature is 0, a sample of the tempered softmax elsewhere."""
    chosen_B = logits_BV.argmax(-1)
    (hot,) = torch.nonzero(temperature_B, as_tuple=True)
    if len(hot):
        mass = torch.softmax(logits_BV[hot] / temperature_B[hot, None], -1).cumsum(-1)
        point = torch.rand(len(hot), 1, generator=random) * mass[:, -1:]
        chosen_B[hot] = torch.searchsorted(mass, point).squeeze(-1).clamp_max(mass.shape[-1] - 1)
    return chosen_B.tolist()
