"""Logits processors of the target's rows: whitelist, bad words, bias, penalties, at every drafted position.

The row after draft j is shaped by what plain decoding would know there: the prompt, the committed output and drafts
0 .. j-1, which were all accepted if that row is looked at. What a request does is in `request.Shaping`, with its order:
that of vLLM v1 (the `Sampler` docstring in vllm/v1/sample/sampler.py; bad words as in vllm/v1/sample/ops/bad_words.py,
penalties as in vllm/model_executor/layers/utils.py). Logits are shaped in float32, or as they come if that is wider.

`ShapingState` keeps what a request's rows have in common from round to round, as a function of its prompt and committed
tokens: it can be built anew at any time, and is after a fail-over. `Shaper` is one selection's copy of it, which the
accepted drafts move on. `plain_shaping.py` is the same for one row in plain Python.

Shapes: N rows, V tokens, P requests with penalties, S rows that are shaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from seqmtp_serve.errors import InternalError, InvalidField
from seqmtp_serve.request import Request, Shaping
from seqmtp_serve.speculation.grammar import GrammarCompiler, GrammarState

OUT = float("-inf")


class ShapingState:
    """One request's shaping, caught up with its committed tokens."""

    def __init__(
        self,
        request: Request,
        shaping: Shaping,
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammar: GrammarState | None = None,
    ) -> None:
        """`grammar` at its beginning. Raises InvalidField for a token outside the vocabulary."""
        self.grammar = grammar
        self.shaping, self._prompt_len, self._num_known = shaping, len(request.prompt_ids), 0
        self.tail: list[int] = []  # of the output: as much as the longest bad word looks at
        self.tail_len = max(map(len, shaping.bad_words), default=1) - 1
        _check_tokens(shaping, vocab_size)
        self.is_out_V: Tensor | None = None  # tokens the whitelist leaves out
        if shaping.allowed_token_ids:
            self.is_out_V = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.is_out_V[torch.tensor(shaping.allowed_token_ids, device=device)] = False
        self.penalties = (shaping.repetition_penalty, shaping.frequency_penalty, shaping.presence_penalty)
        self.is_penalised = self.penalties != (1.0, 0.0, 0.0)
        width = vocab_size if self.is_penalised else 0
        self.output_counts_V = torch.zeros(width, device=device)  # float32: whole numbers, exact
        self.is_seen_V = torch.zeros(width, dtype=torch.bool, device=device)  # in prompt or output

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that follow those known; `tokens` is the prompt and every committed token."""
        new = tokens[self._num_known :]
        output = tokens[max(self._num_known, self._prompt_len) :]
        self._num_known = len(tokens)
        if self.tail_len:
            self.tail = [*self.tail, *output][-self.tail_len :]
        if self.grammar is not None:
            for token in output:
                self.grammar.push(token)
        if self.is_penalised and new:
            self.is_seen_V[torch.tensor(new, device=self.is_seen_V.device)] = True
            ids, counts = zip(*Counter(output).items(), strict=True) if output else ((), ())
            index = torch.tensor(ids, dtype=torch.int64, device=self.is_seen_V.device)
            self.output_counts_V[index] += torch.tensor(counts, device=index.device)


class Shaper:
    """Shapes rows of one selection. `states[b]` is request b's, caught up; None: its rows are taken as they are."""

    def __init__(self, states: Sequence[ShapingState | None]) -> None:
        self._states = {b: state for b, state in enumerate(states) if state is not None}
        self._tails = {b: list(state.tail) for b, state in self._states.items() if state.shaping.bad_words}
        self._grammars = {b: state.grammar.fork() for b, state in self._states.items() if state.grammar is not None}
        penalised = [(b, state) for b, state in self._states.items() if state.is_penalised]
        self._place = {b: place for place, (b, _) in enumerate(penalised)}
        if penalised:
            self._counts_PV = torch.stack([state.output_counts_V for _, state in penalised])
            self._is_seen_PV = torch.stack([state.is_seen_V for _, state in penalised])
            columns = torch.tensor([state.penalties for _, state in penalised], device=self._counts_PV.device)
            self._penalties_P1 = columns.float()[:, :, None].unbind(1)  # repetition, frequency, presence

    def shape(self, logits_NV: Tensor, requests: Sequence[int]) -> Tensor:
        """The logits of one row each of these requests, shaped: a copy, or the very same tensor if none is."""
        rows = [row for row, b in enumerate(requests) if b in self._states]
        if not rows:
            return logits_NV
        index_S = torch.tensor(rows, device=logits_NV.device)
        chosen = [requests[row] for row in rows]
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        shaped_SV = logits_NV.index_select(0, index_S).to(wide)
        self._ban(shaped_SV, chosen)
        self._bias(shaped_SV, chosen)
        self._penalise(shaped_SV, chosen)
        return logits_NV.to(wide).index_copy(0, index_S, shaped_SV)

    def advance(self, request: int, token: int) -> None:
        """The request's next row comes after `token`, a draft that was accepted."""
        if request in self._grammars:
            self._grammars[request].push(token)
        if request in self._tails:
            self._tails[request] = [*self._tails[request], token]
        if request in self._place:
            self._counts_PV[self._place[request], token] += 1.0
            self._is_seen_PV[self._place[request], token] = True

    def _ban(self, logits_SV: Tensor, requests: Sequence[int]) -> None:
        """Whitelist, grammar and bad words, in place."""
        banned: list[tuple[int, int]] = []
        for row, b in enumerate(requests):
            is_out_V = self._states[b].is_out_V
            if is_out_V is not None:
                logits_SV[row].masked_fill_(is_out_V, OUT)
            if b in self._grammars:
                allowed_V = torch.from_numpy(self._grammars[b].allowed()).to(logits_SV.device)
                logits_SV[row].masked_fill_(~allowed_V, OUT)
            banned += [(row, token) for token in ended_words(self._states[b].shaping, self._tails.get(b, []))]
        if banned:
            index_2M = torch.tensor(banned, device=logits_SV.device).T
            logits_SV[index_2M[0], index_2M[1]] = OUT

    def _bias(self, logits_SV: Tensor, requests: Sequence[int]) -> None:
        biases = [(row, pair) for row, b in enumerate(requests) for pair in self._states[b].shaping.logit_bias]
        if biases:
            index_2M = torch.tensor([(row, token) for row, (token, _) in biases], device=logits_SV.device).T
            values_M = torch.tensor([bias for _, (_, bias) in biases], dtype=logits_SV.dtype, device=logits_SV.device)
            logits_SV[index_2M[0], index_2M[1]] += values_M

    def _penalise(self, logits_SV: Tensor, requests: Sequence[int]) -> None:
        rows = [row for row, b in enumerate(requests) if b in self._place]
        if not rows:
            return
        index_S = torch.tensor(rows, device=logits_SV.device)
        place = torch.tensor([self._place[requests[row]] for row in rows], device=logits_SV.device)
        repetition, frequency, presence = (column[place] for column in self._penalties_P1)
        counts_SV, is_seen_SV = self._counts_PV[place], self._is_seen_PV[place]
        part_SV = logits_SV[index_S]
        repeated_SV = torch.where(part_SV > 0, part_SV / repetition, part_SV * repetition)
        part_SV = torch.where(is_seen_SV, repeated_SV, part_SV)
        part_SV = part_SV - frequency * counts_SV
        logits_SV[index_S] = part_SV - presence * (counts_SV > 0)


