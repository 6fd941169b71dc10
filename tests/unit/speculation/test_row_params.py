"""Parameters that are kept from step to step are those of the requests at hand."""

from dataclasses import fields, replace

import torch

from seqmtp_serve.request import Request, SamplingParams
from seqmtp_serve.speculation.row_params import RecentRowParams, RowParams

CPU = torch.device("cpu")


def request(name: str, **params: object) -> Request:
    return Request(request_id=name, prompt_ids=(1, 2), params=SamplingParams(**params), eos_token_ids=(3,))  # type: ignore[arg-type]


def assert_same(kept: RowParams, fresh: RowParams) -> None:
    for field in fields(RowParams):
        one, other = getattr(kept, field.name), getattr(fresh, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_same_requests_have_the_same_rows_and_others_their_own() -> None:
    recent = RecentRowParams(CPU)
    greedy, hot = request("a", temperature=0.0), request("b", temperature=1.5, top_k=4, seed=9, min_tokens=2)
    first = recent.of([greedy, hot])
    assert recent.of([greedy, hot]) is first
    for requests in ([greedy, hot], [hot, greedy], [hot], [], [greedy], [replace(greedy, choice=2)], [hot, hot]):
        assert_same(recent.of(requests), RowParams.of_requests(requests))
