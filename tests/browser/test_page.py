"""The page in a real Chromium over a scripted service: chat, origins, the race, stop, resume, a lost proposer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal

import pytest
import pytest_asyncio

pytest.importorskip("playwright.async_api", reason="playwright is not installed: pip install -e '.[dev]'")
from playwright.async_api import Browser, Page, expect

from seqmtp_serve.checkpoint.locate import CODE_MODEL
from seqmtp_serve.frontier.round_notes import RoundNote
from services.settings import GatewaySettings, Settings
from tests.browser.chromium import chromium, opened
from tests.browser.cut import cutting
from tests.browser.scripted import TEXT, WORKERS, ScriptedService
from tests.services.gateway.live import serving, until
from tests.services.gateway.world import TEXT as MODEL_TEXT

expect.set_options(timeout=20_000)  # a bound, not a pace: machines that run tests are busy
SHORT = "A paper clip holds paper. It also mends a zip."
BACKGROUNDS = {"light": "rgb(250, 250, 247)", "dark": "rgb(18, 20, 24)"}


pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser, and so one event loop, for all of them


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


async def ask(page: Page, text: str = "What is a paper clip for?") -> None:
    await page.fill("#prompt", text)
    await page.keyboard.press("Enter")


async def background(page: Page) -> str:
    colour: str = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


async def answered(page: Page) -> None:
    await page.wait_for_selector(".message.assistant:last-of-type .race-button")


async def test_an_answer_shows_origins_rounds_and_what_speculation_saved(browser: Browser) -> None:
    service = ScriptedService(delay_s=0.01, text=SHORT)
    async with serving(service) as url, opened(browser, url) as page:
        await ask(page)
        await answered(page)
        answer = page.locator(".message.assistant")
        assert await answer.locator(".text").inner_text() == SHORT
        rows = list(service._rows(service.requests[0]))
        assert await answer.locator(".round").count() == len(rows) - 1
        for origin in "acnb":
            shown = await answer.locator(f".token.{origin}").count()
            tokens = sum(row.origins.count(origin) for row in rows)
            assert shown == tokens - (rows[-1].origins[-1] == origin), origin  # the end token shows no text
        accepted, rounds = sum(row.accepted for row in rows), sum(row.drafted > 0 for row in rows)
        assert f"{1 + accepted / rounds:.2f}" in await answer.locator(".facts").inner_text()
        assert f"{len(rows) - 1} rounds" in (await answer.locator(".rounds").get_attribute("aria-label") or "")
        assert await page.locator("#board-ledger .bar").count() == min(48, len(rows) - 1)

        drafted = answer.locator(".token.a").first
        tint = "element => getComputedStyle(element).backgroundColor"
        assert await drafted.evaluate(tint) != "rgba(0, 0, 0, 0)"
        key = page.get_by_role("list", name="Colours of tokens")
        await expect(key).to_be_visible()
        shown, meant = [await place.evaluate(tint) for place in (answer.locator(".token.c").first, key.locator(".c"))]
        assert shown == meant
        await page.keyboard.press("Alt+O")
        await expect(key).to_be_hidden()
        assert await drafted.evaluate(tint) == "rgba(0, 0, 0, 0)"

        service.delay_s = 0.05  # a round; there are fewer with drafts
        await page.click(".race-button")
        verdict = answer.locator(".verdict")
        await expect(verdict).to_contain_text("Equal text")
        await expect(verdict).to_contain_text("s saved")
        first, drafts, plain = service.requests
        assert first.params.seed == drafts.params.seed == plain.params.seed
        assert first.prompt_ids == drafts.prompt_ids == plain.prompt_ids
        assert (drafts.params.max_depth, plain.params.max_depth) == (3, 0)


async def test_the_ledger_of_an_answer_says_why_each_round_had_its_depth(browser: Browser) -> None:
    service = ScriptedService(text=SHORT)
    service.notes = [RoundNote(version=2, depth=3, reason="static")]
    async with serving(service) as url, opened(browser, url, width=360) as page:
        await ask(page)
        await answered(page)
        button = page.get_by_role("button", name="Ledger")
        await button.click()
        table = page.get_by_role("region", name="Ledger of this answer").get_by_role("table")
        rounds = len(list(service._rows(service.requests[0]))) - 1
        await expect(table.locator("tr")).to_have_count(rounds + 1)
        assert await table.locator("tr").nth(1).locator("td").all_inner_texts() == [
            "1",
            "3",
            "3",
            "2",
            "3",
            "–",
            "as many as allowed",
        ]
        assert (await table.locator("tr").nth(2).locator("td").all_inner_texts())[-1] == "not kept"
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await expect(button).to_have_attribute("aria-expanded", "true")
        await button.click()
        await expect(table).to_have_count(0)


async def test_the_page_says_what_a_model_is_that_came_with_the_service(browser: Browser) -> None:
    text = replace(MODEL_TEXT, root=CODE_MODEL)
    async with serving(ScriptedService(), text=text) as url, opened(browser, url) as page:
        await expect(page.locator("#about")).to_contain_text("it continues Python code, it does not chat")
    async with serving(ScriptedService()) as url, opened(browser, url) as page:
        await expect(page.locator("#service")).to_have_attribute("data-state", "ready")
        await expect(page.locator("#about")).to_be_hidden()


async def test_a_slower_run_and_another_text_are_said_as_they_are(browser: Browser) -> None:
    async with serving(ScriptedService()) as url, opened(browser, url) as page:
        judged = await page.evaluate(
            """async () => {
                const { judge } = await import("/ui/answer.js");
                const run = (text, seconds) => ({ text, seconds, tokens: 3 });
                return [judge(run("abc", 2), run("abc", 1)), judge(run("abc", 1), run("abd", 2))];
            }"""
        )
    assert judged[0]["equal"]
    assert "1.00 s lost" in judged[0]["text"]
    assert not judged[1]["equal"]
    assert "differ from character 3" in judged[1]["text"]


async def test_stop_ends_the_generation_and_the_chat_goes_on(browser: Browser) -> None:
    service = ScriptedService(delay_s=0.2)
    async with serving(service) as url, opened(browser, url) as page:
        await ask(page)
        await page.wait_for_selector(".message .token.a")
        await page.keyboard.press("Escape")
        await expect(page.locator(".notes")).to_have_text("stopped")
        await until(lambda: service.cancelled == {service.requests[0].request_id})
        said = await page.locator(".message.assistant .text").inner_text()
        assert said != ""
        assert TEXT.startswith(said)
        await ask(page, "And then?")
        await until(lambda: len(service.requests) == 2)
        history = service.tokenizer.decode(list(service.requests[1].prompt_ids), skip_special_tokens=False)
        assert said in history


async def test_a_cut_connection_is_resumed_without_a_lost_or_repeated_token(browser: Browser) -> None:
    service = ScriptedService(delay_s=0.03)
    async with serving(service) as url, cutting(url) as (outside, cut), opened(browser, outside) as page:
        await ask(page)
        for number in (4, 12, 30):
            await until(lambda number=number: service.num_rounds >= number, 20)
            cut.now()
        await until(lambda: len(service.requests) >= 4, 20)  # read anew after each cut
        service.delay_s = 0.0
        await answered(page)
        assert await page.locator(".message.assistant .text").inner_text() == TEXT
        await expect(page.locator(".notes")).to_contain_text("resumed where it was cut")
        assert len({request.request_id for request in service.requests}) == 1


async def test_a_killed_proposer_shows_while_the_text_goes_on(browser: Browser) -> None:
    service = ScriptedService(delay_s=0.2)  # the whole text would take half a minute
    async with serving(service) as url, opened(browser, url) as page:
        await ask(page)
        await page.wait_for_selector(".message .token.a")
        await expect(page.locator("#board-workers li")).to_have_count(len(WORKERS))
        for name in WORKERS[1:3]:
            service.kill(name)
        events = page.locator("#board-events")
        await expect(events).to_contain_text("proposer 3fa2d4 left")
        await expect(events).to_contain_text("no drafts: plain decoding goes on")
        await expect(page.locator("#board-workers li.away")).to_have_count(2)
        await expect(page.locator("#service")).to_have_attribute("data-state", "plain")
        service.delay_s = 0.0
        await answered(page)
        assert await page.locator(".message.assistant .text").inner_text() == TEXT
        assert await page.locator(".round").last.locator("i").count() == 1


async def test_a_lost_target_is_not_said_to_go_on_without_drafts(browser: Browser) -> None:
    async with serving(ScriptedService()) as url, opened(browser, url) as page:
        told = await page.evaluate(
            """async () => {
                const { news } = await import("/ui/reading.js");
                const look = (target, mtp, replays) => ({
                    workers: [],
                    coordinators: [
                        { target: { ready: target }, mtp: { ready: mtp }, store: { ready: true }, totals: { replays } },
                    ],
                });
                const looks = [look(true, true, 0), look(false, false, 1), look(true, false, 1), look(true, true, 1)];
                return looks.slice(1).map((one, index) => news(looks[index], one).map((event) => event.text));
            }"""
        )
    assert told == [
        ["no target group: requests wait", "1 request is replayed from committed rows"],
        ["no drafts: plain decoding goes on", "target passes are back"],
        ["drafts are back"],
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
async def test_nothing_overflows_in_either_theme(browser: Browser, theme: str, width: int) -> None:
    async with (
        serving(ScriptedService(text=SHORT + " " + "x" * 120)) as url,
        opened(browser, url, width=width, theme=theme) as page,
    ):
        assert await background(page) == BACKGROUNDS[theme]
        await ask(page, "y" * 200)
        await answered(page)
        for _ in range(2):
            assert await page.evaluate("document.documentElement.scrollWidth") == width
            inner = "[...document.querySelectorAll('main, #log, #ask, #board')].map(e => e.scrollWidth - e.clientWidth)"
            assert max(await page.evaluate(inner)) <= 0
            await page.keyboard.press("Alt+B")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_words_can_be_read_on_what_is_behind_them(browser: Browser, theme: str) -> None:
    """WCAG 2.2's contrast of 4.5 to 1 for each colour of words on each colour behind them."""
    async with serving(ScriptedService()) as url, opened(browser, url, theme=theme) as page:
        colours = await page.evaluate(
            """() => {
                const spot = document.body.appendChild(document.createElement("i"));
                const channels = (name) => {
                    spot.style.color = `var(--${name})`;
                    return getComputedStyle(spot).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
                };
                const pairs = [];
                for (const words of ["ink", "soft", "good", "weak", "bad"])
                    for (const behind of ["page", "card"]) pairs.push([words, behind]);
                for (const origin of ["drafted", "predicted", "corrected", "bonus", "first"])
                    pairs.push(["ink", `${origin}-bg`]);
                return pairs.map(([words, behind]) => [words, behind, channels(words), channels(behind)]);
            }"""
        )
    found = {f"{words} on {behind}": contrast(one, other) for words, behind, one, other in colours}
    assert {pair: value for pair, value in found.items() if value < 4.5} == {}


