"""Log-probabilities of a pass, for the requests that ask for them: of chosen tokens, and of the prompt's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from seqmtp_serve.engine.batch import Item
from seqmtp_serve.errors import InternalError, SeqMTPError
from seqmtp_serve.request import TokenLogprobs
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.logprobs import token_logprobs

Scores = dict[str, tuple[TokenLogprobs, ...]]  # by request id

_TILE_ROWS = 32  # logits of a prompt that exist at once: 6 MB at V = 49152


def chosen_logprobs(logits_nV: Tensor, items: Sequence[Item], tokens: Mapping[str, Sequence[int]]) -> Scores:
    """Of the `tokens` chosen for `items`, whose rows `logits_nV` holds one after the other."""
    scores: Scores = {}
    first = 0
    for item in items:
        request = item.sequence.request
        chosen = tokens.get(request.request_id, ())
        if request.params.logprobs is not None and chosen:
            rows_RV = logits_nV[first : first + len(chosen)]
            scores[request.request_id] = token_logprobs(rows_RV, chosen, request.params.logprobs)
        first += len(item.drafts) + 1
    return scores


def prompt_logprobs(
    state_Nd: Tensor, items: Sequence[Item], logits: Callable[[Tensor], Tensor]
) -> tuple[Scores, dict[str, SeqMTPError]]:
    """Of the prompt tokens that follow the rows of prefill chunks; and why the logits of some requests are unusable.

    A replay has had them: its bootstrap row is committed.
    """
    scores: Scores = {}
    bad: dict[str, SeqMTPError] = {}
    first = 0
    for item in items:
        sequence, num_top = item.sequence, item.sequence.request.params.prompt_logprobs
        following = sequence.tokens[item.start + 1 : item.start + len(item.token_ids) + 1]
        if num_top is not None and following and not sequence.is_bootstrapped:
            try:
                scores[sequence.request.request_id] = tuple(
                    entry
                    for start in range(0, len(following), _TILE_ROWS)
                    for entry in token_logprobs(
                        logits(state_Nd[first + start : first + min(start + _TILE_ROWS, len(following))]),
                        following[start : start + _TILE_ROWS],
                        num_top,
                    )
                )
            except BadLogits:
                bad[sequence.request.request_id] = InternalError("the target's logits are not finite")
        first += len(item.token_ids)
    return scores, bad
