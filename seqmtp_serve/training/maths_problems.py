"""Word problems with names, things and numbers drawn at random, for the prompt grid."""

from __future__ import annotations

import random

from seqmtp_serve.training.word_lists import word_lists

_PERCENTAGES = (5, 10, 15, 20, 25, 30, 40, 50, 60, 75)
_ROUND_NUMBERS = (100, 150, 200, 250, 300, 360, 480, 500, 750, 1000, 1200)


def maths_problem(rng: random.Random) -> str:
    """One problem; the numbers are not checked to make sense, the target answers what it answers."""
    words = word_lists("maths")
    n, m, o = rng.sample(words["names"], 3)
    t, u = rng.sample(words["things"], 2)
    small = {key: rng.randint(2, 20) for key in "abcd"}
    return rng.choice(words["problems"]).format(
        n=n,
        m=m,
        o=o,
        t=t,
        u=u,
        p=rng.choice(words["places"]),
        job=rng.choice(words["jobs"]),
        an=rng.choice(words["animals"]),
        pc=rng.choice(_PERCENTAGES),
        A=rng.randint(20, 120),
        B=rng.randint(20, 80),
        H=rng.choice(_ROUND_NUMBERS),
        **small,
    )
