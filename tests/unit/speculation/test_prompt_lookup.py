"""Copies from a request's own text: found as a plain search finds them, and given up where they are wrong."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.speculation.prompt_lookup import GREEDY, LOOKBACK, SAMPLED, SHORTEST, FirstRates, PromptLookup

few_tokens = st.lists(st.sampled_from([0, 1, 2, 0x10FFFF]), max_size=60)


def plain_copy(text: list[int], num_tokens: int) -> list[int]:
    """What follows the newest of the longest matches; a copy that reaches the text's end goes on with itself."""
    for size in sorted(SHORTEST, reverse=True):
        for stop in range(len(text) - 1, size - 1, -1):
            if text[stop - size : stop] == text[-size:]:
                grown = list(text)
                for place in range(num_tokens):
                    grown.append(grown[stop + place])
                return grown[len(text) :]
    return []


def found(lookup: PromptLookup, num_tokens: int) -> tuple[int, ...]:
    copy = lookup.find(num_tokens)
    return () if copy is None else copy.tokens


@given(few_tokens, st.integers(1, 8), st.integers(0, 60))
def test_a_copy_is_what_a_plain_search_finds(text: list[int], num_tokens: int, cut: int) -> None:
    """However the tokens came; as long as nobody was seen to be wrong."""
    lookup = PromptLookup(text[:cut])
    for token in text[cut:]:
        lookup.extend([token])
    assert list(found(lookup, num_tokens)) == plain_copy(text, num_tokens)


@pytest.mark.parametrize("rates", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_at_first_any_match_is_trusted_the_more_the_longer(rates: FirstRates) -> None:
    assert list(rates.copies) == sorted(rates.copies)
    assert rates.copies[0] > rates.module


def test_sampled_text_is_trusted_less_to_repeat_itself() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    greedy, sampled = PromptLookup(text).find(3), PromptLookup(text, first_rates=SAMPLED).find(3)
    assert greedy is not None
    assert sampled is not None
    assert sampled.tokens == greedy.tokens
    assert all(one < other for one, other in zip(sampled.survivals, greedy.survivals, strict=True))


def test_a_text_that_never_repeats_is_never_copied() -> None:
    lookup = PromptLookup(range(500))
    assert lookup.find(3) is None
    lookup.extend(range(500, 600))
    assert lookup.find(3) is None
    assert PromptLookup().find(3) is None


def test_a_match_too_far_back_is_not_looked_for() -> None:
    """Which bounds the time of a round in a long text."""
    start = [7, 8, 9]
    near = [*start, *range(100, 100 + LOOKBACK - 10), 7, 8]
    assert found(PromptLookup(near), 1) == (9,)
    far = [*start, *range(100, 100 + LOOKBACK), 7, 8]
    assert found(PromptLookup(far), 1) == ()


NEW_TOKENS = count(10_000)


def rounds(lookup: PromptLookup, number: int, truth: int, module: int) -> list[bool]:
    """Rounds whose text goes on with 1 2 and `truth`, where 1 2 3 was seen; whether each copied."""
    copied = []
    for _ in range(number):
        copy = lookup.find(2)
        if copy is None:
            lookup.module_drafted(module)
        copied.append(copy is not None)
        lookup.extend([truth, next(NEW_TOKENS), 1, 2])
    return copied


def test_wrong_copies_give_way_to_the_module() -> None:
    """Each time another token follows; a module that is right meanwhile is left alone soon."""
    lookup, copied = PromptLookup([1, 2, 3, 4, 1, 2]), []
    for truth in range(50, 90):
        copied += rounds(lookup, 1, truth, module=truth)
    assert copied[0]
    assert not any(copied[4:])


def test_right_copies_are_kept_beside_a_module_that_is_mostly_wrong() -> None:
    assert all(rounds(PromptLookup([1, 2, 3, 4, 1, 2]), 40, truth=3, module=9))


def test_copies_return_when_they_would_have_been_right() -> None:
    """What a copy would have said is judged in the module's rounds too."""
    lookup = PromptLookup([1, 2, 3, 4, 1, 2])
    for truth in range(50, 60):
        rounds(lookup, 1, truth, module=truth)
    assert lookup.find(2) is None
    lookup.extend([3, next(NEW_TOKENS), 1, 2])
    again = rounds(lookup, 40, truth=3, module=9)
    assert not again[0]
    assert again[-1]


def test_a_copy_says_how_often_it_is_right_and_each_right_token_makes_the_match_longer() -> None:
    first, second, third = GREEDY.copies[:3]
    copy = PromptLookup([1, 2, 3, 4, 5, 1, 2]).find(3)
    assert copy is not None
    assert copy.survivals == pytest.approx((first, first * second, first * second * third), abs=1e-4)
    longest = [*range(20), 30, *range(20)]
    copy = PromptLookup(longest).find(2)
    assert copy is not None
    assert copy.survivals == pytest.approx((GREEDY.copies[-1], GREEDY.copies[-1] ** 2), abs=1e-4)


def test_where_the_module_does_not_draft_any_copy_is_found() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 1, 2])
    for truth in range(50, 60):
        rounds(lookup, 1, truth, module=truth)
    copy = lookup.find(1, module_drafts=False)
    assert copy is not None
    assert copy.survivals[0] < GREEDY.module
