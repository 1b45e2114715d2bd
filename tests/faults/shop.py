"""The fleet of the runbooks' examples: stream `orders`, pipe `shop`, destination `crm`. Its commands are those of a page.

Each event has a number. The receiver counts how often each one came; what became of it is known without any of the services.
"""

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import orjson
import yaml
from aiohttp import web

from tests.faults.fleet import DEADLINE, Fleet, Service, open_fleet, wait_until
from tests.support.ports import free_port
from tests.support.serving import serve_on_loopback

PAGE = Path(__file__).parents[2] / "docs" / "backup.md"
TIME = re.compile(r"20\d\d-\d\d-\d\dT[\d:]+Z")


def command_of(section: str, begin: str, *, url: str = "", time: str = "") -> str:
    """The command that begins like this in a section of docs/backup.md, with this broker and time in place of the page's."""
    text = PAGE.read_text().partition(f"### {section}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    assert text, f"docs/backup.md has no section {section}"
    found = re.findall(rf"^ *({re.escape(begin)}[^\n`]*)$|`({re.escape(begin)}[^`]*)`", text, re.MULTILINE)
    assert found, f"the section {section} has no command {begin}"
    line = (found[0][0] or found[0][1]).replace("kafka://…", f"'{url}'")
    return TIME.sub(time, line) if time else line


def now() -> str:
    """As a person writes it into a command: a time between what was sent before and what is sent afterwards."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Receiver:
    """came: how often each number came."""

    url: str
    came: Counter[int] = field(default_factory=Counter)


@dataclass
class Shop:
    """Made by `open_shop`. folder: where the commands run, with pipes.yaml; url: of its broker. listen: of ingest."""

    folder: Path
    url: str
    crm: Receiver
    fleet: Fleet
    listen: str = ""
    sent: int = 0

    def write_pipes(self, url: str | None = None, **more: object) -> None:
        """url: of another receiver. more: options of the webhook."""
        hook = {
            "url": url or self.crm.url,
            "retry": {"attempts": 20, "base": "50ms", "max_wait": "500ms"},
            "timeout": "5m",
            **more,
        }
        hook["batch"] = {"max_wait": "20ms"}
        streams = {"orders": {"partitions": 2, "id": "id", "key": "key"}}
        pipes = {"shop": {"sources": ["orders"], "destinations": [{"name": "crm", "webhook": hook}]}}
        (self.folder / "pipes.yaml").write_text(yaml.safe_dump({"version": 1, "streams": streams, "pipes": pipes}))

    async def start(self, *names: str) -> None:
        """Ingest and expel, or one of them."""
        self.listen = self.listen or f"127.0.0.1:{free_port()}"
        shared = ["--broker", self.url, "--pipes", str(self.folder / "pipes.yaml")]
        flags = {
            "ingest": ["--listen", self.listen],
            "expel": ["--allow-networks", "127.0.0.0/8", "--commit-interval", "100ms"],
        }
        for name in names or tuple(flags):
            service = Service(name, f"services.{name}", [*shared, *flags[name]], self.folder)
            await self.fleet.add(service, ready=False)
        for name in names or tuple(flags):
            await self.fleet.services[name].wait_ready()

    async def stop(self, *names: str) -> None:
        """In good order."""
        for name in names or ("ingest", "expel"):
            service = self.fleet.services[name]
            service.send(signal.SIGTERM)
            assert await service.wait_end() == 0, service.log.read_text()[-2000:]

    async def send(self, count: int) -> range:
        """New events, one request each; their numbers. All are acknowledged."""
        numbers = range(self.sent, self.sent + count)
        self.sent += count
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session:
            for number in numbers:
                body = orjson.dumps([{"id": f"o-{number}", "key": f"k{number % 7}"}])
                url, head = f"http://{self.listen}/v1/streams/orders/events", {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=head) as answer:
                    if answer.status == 503:
                        raise TimeoutError(f"the log stood still for longer than ingest waits: {await answer.text()}")
                    assert answer.status == 200, await answer.text()
        return numbers

    async def wait_came(self, numbers: Iterable[int]) -> None:
        wanted = set(numbers)
        try:
            await wait_until(lambda: wanted <= self.crm.came.keys())
        except AssertionError:
            said = self.fleet.services["expel"].log.read_text()[-3000:]
            raise AssertionError(f"did not come: {sorted(wanted - self.crm.came.keys())}; expel: {said}") from None

    async def run(self, command: str, *, status: int = 0) -> str:
        """A command of the page, as a person runs it in the folder, who says yes. What it printed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euc", command),
            cwd=self.folder,
            env={**environ, "PATH": path, "COLUMNS": "200"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(DEADLINE):
            printed, _ = await process.communicate()
        assert process.returncode == status, f"{command}: {process.returncode}: {printed.decode()}"
        return printed.decode()


@asynccontextmanager
async def open_receiver() -> AsyncIterator[Receiver]:
    """It takes everything."""
    receiver = Receiver("")

    async def take(request: web.Request) -> web.Response:
        receiver.came.update(int(one["id"].removeprefix("o-")) for one in orjson.loads(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", take)
    async with serve_on_loopback(app) as port:
        receiver.url = f"http://127.0.0.1:{port}/hook"
        yield receiver


@asynccontextmanager
async def open_shop(folder: Path, url: str) -> AsyncIterator[Shop]:
    """The pipe file is written; no service runs, and no topic exists."""
    async with AsyncExitStack() as stack:
        crm = await stack.enter_async_context(open_receiver())
        shop = Shop(folder, url, crm, await stack.enter_async_context(open_fleet()))
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(shop.write_pipes)
        yield shop
