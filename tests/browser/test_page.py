"""The observer's page in a real browser, on views made up here."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import ClientSession, web
from playwright.async_api import Browser, expect

from services.core.http.page_files import load_files
from services.core.security.bearer import Tokens, read_tokens
from services.observer import page as page_module
from services.observer.explain import Explanation, Missing
from services.observer.http import serve_api
from services.observer.ledger_api import format_minute, read_minute
from services.observer.page import add_page
from services.observer.view import View
from tests.browser.conftest import open_page
from tests.browser.views import HOSTILE, NOW_MIN, make_story, make_view
from tests.support.ports import free_port

FILES = load_files("services.observer.page")
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Observer:
    """What stands behind the page: `view` may be exchanged, and the server stopped and started again on its port."""

    def __init__(self) -> None:
        self.view: View = make_view()
        self.slow_minute: int | None = None
        self.may_answer = asyncio.Event()
        """The explanation of the slow minute waits for it."""
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}/"

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        add_page(app, FILES, lambda: self.view, interval=0.5)
        app.router.add_get("/v1/pipes/{pipe}/loss/{minute}/explain", self._explain)
        app.router.add_get("/v1/events/{id}", self._tell)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield self.address
        finally:
            await runner.cleanup()

    async def _explain(self, request: web.Request) -> web.Response:
        minute = read_minute(request.match_info["minute"])
        if minute == self.slow_minute:
            await self.may_answer.wait()
        one = Missing(f"ab:0:{minute}", "transform", None, "ingest", "event-7", "orders", 0, "41")
        found = Explanation("orders", minute, 1_500, (one,), 60_000, complete=True)
        return web.json_response(msgspec.to_builtins(found))

    async def _tell(self, request: web.Request) -> web.Response:
        story = make_story(request.match_info["id"], is_known="since" not in request.query)
        return web.json_response(msgspec.to_builtins(story))


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)], ids=["light", "dark", "narrow"]
)
async def test_everything_is_shown(
    chromium: Browser, observer: Observer, scheme: str, width: int, tmp_path: Path
) -> None:
    """If this fails, a person at three in the morning sees an empty or broken page. The screenshots are for looking at."""
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 1600}}
    async with observer.serve() as address, open_page(chromium, address, **options) as page:
        loss = page.get_by_role("table", name="Loss of orders by minute")
        await expect(loss.get_by_role("button", name="1,500 (2.50 %)")).to_be_visible()
        for text in (
            "1,200 (2.00 %)",
            "540 behind",
            "77 unknown",
            "2.00 % (behind)",
        ):  # of one minute, each judged by itself
            await expect(loss.get_by_role("row").filter(has_text="77 unknown")).to_contain_text(text)
        await expect(page.get_by_role("listitem").filter(has_text="were lost at transform")).to_be_visible()
        destinations = page.get_by_role("table", name="Destinations of orders")
        await expect(destinations.get_by_role("row", name="crm-of-a-customer")).to_contain_text("open")
        await expect(destinations).to_contain_text("503 Service Unavailable · 12,210")
        await expect(page.get_by_role("img", name="Lag end to end over 40 minutes")).to_be_visible()
        await expect(page.get_by_role("img", name="Duration of each step")).to_be_visible()
        await expect(page.get_by_role("img", name="Shares of the time")).to_be_visible()
        transform = page.get_by_role("region", name="Transform", exact=True)
        for text in ("996", "micro-batches", "187 ms", "612 ms", "913 ms", "81,204", "18.4 MiB", "420 ms"):
            await expect(transform).to_contain_text(text)
        await expect(transform.get_by_role("link")).to_have_attribute("href", "http://127.0.0.1:4040")
        await expect(page.get_by_role("table", name="Groups of instances")).to_contain_text("420 ms")
        instances = page.get_by_role("table", name="Instances by group")
        frozen = instances.get_by_role("row").filter(has=page.get_by_role("rowheader", name="expel"))
        for text in ("2 of 3", "hold: out: 2.1 cores", f"because: {HOSTILE}", "failed: expel-3", "key 'shop-7'"):
            await expect(frozen).to_contain_text(text)
        await expect(instances.get_by_title("the autoscaler has not decided since")).to_have_count(1)
        await expect(page.get_by_role("table", name="Shards of orders")).to_contain_text("12,740")
        await expect(page.get_by_role("table", name="Payload fields of orders")).to_contain_text("null in 61%")
        await expect(page.get_by_role("status")).to_contain_text("live")
        is_wider = await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not is_wider, "the page scrolls sideways"
        await page.screenshot(path=tmp_path / "page.png", full_page=True)


async def test_a_browser_is_asked_for_the_token(chromium: Browser, observer: Observer, tmp_path: Path) -> None:
    """If this fails, nobody sees the page of an observer in a container: its files or its stream lack the token."""
    token = "t" * 30
    file = await asyncio.to_thread(write_token, tmp_path / "token", token)
    tokens = Tokens(await asyncio.to_thread(read_tokens, file))
    credentials = {"username": "anybody", "password": token}
    async with serve_api(
        "0.0.0.0:0", [], lambda app: add_page(app, FILES, lambda: observer.view), tokens=tokens
    ) as bound:
        address = f"http://127.0.0.1:{bound.rpartition(':')[2]}/"
        async with open_page(chromium, address, http_credentials=credentials) as page:
            await expect(page.get_by_role("status")).to_contain_text("live")
            await expect(page.get_by_role("table", name="Loss of orders by minute")).to_contain_text("2.50 %")


def write_token(path: Path, token: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(token)
    return path


async def test_names_are_text(chromium: Browser, observer: Observer, tmp_path: Path) -> None:
    """If this fails, whoever may name a pipe or an event runs scripts in an operator's browser."""
    async with observer.serve() as address, open_page(chromium, address) as page:
        tab = page.get_by_role("tab", name=HOSTILE)
        await tab.click()
        await expect(page.get_by_role("heading", level=2)).to_have_text(HOSTILE)
        transform = page.get_by_role("region", name="Transform", exact=True)
        await expect(transform).to_contain_text("no batch")
        await expect(transform.get_by_role("link")).to_have_count(0)
        await page.get_by_role("tab", name="invoices").click()
        await expect(transform).to_be_hidden()
        await page.get_by_role("tab", name="live").click()
        await expect(transform).to_contain_text("real-time")
        await expect(transform).not_to_contain_text(
            "batch"
        )  # 15 s from one commit to the next, for which no event waits
        await tab.click()
        await page.get_by_role("searchbox", name="Event id").fill(HOSTILE)
        await page.get_by_role("button", name="Find event").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_role("heading", level=3)).to_have_text(f"Event {HOSTILE}")
        await expect(dialog).to_contain_text(f"http_503 ({HOSTILE})")
        await expect(dialog).to_contain_text("waits for another attempt")
        await page.screenshot(path=tmp_path / "story.png", full_page=True)
        assert await page.locator("img").count() == 0


