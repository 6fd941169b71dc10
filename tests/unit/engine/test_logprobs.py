"""Log-probabilities are those of the target's raw rows, however a token came about, and however its prompt was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqmtp_serve import oracle
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.request import Request, TokenLogprobs
from seqmtp_serve.speculation.logprobs import FLOOR, token_logprobs
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.engines import TARGET, proposer, request, seeded, target

MAKERS = {"greedy": request, "seeded": seeded}
ASKED = {"logprobs": 4, "prompt_logprobs": 2, "min_tokens": 6}  # the ban on stop tokens must not show


def scores(stream: Stream) -> list[TokenLogprobs]:
    """Of the prompt and of the output, as the coordinator would keep them."""
    output = [one for row in stream.rows for one in row.logprobs]
    return stream.prompt_logprobs + output[: len(stream.output)]


def run(each: Request, depth: int, chunk: int = 1000) -> Stream:
    return Driver(target(proposer() if depth else None), depth=depth, chunk=chunk).run(each)[0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_drafted_corrected_and_bonus_tokens_have_the_numbers_of_plain_decoding(make: object) -> None:
    assert callable(make)
    each = make(1, max_tokens=40, **ASKED)
    plain = scores(run(each, depth=0))
    assert scores(run(each, depth=1)) == plain
    deep = run(each, depth=3)
    assert scores(deep) == plain
    rounds = [(row.drafted, row.accepted) for row in deep.rows[1:]]
    assert any(accepted for _, accepted in rounds)
    assert {accepted == drafted for drafted, accepted in rounds} == {True, False}, "bonus and corrected tokens"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_numbers_up_to_the_contexts_last_slot_are_those_of_plain_decoding(make: object) -> None:
    assert callable(make)
    each = make(1, prompt_len=20, max_tokens=200, ignore_eos=True, logprobs=4)

    def to_the_end(depth: int) -> tuple[list[int], list[TokenLogprobs]]:
        link = proposer(max_model_len=48) if depth else None
        stream, driver = Stream.open(each), Driver(target(link, max_model_len=48), depth=depth)
        while len(each.prompt_ids) + len(stream.output) <= 48:
            driver.step([stream])
        return stream.output, scores(stream)

    tokens, numbers = to_the_end(0)
    assert len(numbers) == len(tokens) == 49 - len(each.prompt_ids)  # the last token needs no slot
    assert to_the_end(1) == to_the_end(3) == (tokens, numbers)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_they_are_the_oracles_raw_log_softmax(make: object) -> None:
    assert callable(make)
    stream = run(make(2, **ASKED), depth=3)
    found = scores(stream)
    tokens = [*stream.request.prompt_ids, *stream.output]
    log_TV = torch.log_softmax(oracle.forward(TARGET, TINY, tokens)[0].double(), -1)
    num_prompt = len(stream.request.prompt_ids) - 1
    for index, (one, row_V) in enumerate(zip(found, log_TV, strict=False)):
        assert one.logprob == pytest.approx(float(row_V[tokens[index + 1]]), abs=1e-4)
        assert one.rank == 1 + int((row_V > row_V[tokens[index + 1]]).sum())
        ranked = row_V.topk(2 if index < num_prompt else 4)
        assert one.top_ids == tuple(ranked.indices.tolist())
        assert one.top_logprobs == pytest.approx(ranked.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 8])
def test_a_prompts_numbers_do_not_depend_on_how_it_was_cut(chunk: int) -> None:
    each = request(2, prompt_len=40, **ASKED)
    assert scores(run(each, depth=1, chunk=chunk)) == scores(run(each, depth=1))


def test_a_replay_gives_the_rest_of_the_numbers_and_none_twice() -> None:
    each = request(1, max_tokens=30, **ASKED)
    undisturbed = scores(run(each, depth=3))
    stream, driver = Stream.open(each), Driver(target(proposer()), chunk=9)
    while len(stream.output) < 12:
        driver.step([stream])
    driver.preempt(stream)
    driver.resume([stream])
    assert scores(stream) == undisturbed


def test_nothing_is_computed_for_who_does_not_ask() -> None:
    assert scores(run(request(), depth=3)) == []


def test_equal_logits_are_ranked_by_id_and_a_masked_token_has_the_floor() -> None:
    row_V = torch.tensor([0.0, 2.0, 2.0, float("-inf"), 2.0])
    chosen, masked = token_logprobs(torch.stack((row_V, row_V)), [2, 3], 2)
    assert chosen.top_ids == (1, 2)
    assert (chosen.rank, masked.rank) == (1, 5)
    assert masked.logprob == FLOOR


def test_a_prompt_whose_pages_are_shared_is_computed_again_for_its_numbers() -> None:
    each = request(2, prompt_len=40, **ASKED)
    driver = Driver(target(proposer()))
    driver.run(replace(each, request_id="before"))
    again, plain = driver.run(replace(each, request_id="again"), request(2, prompt_len=40))
    assert scores(again) == scores(run(each, depth=3))
    assert plain.rows[0].cached > 0, "the fixture must have something to share"
    assert again.rows[0].cached == 0
