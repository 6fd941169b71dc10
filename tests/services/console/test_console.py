"""The terminal commands against a scripted service: chat, complete, top, timeline, collect-env."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seqmtp_serve.errors import InvalidField, Unavailable
from services.cli import COMMANDS, main
from services.console import timeline
from services.console.api import Api
from services.console.reading import figures, news
from services.console.timeline import rows_of, starts
from services.console.timeline_picture import draw
from services.console.top_app import TopApp
from tests.browser.cut import cutting
from tests.browser.scripted import TEXT, WORKERS, ScriptedService
from tests.services.gateway.live import serving, until

SHORT = "A paper clip holds paper."


async def command(*words: str) -> int:
    """Run `seqmtp WORDS` beside the service's event loop; its exit code."""

    def run() -> int:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return await asyncio.to_thread(run)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))


async def test_chat_keeps_the_conversation_and_obeys_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ScriptedService(text=SHORT)
    typed(monkeypatch, "hello", "/seed 7", "/depth 0", "again", "/new", "third", "/quit", "never")
    async with serving(service) as url:
        assert await command("chat", "--url", url, "--system", "Be brief.", "--temperature", "0.5") == 0
    printed = capsys.readouterr().out
    assert printed.count(SHORT) == 3
    assert "E[R]" in printed
    first, second, third = service.requests
    assert (first.params.temperature, first.params.max_depth, first.params.seeded) == (0.5, 3, False)
    assert (second.params.seed, second.params.max_depth) == (7, 0)
    prompts = [
        service.tokenizer.decode(list(one.prompt_ids), skip_special_tokens=False) for one in (first, second, third)
    ]
    assert all("Be brief." in prompt for prompt in prompts)
    assert [SHORT in prompt for prompt in prompts] == [False, True, False]