async def test_keyboard_alone_is_enough(chromium: Browser, observer: Observer) -> None:
    """If this fails, who uses no mouse cannot choose a pipe or see which events are missing."""
    async with observer.serve() as address, open_page(chromium, address) as page:
        await expect(page.get_by_role("tab", name="orders")).to_have_attribute("aria-selected", "true")
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("tab", name="invoices")).to_have_attribute("aria-selected", "true")
        await page.keyboard.press("ArrowLeft")
        button = page.get_by_role("button", name="1,500 (2.50 %)")
        await button.focus()
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text(f"ab:0:{NOW_MIN - 28}")
        await expect(dialog).to_contain_text("event-7")
        await expect(dialog).to_contain_text("and 1,499 more")
        await dialog.get_by_role("button", name="event-7").press("Enter")
        story = page.get_by_role("dialog", name="Event event-7")
        await expect(story).to_contain_text("Not found among the events that were accepted from")
        await expect(story.get_by_role("button", name="Search the last 7 days")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()


async def test_skipping_keeps_the_pipe(chromium: Browser, observer: Observer) -> None:
    """If this fails, who skips the list of pipes with the keyboard is taken to another pipe."""
    async with observer.serve() as address, open_page(chromium, f"{address}#invoices") as page:
        heading = page.get_by_role("heading", level=2)
        await expect(heading).to_have_text("invoices")
        await page.get_by_role("link", name="Skip to the pipe").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("tabpanel")).to_be_focused()
        observer.view = make_view(catching_up=True)
        await expect(page.get_by_role("status")).to_contain_text("catching up")
        await expect(heading).to_have_text("invoices")


async def test_an_address_that_names_nothing(chromium: Browser, observer: Observer) -> None:
    """If this fails, an address cut short in a chat shows an empty page."""
    async with observer.serve() as address, open_page(chromium, f"{address}#%") as page:
        await expect(page.get_by_role("heading", level=2)).to_have_text("orders")
        await page.get_by_role("tab", name="invoices").click()
        await expect(page.get_by_role("heading", level=2)).to_have_text("invoices")


