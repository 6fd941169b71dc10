"""Position-keyed randomness: every draw is a function of (seed, choice, absolute position, purpose) and of a token id.

Nothing is ever advanced, so nothing depends on how many draws came before, on batch neighbours, on the worker or on the
device; a request moved to another worker draws the same numbers there. The generator is SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014, figure 17) used as a counter: `mix64` is its output function and token t of a stream with key k is
mix64(k + (t + 1) * GAMMA). Purposes keep apart draws that must be independent at one position: one stream for
proposing, accepting and resampling skews the output.

Every function has a scalar form on Python integers (the oracle) and a tensor form; their integers are the same bits.
Tensors hold the 64-bit words as int64, whose products wrap.

Shapes: N streams, C token ids.
"""

from __future__ import annotations

from enum import IntEnum
from math import log

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class Purpose(IntEnum):
    """What a draw is for."""

    DRAFT = 1  # ratio contract: the proposer's sample
    ACCEPT = 2  # ratio contract: the uniform of the acceptance test
    RESAMPLE = 3  # ratio contract: correction, bonus, plain next token
    TOKEN = 4  # coupled contract: the Gumbel noise that draft and target share


# ---- scalar ----------------------------------------------------------------------------------------------------


def mix64(word: int) -> int:
    """SplitMix64's output function: a bijection of 64-bit words."""
    word &= _WORD
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word ^ (word >> _SHIFTS[-1])


def stream_key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """The 64-bit key of one stream."""
    key = mix64(purpose * GAMMA)
    for part in (seed, choice, position):
        key = mix64(key + part)
    return key


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """One draw in [0, 1): 53 bits, so never 1.0."""
    return (mix64(stream_key(seed, choice, position, purpose) + GAMMA) >> 11) * 2.0**-53


def gumbel_one(key: int, token: int) -> float:
    """The standard Gumbel value of one token: -log(-log u), with u at the middle of one of 2^52 cells of (0, 1)."""
    u = ((mix64(key + (token + 1) * GAMMA) >> 12) + 0.5) * 2.0**-52
    return -log(-log(u))


# ---- tensors ---------------------------------------------------------------------------------------------------


def stream_keys(seed_N: Tensor, choice_N: Tensor, position_N: Tensor, purpose: Purpose) -> Tensor:
    """Keys [N] int64 of N streams; arguments are int64, `seed_N` from `as_word`."""
    key_N = _mix_(seed_N + as_word(mix64(purpose * GAMMA)))
    return _mix_(_mix_(key_N + choice_N) + position_N)


def uniforms(key_N: Tensor) -> Tensor:
    """Draws [N] float64 in [0, 1)."""
    return _shift(_mix_(key_N + as_word(GAMMA)), 11).to(torch.float64) * 2.0**-53


def gumbel(key_N: Tensor, token_ids_C: Tensor) -> Tensor:
    """Standard Gumbel values [N, C] float64; a token's value does not depend on which other ids are asked for."""
    word_NC = _mix_(key_N[:, None] + (token_ids_C + 1) * as_word(GAMMA))
    u_NC = _shift(word_NC, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return u_NC.log_().neg_().log_().neg_()


def as_word(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned `value`."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix_(word: Tensor) -> Tensor:
    """`mix64` of each element, in place."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word.bitwise_xor_(_shift(word, shift)).mul_(as_word(multiplier))
    return word.bitwise_xor_(_shift(word, _SHIFTS[-1]))


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own copies the sign."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)
