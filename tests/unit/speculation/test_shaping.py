"""Logits processors of many rows at once against the plain one of a single row."""

from __future__ import annotations

import random
from math import inf

import pytest
import torch

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.request import Request, SamplingParams, Shaping
from seqmtp_serve.speculation.chain import select_chain
from seqmtp_serve.speculation.plain_shaping import plain_shaped
from seqmtp_serve.speculation.row_params import RowParams
from seqmtp_serve.speculation.shaping import Shaper, ShapingState, shaping_state

VOCAB = 12


def random_shaping(draws: random.Random, vocab_size: int = VOCAB, scale: float = 1.0) -> Shaping:
    """Each field on or off by a coin; always some token is left. `scale`: how strongly, in logits."""
    some = draws.sample(range(vocab_size), draws.randint(vocab_size // 2, vocab_size - 1))
    words = [tuple(draws.choices(some, k=draws.randint(1, 3))) for _ in range(draws.randint(1, 4))]
    words = [word for word in words if len(word) > 1] or [(some[0], some[0])]
    biased = draws.sample(range(vocab_size), draws.randint(1, 5))
    return Shaping(
        allowed_token_ids=tuple(some) if draws.random() < 0.4 else (),
        bad_words=tuple(words) if draws.random() < 0.5 else (),
        logit_bias=tuple((token, scale * draws.uniform(-4, 4)) for token in biased) if draws.random() < 0.5 else (),
        repetition_penalty=draws.choice([1.0, 0.8, 1.3]),
        frequency_penalty=scale * draws.choice([0.0, -0.7, 0.6]),
        presence_penalty=scale * draws.choice([0.0, -1.1, 1.5]),
    )


def batched(
    request: Request, shaping: Shaping, committed: list[int], drafts: list[int], row: torch.Tensor
) -> list[float]:
    """The row after committed tokens and accepted drafts, by the batched form."""
    state = ShapingState(request, shaping, VOCAB)
    for known in range(len(committed) + 1):  # as many small steps as there are tokens
        state.catch_up([*request.prompt_ids, *committed[:known]])
    shaper = Shaper([None, state])
    for token in drafts:
        shaper.advance(1, token)
    return shaper.shape(torch.stack([row, row]), [0, 1])[1].tolist()


@pytest.mark.covers(68, 72)
def test_every_row_is_shaped_as_the_plain_form_shapes_it() -> None:
    draws = random.Random(1)
    num_banned = 0
    for _ in range(200):
        shaping = random_shaping(draws)
        prompt, committed, drafts = (draws.choices(range(VOCAB), k=draws.randint(low, 5)) for low in (1, 0, 0))
        if shaping.bad_words and draws.random() < 0.7:  # the output ends where a bad word is about to
            drafts += shaping.bad_words[0][:-1]
        request = Request(request_id="r", prompt_ids=tuple(prompt), params=SamplingParams(shaping=shaping))
        row = torch.tensor([draws.gauss(0, 2) for _ in range(VOCAB)])
        expected = plain_shaped(row.tolist(), shaping, prompt, [*committed, *drafts])
        assert batched(request, shaping, committed, drafts, row) == expected
        num_banned += shaping.allowed_token_ids == () and -inf in expected
    assert num_banned > 20, "bad words must have come up"


def test_rows_nobody_shapes_are_the_very_same_tensor_and_the_given_logits_stay() -> None:
    logits = torch.randn(2, VOCAB)
    assert Shaper([None, None]).shape(logits, [0, 1]) is logits
    assert shaping_state(Request(request_id="r", prompt_ids=(1,), params=SamplingParams()), VOCAB) is None
    given = logits.clone()
    request = Request(request_id="r", prompt_ids=(1,), params=SamplingParams())
    state = ShapingState(request, Shaping(logit_bias=((3, 5.0),)), VOCAB)
    changed = Shaper([None, state]).shape(logits, [0, 1])
    assert torch.equal(logits, given), "unshaped logits stay readable"
    assert torch.equal(changed[0], given[0])
    assert (changed[1] != given[1]).nonzero().flatten().tolist() == [3]


@pytest.mark.covers(71)
def test_neighbours_do_not_enter_a_rows_bits() -> None:
    draws = random.Random(5)
    requests, states = [], []
    for index in range(8):
        shaping = random_shaping(draws)
        requests.append(Request(request_id=str(index), prompt_ids=(index,), params=SamplingParams(shaping=shaping)))
        state = ShapingState(requests[-1], shaping, VOCAB)
        state.catch_up([index, 3, 4, 3])
        states.append(state)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    together = Shaper(states).shape(logits, list(range(8)))
    for index, state in enumerate(states):
        assert torch.equal(Shaper([state]).shape(logits[index : index + 1], [0])[0], together[index])
    order = [5, 0, 7]
    assert torch.equal(Shaper(states).shape(logits[order], order), together[order])


@pytest.mark.covers(68)
def test_a_draft_is_judged_by_a_row_that_knows_the_drafts_before_it() -> None:
    """Frequency penalty: the same token wins until it has come twice."""
    logits = torch.zeros(1, 4, 3)
    logits[0, :, 1] = 1.5
    request = Request(
        request_id="r", prompt_ids=(0,), params=SamplingParams(temperature=0.0, shaping=Shaping(frequency_penalty=1.0))
    )
    state = shaping_state(request, 3)
    assert state is not None
    state.catch_up([0])
    drafts = torch.tensor([[1, 1, 1]])
    selection = select_chain(logits, drafts, [3], None, RowParams.of_requests([request]), [1], Shaper([state]))
    assert selection.tokens == [[1, 1, 0]]
    again = select_chain(logits, drafts, [3], None, RowParams.of_requests([request]), [1], Shaper([state]))
    assert again == selection, "a selection leaves no trace in the request's state"


@pytest.mark.parametrize(
    "shaping",
    [Shaping(allowed_token_ids=(VOCAB,)), Shaping(bad_words=((1, VOCAB),)), Shaping(logit_bias=((-1, 1.0),))],
)
def test_a_token_outside_the_vocabulary_is_refused(shaping: Shaping) -> None:
    request = Request(request_id="r", prompt_ids=(1,), params=SamplingParams(shaping=shaping))
    with pytest.raises(InvalidField, match="outside the vocabulary"):
        shaping_state(request, VOCAB)
