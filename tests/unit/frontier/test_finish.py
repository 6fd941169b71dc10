"""The finish checker against a plain oracle that looks at the whole text after every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.errors import IllegalTransition, InvalidField
from seqmtp_serve.frontier.finish import Finish, FinishChecker, TextAssembler
from seqmtp_serve.request import FinishReason, Request, SamplingParams

EOS, PIECES = 0, ("", "a", "b", "ab", "ba", "aab", "", "c")  # token id -> text; 6 is a special token without text


def request(**params: object) -> Request:
    defaults: dict[str, object] = {"max_tokens": 8}
    return Request(
        request_id="r",
        prompt_ids=(1,),
        params=SamplingParams(**{**defaults, **params}),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
    )


def oracle(request: Request, tokens: list[int]) -> tuple[int, Finish | None]:
    """How many tokens are committed, and how the text ended: every prefix decoded whole."""
    params = request.params
    for count in range(1, len(tokens) + 1):
        token, old = tokens[count - 1], "".join(PIECES[t] for t in tokens[: count - 1])
        new = old + PIECES[token]
        if count > params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return count, Finish(reason=FinishReason.STOP, stop_reason=None, text_end=len(old))
            if token in params.stop_token_ids:
                end = len(new) if params.include_stop_str_in_output else len(old)
                return count, Finish(reason=FinishReason.STOP, stop_reason=token, text_end=end)
            for end in range(len(old) + 1, len(new) + 1):  # one character at a time
                ending = [stop for stop in params.stop if new[:end].endswith(stop)]
                if ending:
                    stop = max(ending, key=len)
                    shown = end if params.include_stop_str_in_output else end - len(stop)
                    return count, Finish(reason=FinishReason.STOP, stop_reason=stop, text_end=shown)
        if count == params.max_tokens:
            return count, Finish(reason=FinishReason.LENGTH, stop_reason=None, text_end=len(new))
    return len(tokens), None


requests = st.builds(
    request,
    max_tokens=st.integers(1, 8),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    stop_token_ids=st.sampled_from([(), (7,), (1, 6)]),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True).map(tuple),
)


@pytest.mark.covers(78, 80, 81)
@given(requests, st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_checker_and_assembler_agree_with_the_whole_text(request: Request, tokens: list[int]) -> None:
    count, expected = oracle(request, tokens)
    checker, assembler, shown = FinishChecker(request), TextAssembler(request), ""
    for token in tokens[:count]:
        assert checker.finish is None
        finish = checker.push(token, PIECES[token])
        shown += assembler.push(token, PIECES[token])
        assert finish == checker.finish == assembler.finish
    text = "".join(PIECES[token] for token in tokens[:count])
    assert checker.finish == expected
    if expected is None:
        assert text.startswith(shown)
        assert len(text) - len(shown) <= max((len(stop) for stop in request.params.stop), default=1) - 1
        assert shown + assembler.flush() == text
    else:
        assert shown == text[: expected.text_end]
        assert assembler.flush() == ""


def test_a_stop_string_is_found_across_tokens_and_cuts_inside_one() -> None:
    checker = FinishChecker(request(stop=("bb",)))
    assert checker.push(3, "ab") is None
    assert checker.push(4, "ba") == Finish(reason=FinishReason.STOP, stop_reason="bb", text_end=1)
    with pytest.raises(IllegalTransition):
        checker.push(1, "a")


def test_held_back_text_is_shown_once_it_cannot_be_a_stop_string() -> None:
    assembler = TextAssembler(request(stop=("aba",)))
    assert [assembler.push(1, "a"), assembler.push(2, "b"), assembler.push(2, "b")] == ["", "", "a"]
    assert assembler.flush() == "bb"


def test_unusable_parameters_are_refused() -> None:
    for params in ({"stop": ("a", "")}, {"max_tokens": 0}):
        with pytest.raises(InvalidField):
            FinishChecker(request(**params))
