"""The registry's page in a real browser, over a registry in memory."""

import json
import os
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.conftest import open_page
from tests.unit.registry.service import Client, running_registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOSTILE = "<img src=x onerror=document.title='owned'>"


def record(*fields: dict[str, object], doc: str = "") -> str:
    return json.dumps({"type": "record", "name": "com.acme.Click", "doc": doc, "fields": list(fields)})


async def fill(client: Client) -> None:
    """Two versions of a stream's subject, which only FORWARD allows; a subject that no stream has."""
    page: dict[str, object] = {"name": "page", "type": "string"}
    await client.ask("PUT", "/config/clicks-value", {"compatibility": "FORWARD"})
    await client.register("clicks-value", record(page, doc=HOSTILE))
    await client.register("clicks-value", record(page, {"name": "user", "type": "long", "doc": HOSTILE}))
    await client.register("other", '"string"')
    body = {"deprecated": True, "note": HOSTILE}
    await client.ask("PATCH", "/v1/subjects/other/versions/1", body)


async def test_subjects_versions_and_differences(chromium: Browser) -> None:
    """Broken: a person does not see what a version changed, or who uses it; or a client's text runs as a script."""
    async with running_registry() as client:
        await fill(client)
        async with open_page(chromium, f"{client.base}/", viewport={"width": 1200, "height": 1000}) as page:
            rows = page.locator("#subjects tbody tr")
            await expect(rows).to_have_count(2)
            await expect(rows.nth(0)).to_contain_text("FORWARD")
            await expect(rows.nth(0)).to_contain_text("web")
            await expect(rows.nth(1)).to_contain_text("deprecated")
            await page.get_by_role("button", name="clicks-value").click()
            await expect(page.locator("#subject-about")).to_contain_text("stream clicks, pipe web")
            await expect(page.locator("#versions tbody tr")).to_have_count(2)
            difference = page.locator("#differences article").first
            await expect(difference).to_contain_text("/fields/1")
            await expect(difference).to_contain_text('fix [{"op":"add","path":"/fields/1/default"')
            await expect(page.locator("#differences .levels")).to_contain_text("BACKWARD: breaks")
            await expect(page.locator("#schema")).to_contain_text('"name": "user"')
            if (folder := os.environ.get("PENSTOCK_SCREENSHOTS")) is not None:
                await page.screenshot(path=Path(folder) / "schemas.png", full_page=True)
            await page.get_by_role("button", name="Show version 1").click()
            await expect(page.locator("#schema")).not_to_contain_text('"name": "user"')
            await page.locator("#filter-text").fill("oth")
            await expect(rows).to_have_count(1)
            assert "owned" not in await page.title()


async def test_several_differences_have_one_patch(chromium: Browser) -> None:
    """Broken: of two differences neither has a fix, and a person does not see the patch that ends both."""
    new: list[dict[str, object]] = [{"name": name, "type": "long"} for name in ("a", "b")]
    async with running_registry() as client:
        await client.ask("PUT", "/config/s", {"compatibility": "NONE"})
        await client.register("s", record())
        await client.register("s", record(*new))
        async with open_page(chromium, f"{client.base}/", viewport={"width": 1200, "height": 1000}) as page:
            await page.get_by_role("button", name="s", exact=True).click()
            found = page.locator("#differences article")
            await expect(found).to_have_count(3)
            await expect(found.nth(0)).not_to_contain_text("fix")
            await expect(found.nth(2)).to_contain_text("together make it FULL compatible")
            await expect(found.nth(2).locator("pre")).to_have_count(2)
            if (folder := os.environ.get("PENSTOCK_SCREENSHOTS")) is not None:
                await page.screenshot(path=Path(folder) / "together.png", full_page=True)


async def test_it_shows_what_was_registered_since(chromium: Browser) -> None:
    """Broken: an empty registry stays empty on the page until somebody loads it again."""
    async with running_registry() as client, open_page(chromium, f"{client.base}/", color_scheme="dark") as page:
        await expect(page.locator("#empty")).to_be_visible()
        await client.register("clicks-value", record())
        await expect(page.locator("#subjects tbody tr")).to_have_count(1)
        await expect(page.locator("#empty")).to_be_hidden()
