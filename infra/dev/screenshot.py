"""Takes the README's picture: the observer's page in the demo of an outage, while one destination is down.

.venv/bin/python infra/dev/screenshot.py docs/images/observer.png [--broker kafka] [--scheme dark]

Look at it before it is committed. Needs Debian's chromium, as the browser tests do.
"""

import argparse
import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

from playwright.async_api import async_playwright

WIDTH, HEIGHT = 1100, 1180
WITHIN_S = 300.0
SHOWN_S = 6.0
"""So long after the outage began: the breaker is open, and the first lags are reported."""


async def main(file: Path, broker: str, scheme: str) -> None:
    """Run the demo, take the picture, let the demo end. Raises when the demo fails."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is missing. Try: sudo apt-get install chromium")
    command = [sys.executable, "-m", "services.fleet", "demo", "--chaos", "--broker", broker]
    demo = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env={**os.environ})
    address = ""
    async with asyncio.timeout(WITHIN_S):
        assert demo.stderr is not None
        async for raw in demo.stderr:
            line = raw.decode()
            if found := re.search(r"live: (http://\S+)", line):
                address = found[1]
            if "goes down" in line:
                break
        rest = asyncio.create_task(demo.stderr.read())
        await asyncio.sleep(SHOWN_S)
        async with async_playwright() as playwright:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = await playwright.chromium.launch(executable_path=chromium, args=sandbox)
            page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
            await page.goto(address)
            await page.get_by_role("table", name=re.compile("^Loss of ")).wait_for()
            await page.screenshot(path=file)
            await browser.close()
        await rest
        if await demo.wait():
            raise SystemExit(f"the demo failed: {rest.result().decode()[-2000:]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--broker", default="log", choices=["log", "kafka"])
    parser.add_argument("--scheme", default="light", choices=["light", "dark"])
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(arguments.file, arguments.broker, arguments.scheme))
