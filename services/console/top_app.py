"""The Textual side of `seqmtp top`: what it shows is computed in `reading.py`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping

from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Digits, Footer, Header, RichLog, Sparkline, Static

from seqmtp_serve.errors import SeqMTPError
from services.console.api import Api
from services.console.reading import ROLES, Figures, Reading, figures, news, short

WINDOW = 10  # looks that the numbers are made of
TREND = 60
BAR = 24  # cells


class TopApp(App[None]):
    """Looks every `interval_s`; a service that does not answer is said, and looked for again."""

    TITLE = "seqmtp top"
    BINDINGS = [("q", "quit", "Quit"), ("d", "toggle_dark", "Light or dark")]  # noqa: RUF012  (Textual's own form)
    CSS = """
    #numbers { height: 6; }
    #numbers Vertical { width: 1fr; padding: 0 1; }
    #numbers Static { color: $text-muted; }
    Sparkline { height: 3; margin: 0 1 1 1; }
    #parts { height: auto; max-height: 12; margin: 0 1 1 1; }
    #parts Static { width: 1fr; }
    DataTable { height: auto; max-height: 12; margin: 0 1 1 1; }
    RichLog { height: 1fr; min-height: 4; margin: 0 1; }
    """

    def __init__(self, api: Api, interval_s: float) -> None:
        super().__init__()
        self._api, self._interval_s = api, interval_s
        self._looks: deque[tuple[float, Reading]] = deque(maxlen=WINDOW + 1)
        self._rates: deque[float] = deque([0.0] * TREND, maxlen=TREND)
        self._away = False

    def compose(self) -> ComposeResult:
        yield Header()
        with Horizontal(id="numbers"):
            for name, title in (("er", "E[R]"), ("tps", "tokens/s"), ("running", "running"), ("waiting", "waiting")):
                with Vertical():
                    yield Static(title, markup=False)  # E[R] has brackets
                    yield Digits("–", id=name)
        yield Sparkline(list(self._rates), id="trend")
        with Horizontal(id="parts"):
            yield Static(id="positions")
            yield Static(id="costs")
        yield DataTable(id="workers", cursor_type="none")
        yield RichLog(id="events", markup=False, max_lines=200)
        yield Footer()

    async def on_mount(self) -> None:
        self.sub_title = self._api.url
        self.query_one("#workers", DataTable).add_columns("worker", "id", "state")
        self.set_interval(self._interval_s, self.look)
        await self.look()

    async def look(self) -> None:
        """One look at the service, and what it changes on the screen."""
        try:
            reading = await asyncio.to_thread(self._api.get, "/board", 5.0)
        except SeqMTPError as error:
            if not self._away:
                self.tell(str(error))
            self._away = True
            return
        if self._away:
            self.tell("the service answers again")
        self._away = False
        now, before = time.monotonic(), self._looks[-1] if self._looks else None
        self._looks.append((now, reading))
        began, oldest = self._looks[0]
        self.show(figures(oldest, reading, now - began), figures(None, reading, 0.0), reading)
        if before is not None:
            self._rates.append(figures(before[1], reading, now - before[0]).tokens_per_s)
            for text in news(before[1], reading):
                self.tell(text)
        self.query_one("#trend", Sparkline).data = list(self._rates)

    def show(self, recent: Figures, ever: Figures, reading: Reading) -> None:
        """Write the numbers."""
        expected = recent.expected_progress
        self.query_one("#er", Digits).update("–" if expected is None else f"{expected:.2f}")
        self.query_one("#tps", Digits).update(f"{recent.tokens_per_s:.1f}")
        self.query_one("#running", Digits).update(str(recent.running))
        self.query_one("#waiting", Digits).update(str(recent.waiting))
        rows = [f"{number}  {bar(rate)} {100 * rate:3.0f} %" for number, rate in enumerate(ever.acceptance, 1)]
        self.query_one("#positions", Static).update("\n".join(["accepted by position", *(rows or ["no drafts yet"])]))
        self.query_one("#costs", Static).update("\n".join(["cost of rounds", *costs(recent.cost_ms)]))
        table = self.query_one("#workers", DataTable)
        table.clear()
        for worker in reading["workers"]:
            table.add_row(ROLES.get(worker["kind"], worker["kind"]), short(worker["id"]), "here")

    def tell(self, text: str) -> None:
        """One line among what happened."""
        self.query_one("#events", RichLog).write(f"{time.strftime('%H:%M:%S')}  {text}")

    def action_toggle_dark(self) -> None:
        """The other theme."""
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"


def bar(share: float) -> str:
    """A share of one as cells."""
    full = round(BAR * min(max(share, 0.0), 1.0))
    return "█" * full + "░" * (BAR - full)


def costs(cost_ms: Mapping[str, float]) -> list[str]:
    """Each part's share of the time that rounds took."""
    total = sum(cost_ms.values())
    if total <= 0:
        return ["no rounds in this while"]
    return [f"{part:<7}{bar(value / total)} {100 * value / total:3.0f} %" for part, value in cost_ms.items() if value]
