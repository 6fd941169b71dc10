"""Service-level objectives: which answers are good, and whether enough of them were."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.answer import Answer

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Upper limits in milliseconds by metric (names as in vLLM's `--goodput`); empty: every whole answer is good."""

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Read "ttft:500 tpot:60 e2el:8000". Raises ValueError."""
        limits = []
        for part in text.split():
            name, _, limit = part.partition(":")
            if name not in METRICS:
                raise ValueError(f"{part!r}: an objective is one of {', '.join(METRICS)}, a colon, milliseconds")
            limits.append((name, float(limit)))
        return cls(limits=tuple(limits))

    def are_met(self, answer: Answer) -> bool:
        """Whether the answer is within every limit. A metric that it does not have (one token) cannot be missed."""
        values = {"ttft": answer.ttft_ms, "tpot": answer.tpot_ms, "e2el": answer.e2e_ms}
        return all((values[name] or 0.0) <= limit for name, limit in self.limits)
