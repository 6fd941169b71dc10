"""From a body's fields that shape the target's rows to `request.Shaping`: ids checked, words tokenised."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.request import Shaping
from services.gateway.body import GenerationBody

TOP_BIAS = 100.0  # logits; what is beyond is clamped, as vLLM does


def shaping_of(body: GenerationBody, tokenizer: Tokenizer, grammar: str = "") -> Shaping | None:
    """What the body asks to be done to the logits, `grammar` with it; None: nothing. Raises InvalidField."""
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    shaping = Shaping(
        allowed_token_ids=_allowed(body, vocab_size),
        grammar=grammar,
        bad_words=word_ids(body.bad_words or (), tokenizer),
        logit_bias=_biases(body, vocab_size),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
    )
    banned = {word[0] for word in shaping.bad_words if len(word) == 1}
    if shaping.allowed_token_ids and banned.issuperset(shaping.allowed_token_ids):
        raise InvalidField("'bad_words' bans every token of 'allowed_token_ids'.", param="allowed_token_ids")
    return None if shaping == Shaping() else shaping


def word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell these words, at the beginning of a text and after a space.

    The second form counts only where it is as long as the first and begins with another token, as in vLLM
    (`update_from_tokenizer` in vllm/sampling_params.py).
    """
    sequences: list[tuple[int, ...]] = []
    for position, word in enumerate(words):
        bare, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids) for prefix in ("", " ")
        )
        if not word.strip() or not bare:
            raise InvalidField("A bad word needs text other than spaces.", param=f"bad_words[{position}]")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


def _allowed(body: GenerationBody, vocab_size: int) -> tuple[int, ...]:
    allowed = tuple(sorted(set(body.allowed_token_ids or ())))
    if allowed and allowed[-1] >= vocab_size:
        raise InvalidField(_no_token(allowed[-1], vocab_size), param="allowed_token_ids")
    return allowed


def _biases(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys are token ids written as strings: JSON knows no others."""
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            problem = f"Keys of 'logit_bias' are token ids, as in {{\"50\": -100}}; '{key[:64]}' is none."
            raise InvalidField(problem, param="logit_bias")
        if int(key) >= vocab_size:
            raise InvalidField(_no_token(int(key), vocab_size), param="logit_bias")
        biases[int(key)] = min(max(bias, -TOP_BIAS), TOP_BIAS)
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias != 0.0))


def _no_token(token: int, vocab_size: int) -> str:
    return f"There is no token {token}: the vocabulary has {vocab_size}."
