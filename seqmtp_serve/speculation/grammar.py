"""Structured output by llguidance: grammars compiled once, and where one output stands in its grammar.

A `GrammarState` is never rolled back: a selection forks it, and the fork takes in the accepted drafts. Ends of text are
kept out of the matcher, whose state after one is not to be relied on: once it accepts, an end may come, and after that
nothing else. No torch here: the gateway compiles, too, to refuse what does not.

Shapes: V tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray
from tokenizers import Tokenizer

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.request import Request

MAX_GRAMMAR_LEN = 1 << 17  # characters
MAX_KEPT = 64  # compiled grammars
LIMITS = LLParserLimits(verbose_errors=False)  # llguidance's own: fuel for the lexer, items for the parser, states

_log = logging.getLogger(__name__)
Ends = tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the newest. `open_tokenizer` is called when the first one comes.

    A grammar is llguidance's own JSON form (`LLMatcher.grammar_from_*`), whatever it was written in.
    """

    def __init__(self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._open_tokenizer, self._vocab_size = open_tokenizer, vocab_size
        self._tokenizers: dict[Ends, LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, Ends], LLMatcher] = OrderedDict()
        self._lock = Lock()  # of the order: the gateway compiles in threads

    def compile(self, grammar: str, eos_token_ids: Ends) -> LLMatcher:
        """A matcher at the beginning of the grammar, for the caller alone.

        Raises InvalidField with the compiler's message. Takes milliseconds, rarely a second; the limits bound it.
        """
        key = (grammar, eos_token_ids)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._build(grammar, eos_token_ids)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def state(self, grammar: str, request: Request) -> GrammarState:
        """Where the request's output begins. Raises InvalidField."""
        return GrammarState(self.compile(grammar, request.eos_token_ids), request, self._vocab_size)

    def _build(self, grammar: str, eos_token_ids: Ends) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_LEN:
            raise InvalidField(f"A grammar may have {MAX_GRAMMAR_LEN} characters; this one has {len(grammar)}.")
        matcher = LLMatcher(self._tokenizer(eos_token_ids), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidField(f"The grammar does not compile: {matcher.get_error().strip()[:1000]}")
        return matcher

    def _tokenizer(self, eos_token_ids: Ends) -> LLTokenizer:
        if not eos_token_ids:
            raise InvalidField("This model has no end of text, so a grammar could not end it.")
        if eos_token_ids not in self._tokenizers:
            try:
                self._tokenizers[eos_token_ids] = LLTokenizer(
                    self._open_tokenizer().to_str(), n_vocab=self._vocab_size, eos_token=list(eos_token_ids)
                )
            except Exception as error:  # llguidance's, for tokenizers it cannot read bytes from
                raise InvalidField(f"This model's tokenizer cannot follow a grammar: {error}") from None
        return self._tokenizers[eos_token_ids]


class GrammarState:
    """The grammar after some output tokens. What it does not take makes it `failed`: it then allows nothing at all."""

    def __init__(self, matcher: LLMatcher, request: Request, vocab_size: int) -> None:
        params = request.params
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends = request.eos_token_ids
        self._stops = list(params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids))
        self._min_tokens, self.num_tokens = params.min_tokens, 0
        self._ended, self.failed = False, False

    def fork(self) -> GrammarState:
        """The same state, to be moved on by itself."""
        copy = object.__new__(GrammarState)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    def push(self, token: int) -> None:
        """The output's next token."""
        self.num_tokens += 1
        if token in self._ends:
            self._ended = True
        elif self._ended or self.failed or not self._matcher.consume_token(token):
            self._fail()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come now `[V]`. An end of text may when the grammar accepts, and then for ever.

        `min_tokens` puts off stop tokens as long as the grammar has others.
        """
        allowed_V = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._ended:
            allowed_V[list(self._ends)] = True
        elif not self.failed:
            words = allocate_token_bitmask(1, self._vocab_size)
            fill_next_token_bitmask(self._matcher, words, 0)
            if self._matcher.is_error():
                self._fail()
                return allowed_V
            allowed_V |= np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)
            if self.num_tokens < self._min_tokens:
                longer_V = allowed_V.copy()
                longer_V[self._stops] = False
                allowed_V = longer_V if longer_V.any() else allowed_V
        return allowed_V

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many of these drafts may follow; one that ends the text is the last, and is left for a row to judge."""
        before_end = next((place for place, token in enumerate(drafts) if token in self._ends), len(drafts))
        if self._ended or self.failed:
            return 0
        legal = self._matcher.validate_tokens(list(drafts[:before_end]))
        return min(legal + (legal == before_end), len(drafts))

    def forced(self) -> tuple[int, ...]:
        """Tokens that have to come now, as the tokenizer spells them; the same text in other tokens may come, too."""
        if self._ended or self.failed:
            return ()
        tokens = self._matcher.compute_ff_tokens()
        return tuple(takewhile(lambda token: token not in self._ends and token < self._vocab_size, tokens))

    def _fail(self) -> None:
        if not self.failed:
            _log.warning("a grammar went wrong after %d tokens: %s", self.num_tokens, self._matcher.get_error()[:200])
        self.failed = True