async def test_json_answers_hold_the_rows_that_a_timeline_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    typed(monkeypatch, "hello")
    async with serving(ScriptedService(text=SHORT)) as url:
        assert await command("chat", "--url", url, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert await command("complete", "A", "--url", url, "--json", "--seed", "3") == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer["text"] == SHORT
    drafted = [row for row in answer["rows"] if row["drafted"]]
    assert answer["expected_progress"] == 1 + sum(row["accepted"] for row in drafted) / len(drafted)
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    assert await command("timeline", str(tmp_path / "answer.json"), "-o", str(tmp_path / "rounds.svg")) == 0
    picture = ElementTree.fromstring((tmp_path / "rounds.svg").read_text())
    assert picture.tag.endswith("svg")
    assert [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")].count("target") == 1


async def test_complete_prints_the_text_and_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ScriptedService(text=SHORT)
    typed(monkeypatch, "Once")
    async with serving(service) as url:
        assert await command("complete", "--url", url) == 0
    assert capsys.readouterr().out == f"{SHORT}\n"
    assert "Once" in service.tokenizer.decode(list(service.requests[0].prompt_ids))


async def test_a_service_that_is_away_or_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("complete", "A", "--url", "http://127.0.0.1:9") == 1
    assert "No service answers at http://127.0.0.1:9" in capsys.readouterr().err
    async with serving(ScriptedService()) as url:
        assert await command("complete", "A", "--url", url, "--temperature", "9") == 2
    assert "temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [("127.0.0.1:9", 1, "No service answers at http://127.0.0.1:9"), ("http://a b", 2, "is no address of a service")],
)
async def test_an_address_may_lack_its_scheme_and_a_wrong_one_is_one_line(
    url: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("complete", "A", "--url", url) == code
    assert words in capsys.readouterr().err


async def test_a_cut_stream_is_taken_up_again() -> None:
    service = ScriptedService(delay_s=0.01)

    def read(url: str) -> str:
        chunks = Api(url).stream("/v1/completions", {"prompt": "A", "max_tokens": 400})
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    async with serving(service) as url, cutting(url) as (outside, cut):
        reading = asyncio.create_task(asyncio.to_thread(read, outside))
        for number in (3, 9):
            await until(lambda number=number: service.num_rounds >= number)
            cut.now()
        assert await reading == TEXT
    assert len(service.requests) >= 3


def test_an_api_error_names_whose_fault_it_is() -> None:
    with pytest.raises(Unavailable):
        Api("http://127.0.0.1:9").get("/board")


async def test_top_shows_what_happens_and_who_leaves() -> None:
    service = ScriptedService(text=SHORT)
    async with serving(service) as url:
        app = TopApp(Api(url), interval_s=60)  # looks are asked for below
        async with app.run_test(size=(110, 44)) as pilot:
            await until(lambda: app._looks)  # the one that numbers are differences from
            await asyncio.to_thread(Api(url).post, "/v1/completions", {"prompt": "A"})
            await asyncio.sleep(0.3)  # longer than a reading of the coordinators is shared
            service.kill(WORKERS[1])
            await app.look()
            await pilot.pause()
            shown = _text_of(app)
            assert app.query_one("#er").value != "–"
            titles = [str(title.render()) for title in app.query("#numbers Static")]
            assert titles == ["E[R]", "tokens/s", "running", "waiting"]
            assert "accepted by position" in shown
            assert "proposer 3fa2d4 left" in shown
            assert app.query_one("#workers").row_count == len(WORKERS) - 1


def _text_of(app: TopApp) -> str:
    lines = [str(app.query_one(f"#{name}").render()) for name in ("positions", "costs")]
    return "\n".join([*lines, *(line.text for line in app.query_one("#events").lines)])


async def test_top_prints_one_reading_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(ScriptedService()) as url:
        assert await command("top", "--url", url, "--json", "--interval", "0") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "scripted"
    assert [worker["id"] for worker in found["workers"]] == list(WORKERS)


def look(
    *totals: tuple[str, int, int, int], workers: Sequence[str] = (), mtp: bool = True, target: bool = True
) -> dict[str, Any]:
    """A reading: (coordinator, tokens, rounds, accepted of as many drafts at one position)."""
    side = {"ready": True, "detail": ""}
    return {
        "model": "m",
        "workers": [{"id": name, "kind": name.split("-")[0]} for name in workers],
        "coordinators": [
            {
                "id": name,
                "running": 1,
                "waiting": 0,
                "target": {"ready": target, "detail": ""},
                "mtp": {"ready": mtp, "detail": ""},
                "store": side,
                "totals": {
                    "tokens": tokens,
                    "rounds": rounds,
                    "accepted": accepted,
                    "drafted": rounds,
                    "positions": [{"drafted": rounds, "accepted": accepted}],
                    "cost_ms": {"main": 10.0 * rounds},
                },
            }
            for name, tokens, rounds, accepted in totals
        ],
    }


def test_figures_are_differences_of_each_coordinator_by_itself() -> None:
    before, after = look(("a", 100, 50, 25), ("gone", 9, 9, 9)), look(("a", 130, 60, 33), ("new", 8, 4, 2))
    found = figures(before, after, 2.0)
    assert (found.tokens, found.tokens_per_s) == (38, 19.0)
    assert found.expected_progress == 1 + (8 + 2) / (10 + 4)
    assert found.acceptance == (10 / 14,)
    assert found.cost_ms == {"main": 140.0}
    assert figures(after, after, 1.0).expected_progress is None


def test_news_are_who_came_who_left_and_what_stopped() -> None:
    before = look(("a", 0, 0, 0), workers=("target-1", "proposer-2"))
    after = look(("a", 0, 0, 0), workers=("target-1", "proposer-3"), mtp=False)
    assert list(news(before, after)) == ["proposer 2 left", "proposer 3 is here", "no drafts: plain decoding goes on"]
    assert list(news(None, after)) == []
    dark = look(("a", 0, 0, 0), workers=("target-1", "proposer-2"), mtp=False, target=False)
    assert list(news(before, dark)) == ["no target group: requests wait"]
    assert list(news(dark, after))[-2:] == ["no drafts: plain decoding goes on", "target passes are back"]


ROW = {"version": 2, "tokens": [1, 2], "origins": "ac", "pieces": ["a", "b"], "drafted": 3, "accepted": 1}
TIMED = ROW | {"timings_ms": {"step": 10.0, "forward": 6.0, "draft_wait": 1.0, "select": 1.0, "pack": 1.0, "mtp": 3.0}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TIMED),
        json.dumps([TIMED]),
        json.dumps({"rows": [TIMED]}),
        f"id: x:1\ndata: {json.dumps({'id': 'x', 'seqmtp': TIMED})}\n\ndata: [DONE]\n",
        json.dumps({"rows": [TIMED]}) + "\n",
    ],
)
def test_rows_are_found_in_every_form_they_are_saved_in(text: str) -> None:
    assert list(rows_of(text)) == [TIMED]


def test_a_picture_has_every_measured_part_at_its_width() -> None:
    picture = draw([TIMED, TIMED], starts([TIMED, TIMED]))
    bars = list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"))
    titled = [(bar.findtext("{http://www.w3.org/2000/svg}title") or "", float(bar.get("width", 0))) for bar in bars]
    passes = [width for title, width in titled if title == "forward: 6.0 ms"]
    assert passes == [pytest.approx(6 / 20 * 1080, abs=0.1)] * 2
    assert sum(title == "3 drafts: 3.0 ms" for title, _ in titled) == 2
    unused = [bar for bar in bars if bar.get("fill") == "none"]
    assert len(unused) == 2  # one of three drafts was not even reached, in each round


def test_a_trace_without_timings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    parser = argparse.ArgumentParser()
    timeline.add_arguments(parser)
    with pytest.raises(InvalidField, match="no rows with timings"):
        timeline.run(parser.parse_args([str(tmp_path / "rows.json")]))


async def test_collect_env_says_versions_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    assert await command("collect-env", "--json") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["packages"]["torch"] != "not installed"
    assert "hunter2" not in printed


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"collect-env"}))
async def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(name, "--help") == 0
    assert f"seqmtp {name}" in capsys.readouterr().out.split("examples:")[1]


async def test_a_timeline_of_a_mistyped_file_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("timeline", "answr.json") == await command("timeline", "answr") == 2
    assert capsys.readouterr().err.count("There is no file 'answr") == 2