_SELECT = """() => getSelection().selectAllChildren(
  [...document.querySelectorAll("#destinations th")].find((one) => one.textContent === "crm-of-a-customer"))"""


async def test_selected_text_does_not_keep_another_pipes_table(chromium: Browser, observer: Observer) -> None:
    """If this fails, who copied something reads one pipe's destinations under another pipe's name."""
    async with observer.serve() as address, open_page(chromium, address) as page:
        await expect(page.get_by_role("rowheader", name="crm-of-a-customer")).to_be_visible()
        await page.evaluate(_SELECT)
        observer.view = make_view(catching_up=True)
        await expect(page.get_by_role("status")).to_contain_text("catching up")
        assert await page.evaluate("getSelection().toString()") == "crm-of-a-customer", (
            "a new view undoes the selection"
        )
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("table", name="Destinations of invoices")).to_contain_text("books")


async def test_a_slow_explanation_does_not_replace_a_later_one(chromium: Browser, observer: Observer) -> None:
    """If this fails, the missing events of one minute stand under the title of another."""
    observer.slow_minute = slow_minute = NOW_MIN - 28
    async with observer.serve() as address, open_page(chromium, address) as page:
        dialog = page.get_by_role("dialog")
        slow_path = f"/loss/{quote(format_minute(slow_minute), safe='')}/explain"
        async with page.expect_response(lambda answer: slow_path in answer.url) as slow:
            await page.get_by_role("button", name="1,500 (2.50 %)").click()
            await expect(dialog).to_contain_text("Looking…")
            await page.keyboard.press("Escape")
            await page.get_by_role("button", name=re.compile(r"^3 \(")).click()
            await expect(dialog).to_contain_text(f"ab:0:{NOW_MIN - 11}")
            observer.may_answer.set()
        await (await slow.value).finished()
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        await expect(dialog).to_contain_text(f"ab:0:{NOW_MIN - 11}")


async def test_page_lives_and_comes_back(chromium: Browser, observer: Observer) -> None:
    """If this fails, the page shows old figures as if they were of now."""
    context = await chromium.new_context()
    page = await context.new_page()
    async with observer.serve() as address:
        await page.goto(address)
        await expect(page.locator("#figures")).to_contain_text("1,000")
        observer.view = make_view(per_second=1234)
        await expect(page.locator("#figures")).to_contain_text("1,234")
    observer.view = make_view(per_second=4321, catching_up=True)
    async with observer.serve():
        await expect(page.locator("#figures")).to_contain_text("4,321")
        await expect(page.get_by_role("status")).to_contain_text("catching up")
    await context.close()


async def test_what_a_person_opened_stays_open(chromium: Browser, observer: Observer) -> None:
    """If this fails, each new view folds away what somebody is reading."""
    async with observer.serve() as address, open_page(chromium, address) as page:
        await page.get_by_text("503 Service Unavailable · 12,210").click()
        observer.view = make_view(per_second=77)
        await expect(page.locator("#figures")).to_contain_text("77")
        await expect(page.get_by_text("connection refused · 530")).to_be_visible()
        await expect(page.get_by_text("503 Service Unavailable · 12,210")).to_be_focused()


async def test_empty_view_says_so(chromium: Browser, observer: Observer) -> None:
    """If this fails, a fleet without pipes shows a page that looks broken."""
    observer.view = msgspec.structs.replace(observer.view, pipes=(), groups=(), scaling=())
    async with observer.serve() as address, open_page(chromium, address) as page:
        await expect(page.get_by_text("Nothing has been reported yet.")).to_be_visible()


async def test_nothing_is_fetched_from_elsewhere(observer: Observer) -> None:
    """If this fails, the page does not work offline, or runs what others serve."""
    async with observer.serve() as address, ClientSession() as session, session.get(address) as answer:
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "http" not in await answer.text()
        async with session.get(address, headers={"If-None-Match": answer.headers["ETag"]}) as again:
            assert again.status == 304


async def test_streams_are_bounded_and_end_with_the_service(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, open tabs keep the observer from stopping, or as many as there are use it up."""
    monkeypatch.setattr(page_module, "MAX_CLIENTS", 2)
    async with ClientSession() as session:
        async with asyncio.timeout(600), observer.serve() as address:
            first = await session.get(f"{address}v1/stream")
            second = await session.get(f"{address}v1/stream")
            assert (await first.content.readline()) == b"event: view\n"
            async with session.get(f"{address}v1/stream") as third:
                assert third.status == 503
        first.close()
        second.close()
