"""Where in its prediction an output is: along it, across edits, and never dependent on how the output came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.speculation.prediction import MAX_GUESSES, PredictionPointer

PREDICTION = tuple(range(100, 140))


def after(output: list[int], prediction: tuple[int, ...] = PREDICTION) -> PredictionPointer:
    pointer = PredictionPointer(prediction)
    pointer.catch_up(output)
    return pointer


def test_it_begins_at_the_beginning_and_follows() -> None:
    assert after([]).propose(3) == (100, 101, 102)
    assert after([100, 101]).propose(3) == (102, 103, 104)
    assert after(list(PREDICTION)).propose(3) == ()


def test_a_replaced_token_is_guessed_and_then_sure_again() -> None:
    pointer = after([100, 7])
    assert pointer.propose(2) == (102, 103)
    assert not pointer.is_sure
    pointer.catch_up([100, 7, 102])
    assert pointer.is_sure
    assert pointer.propose(1) == (103,)


def test_after_an_insertion_or_a_deletion_the_place_is_found_by_the_newest_tokens() -> None:
    inserted = after([100, 101, 1, 2, 3, 4, 5, 102, 103, 104])
    assert inserted.is_sure
    assert inserted.propose(2) == (105, 106)
    deleted = after([100, 101, 120, 121, 122])
    assert deleted.is_sure
    assert deleted.propose(2) == (123, 124)


def test_of_equal_places_the_next_one_is_taken() -> None:
    prediction = (1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70)
    assert after([1, 2, 3, 50, 9, 9, 9, 1, 2, 3], prediction).propose(1) == (60,)


def test_a_text_that_is_something_else_is_let_go() -> None:
    pointer = after([1] * (MAX_GUESSES + 1))
    assert pointer.propose(4) == ()
    assert not pointer.is_sure


tokens = st.binary(max_size=30).map(lambda data: tuple(byte % 4 for byte in data))


@given(output=tokens, prediction=tokens, cuts=st.binary(max_size=4))
def test_the_place_depends_on_the_output_alone(
    output: tuple[int, ...], prediction: tuple[int, ...], cuts: bytes
) -> None:
    pointer = PredictionPointer(prediction)
    for cut in sorted(byte % (len(output) + 1) for byte in cuts):
        pointer.catch_up(output[:cut])
    pointer.catch_up(output)
    whole = after(list(output), prediction)
    assert (pointer.propose(9), pointer.is_sure) == (whole.propose(9), whole.is_sure)
