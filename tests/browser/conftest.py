"""A real Chromium (Debian's), driven by Playwright; `make test` installs it, and without it the tests fail."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

expect.set_options(timeout=300_000)  # Playwright's 5 s are too few for a browser on two cores that others use, too


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One browser for a module's tests; each opens contexts of its own."""
    path = shutil.which("chromium")
    assert path is not None, "Chromium is missing. Try: sudo apt-get install chromium"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with it
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        await browser.close()


@asynccontextmanager
async def open_page(browser: Browser, address: str, **options: object) -> AsyncIterator[Page]:
    """A tab on this address; what the console or a script complains of fails the test at the end."""
    context = await browser.new_context(**options)  # type: ignore[arg-type]  # Playwright's own keywords
    context.set_default_timeout(300_000)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    await page.goto(address)
    yield page
    await context.close()
    assert not complaints
