"""`shaping.py` for one row, in plain Python: the oracle. It shares no line with it.

Numbers are rounded to float32 after each step, as a float32 tensor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from struct import pack, unpack

from seqmtp_serve.request import Shaping


def plain_shaped(
    logits: Sequence[float], shaping: Shaping, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[float]:
    """The row's logits after whitelist, bad words, bias and penalties, in this order."""
    shaped = []
    for token, value in enumerate(logits):
        if shaping.allowed_token_ids and token not in shaping.allowed_token_ids:
            value = -inf
        for word in shaping.bad_words:
            would_be = (*output_ids, token)
            if would_be[-len(word) :] == word:
                value = -inf
        value = _single(value + _single(dict(shaping.logit_bias).get(token, 0.0)))
        if token in prompt_ids or token in output_ids:
            penalty = _single(shaping.repetition_penalty)
            value = _single(value / penalty if value > 0 else value * penalty)
        count = output_ids.count(token)
        value = _single(value - _single(_single(shaping.frequency_penalty) * count))
        shaped.append(_single(value - _single(shaping.presence_penalty) * (count > 0)))
    return shaped


def _single(value: float) -> float:
    """The nearest float32."""
    return float(unpack("f", pack("f", value))[0])