def contrast(one: list[float], other: list[float]) -> float:
    """Of two colours in sRGB: the ratio of their luminances, the lighter first."""

    def luminance(channels: list[float]) -> float:
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


async def test_the_theme_follows_the_system_until_somebody_chooses(browser: Browser) -> None:
    async with serving(ScriptedService(text=SHORT)) as url, opened(browser, url, theme="dark") as page:

        async def system(theme: Literal["light", "dark"]) -> str:
            await page.emulate_media(color_scheme=theme)
            return await background(page)

        assert [await system("light"), await system("dark")] == [BACKGROUNDS["light"], BACKGROUNDS["dark"]]
        await page.click("#theme")
        assert await background(page) == BACKGROUNDS["light"]
        assert [await system("light"), await system("dark")] == [BACKGROUNDS["light"]] * 2
        await page.reload()
        assert await background(page) == BACKGROUNDS["light"]
        await page.click("#theme")  # what the system says anyway: it is followed again
        assert [await system("light"), await system("dark")] == [BACKGROUNDS["light"], BACKGROUNDS["dark"]]


async def test_the_page_works_by_keyboard_and_says_its_names(browser: Browser) -> None:
    async with serving(ScriptedService(text=SHORT)) as url, opened(browser, url) as page:
        await expect(page.locator("#prompt")).to_be_focused()
        await page.keyboard.type("hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#announce")).to_contain_text("Answer finished")
        nameless = await page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, [role=img]")]
                .filter((one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel)
                .map((one) => one.id)"""
        )
        assert nameless == []
        await answered(page)
        await page.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(20):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        controls = (
            "fresh show-board theme log race-button ledger-button prompt send depth temperature seed budget colours"
        )
        assert reached >= {"skip", *controls.split()}
        await page.keyboard.press("Alt+B")
        await expect(page.locator("#board")).to_be_hidden()
        await expect(page.get_by_role("button", name="Board")).to_have_attribute("aria-expanded", "false")
        await page.keyboard.press("Alt+N")
        await expect(page.locator("#welcome")).to_be_visible()
        await expect(page.locator("#prompt")).to_be_focused()


async def test_a_key_is_asked_for_and_a_refusal_leaves_the_question(browser: Browser) -> None:
    settings = Settings(gateway=GatewaySettings(api_key="s3cret"))
    async with serving(ScriptedService(text=SHORT), settings) as url, opened(browser, url) as page:
        await ask(page, "hello")
        await expect(page.get_by_role("alert")).to_contain_text("API key")
        await expect(page.locator("#prompt")).to_have_value("hello")
        await page.fill("#key", "s3cret")
        await page.click("#send")
        await answered(page)
