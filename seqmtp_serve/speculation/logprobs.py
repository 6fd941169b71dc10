"""Log-probabilities of chosen tokens, from the target's raw rows: before temperature, filters, penalties and bans.

One row at a time in float64, so a row's numbers do not depend on its neighbours, then rounded to float32: what travels
and is kept is what was computed.

Shapes: N rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqmtp_serve.request import TokenLogprobs
from seqmtp_serve.speculation.distributions import raise_unless_finite

FLOOR = -9999.0  # JSON has no -inf


def token_logprobs(logits_NV: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """One entry for each row: of `token_ids[i]` under row i, and of the `num_top` most likely tokens.

    Tokens tied at the last place go by their id. Raises BadLogits for rows with NaN or +inf.
    """
    logits_NV = logits_NV.cpu()  # one transfer, not several a row
    raise_unless_finite(logits_NV.amax(-1))
    pairs = zip(logits_NV, token_ids, strict=True)
    return tuple(_one(logits_V, token, min(num_top, len(logits_V))) for logits_V, token in pairs)


def _one(logits_V: Tensor, token: int, num_top: int) -> TokenLogprobs:
    scores_V = logits_V.double()
    log_V = (scores_V - scores_V.logsumexp(0)).clamp_min_(FLOOR).float()
    top_ids: list[int] = []
    if num_top:
        last = logits_V.topk(num_top).values[-1]
        kept_C = (logits_V >= last).nonzero()[:, 0]  # by id
        order_C = logits_V[kept_C].sort(descending=True, stable=True).indices
        top_ids = kept_C[order_C[:num_top]].tolist()
    return TokenLogprobs(
        logprob=float(log_V[token]),
        rank=1 + int((logits_V > logits_V[token]).sum()),
        top_ids=tuple(top_ids),
        top_logprobs=tuple(log_V[torch.tensor(top_ids, dtype=torch.int64, device=log_V.device)].tolist()),
    )
