"""The parts of `seqmtp bench all`, and how long each may take. Pure.

A part's share is by its weight beside those of the parts to come, of the time that is left as it begins: what one
leaves is for those after it, and they pay for one that overruns. The short parts come first and may take more than
their share; the long ones are told theirs, and measure each cell less often on a slow machine. Only the last may take
all that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seqmtp_serve.checkpoint.locate import CODE_MODEL
from seqmtp_serve.errors import InvalidField

TOLD = 0.85  # of its share, for a part that is told: its last turn may be a slow one, and its services have to stop
CEILING = 2.0  # a part that is not told is ended where its share would end if its weight were so many times as large


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of bench as `seqmtp bench ARGV`, and how long it is expected to take beside the others.

    One whose `argv` has a word SECONDS is told how long it may take.
    """

    name: str
    argv: tuple[str, ...]
    weight: float

    @property
    def is_told(self) -> bool:
        return "SECONDS" in self.argv

    def limit_s(self, left_s: float, to_come: Sequence[Part]) -> float:
        """How long it may take, if so much time is left for it and the parts `to_come`."""
        weight = self.weight if self.is_told else CEILING * self.weight
        return max(0.0, left_s) * weight / (weight + sum(part.weight for part in to_come))

    def words(self, limit_s: float) -> tuple[str, ...]:
        """Its `argv`, if it may take so long."""
        seconds = str(max(1, int(TOLD * limit_s)))
        return tuple(seconds if word == "SECONDS" else word for word in self.argv)


# name, weight (about the hundredths that it takes on a slow machine), arguments, arguments for a quick look
_PARTS: tuple[tuple[str, float, str, str], ...] = (
    (
        "engine",
        6,
        "engine MODEL --rows 1,8 --depths 0,1,3 --repeats 3 --steps 12",
        "engine MODEL --rows 1 --depths 0,1,3 --repeats 1 --steps 2",
    ),
    (
        "engine-v3-tiny",
        3,
        f"engine {CODE_MODEL} --rows 1,8 --depths 0,1,3 --repeats 3 --steps 24",
        f"engine {CODE_MODEL} --rows 1 --depths 0,1 --repeats 1 --steps 2",
    ),
    (
        "prefix",
        7,
        "prefix MODEL --words 100,400,1000 --repeats 3",
        "prefix MODEL --words 100 --repeats 1 --max-tokens 8",
    ),
    (
        "hidden",
        10,
        "hidden MODEL --num-prompts 12",
        "hidden MODEL --windows 0,32 --dtypes fp32,int8 --num-prompts 2 --prompt-chars 600 --max-tokens 8",
    ),
    (
        "scale",
        6,
        "scale MODEL --streams 64,256,1000",
        "scale MODEL --streams 8 --batch 8 --max-tokens 8 --step-ms 5",
    ),
    (
        "proposers",
        28,
        "proposers MODEL --num-prompts 8 --prompts-a-stream 1 --max-tokens 64 --repeats 2 --depths 0,1,2 "
        "--concurrency 1,4 --seconds SECONDS",
        "proposers MODEL --num-prompts 1 --max-tokens 8 --repeats 1 --depths 0,1 --concurrency 1",
    ),
    (
        "speculation",
        40,
        "speculation MODEL --depths 0,1,2,3,auto --kinds chat,predictable,random --concurrency 1,4,16 "
        "--prompts-a-stream 2 --max-tokens 48 --repeats 2 --seconds SECONDS",
        "speculation MODEL --depths 0,1,auto --kinds chat,random --concurrency 1,4 --num-prompts 4 --max-tokens 4 "
        "--repeats 1",
    ),
)


def parts_of(model: str, *, quick: bool, only: Sequence[str] | None) -> list[Part]:
    """The parts to run, in their order. Raises InvalidField for a name that is none."""
    names = [name for name, *_ in _PARTS]
    if unknown := [name for name in only or () if name not in names]:
        raise InvalidField(f"{unknown[0]!r} is no part; there are {', '.join(names)}", param="only")
    return [
        Part(name=name, argv=tuple(model if word == "MODEL" else word for word in words.split()), weight=weight)
        for name, weight, long, short in _PARTS
        if only is None or name in only
        for words in [short if quick else long]
    ]
