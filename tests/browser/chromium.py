"""A real Chromium, or a skip that says there is none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def executable(managed: str) -> str:
    """The path of a Chromium: the system's, or the one playwright installed. Skips the test when there is neither."""
    found = next(filter(None, map(shutil.which, NAMES)), None) or (managed if Path(managed).is_file() else None)
    return found or pytest.skip("no Chromium here: the page's tests need one (apt install chromium)")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """One browser process while the block runs."""
    async with async_playwright() as driver:
        path = executable(driver.chromium.executable_path)
        browser = await driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(
    browser: Browser, url: str, *, width: int = 1400, height: int = 900, theme: str = "light"
) -> AsyncIterator[Page]:
    """The page at `url`, in a context of its own. Any script error or complaint on its console fails the test."""
    scheme = "dark" if theme == "dark" else "light"
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    complaints: list[str] = []
    page = await context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    try:
        await page.goto(url)
        yield page
    finally:
        await context.close()
    assert [text for text in complaints if "Failed to load resource" not in text] == []