def lightly_shaped(logits_BV: Tensor, shapings: Sequence[Shaping | None], token_ids_V: Tensor) -> Tensor:
    """A proposer's rows under the parts that need no context, whitelist and bias; the same tensor if none applies.

    `token_ids_V` are the ids of the columns. A whitelist that leaves none of them is passed over. It makes drafts more
    likely to be accepted and nothing else: the target's rows are shaped anyway.
    """
    active = [
        (row, shaping)
        for row, shaping in enumerate(shapings)
        if shaping and (shaping.allowed_token_ids or shaping.logit_bias)
    ]
    if not active:
        return logits_BV
    logits_BV = logits_BV.clone()
    for row, shaping in active:
        if shaping.allowed_token_ids:
            allowed = torch.tensor(shaping.allowed_token_ids, device=token_ids_V.device)
            is_allowed_V = torch.isin(token_ids_V, allowed)
            if bool(is_allowed_V.any()):
                logits_BV[row].masked_fill_(~is_allowed_V, OUT)
        for token, bias in shaping.logit_bias:
            logits_BV[row, token_ids_V == token] += bias
    return logits_BV


def shaping_state(
    request: Request,
    vocab_size: int,
    grammars: GrammarCompiler | None = None,
    device: torch.device | str = "cpu",
) -> ShapingState | None:
    """The state of a request that shapes its rows. Raises InvalidField."""
    shaping = request.params.shaping
    if shaping is None:
        return None
    if shaping.grammar and grammars is None:
        raise InternalError("this target was built without its tokenizer: it cannot follow a grammar")
    grammar = grammars.state(shaping.grammar, request) if shaping.grammar and grammars is not None else None
    return ShapingState(request, shaping, vocab_size, device, grammar)


def ended_words(shaping: Shaping, output: Sequence[int]) -> list[int]:
    """Tokens that would complete a bad word after this output, or a tail of it that is long enough."""
    ends = []
    for *head, last in shaping.bad_words:
        if list(output[len(output) - len(head) :]) == head and len(head) <= len(output):
            ends.append(last)
    return ends


def _check_tokens(shaping: Shaping, vocab_size: int) -> None:
    named = {
        "allowed_token_ids": shaping.allowed_token_ids,
        "bad_words": [token for word in shaping.bad_words for token in word],
        "logit_bias": [token for token, _ in shaping.logit_bias],
    }
    for name, tokens in named.items():
        if any(not 0 <= token < vocab_size for token in tokens):
            raise InvalidField(f"a token of {name} is outside the vocabulary of {vocab_size}", param=name)
