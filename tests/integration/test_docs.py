"""The documentation's commands do what it says: every ```sh block of these pages is run, in order, in an empty folder."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core.version import VERSION
from tests.integration.fleet_process import DEADLINE, DRAIN, REPOSITORY, Command
from tests.support.pacing import Pace
from tests.support.ports import free_port

CLONE = Path(sys.executable).parent
READY = {"penstock up": "Penstock runs", "penstock listen": "Listening on"}
CLOSE_OTHERS = 'for fd in /proc/$$/fd/*; do fd="${fd##*/}"; [ "$fd" -le 2 ] || eval "exec $fd>&-"; done\n'
"""For a block that leaves processes behind: uvloop's children inherit the pipes of their output, which would stay open."""
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Page:
    """One page's commands. Its ports are changed for free ones, so that pages and tests do not meet."""

    def __init__(self, name: str, folder: Path, programs: Path) -> None:
        self._hook, self._ingest, self._observer = str(free_port()), str(free_port()), str(free_port())
        self._spark, self._registry, self._tables = str(free_port()), str(free_port()), str(free_port())
        self.blocks = [self._with_ports(block) for block in BLOCK.findall((REPOSITORY / name).read_text())]
        assert self.blocks, f"{name} has no commands"
        self._folder, self._programs = folder, programs
        self.running: dict[str, Command] = {}
        self.said = ""

    def _with_ports(self, text: str) -> str:
        return (
            text.replace(":9000", f":{self._hook}")
            .replace("--port 9000", f"--port {self._hook}")
            .replace(":7077", f":{self._spark}")
            .replace("--port 7077", f"--port {self._spark}")
            .replace(":8080", f":{self._ingest}")
            .replace(":8081", f":{self._observer}")
            .replace(":8084", f":{self._registry}")
            .replace(":8082", f":{self._tables}")
            .replace(
                "timeout 60 ", f"timeout {DEADLINE:.0f} "
            )  # enough for a reader, not for a machine with other work
            .replace("--retry 60 ", f"--retry {DEADLINE:.0f} ")
        )

    def _environ(self) -> dict[str, str]:
        left_out = ("PENSTOCK_", "PYTHONPATH")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        kept = {name: value for name, value in os.environ.items() if name in ("PENSTOCK_JARS", "PENSTOCK_JAVA")}
        if not any("penstock up" in block for block in self.blocks):  # it sets these for its services
            kept |= {f"PENSTOCK_{service}_DRAIN": DRAIN for service in ("INGEST", "EXPEL")}
        return {
            **environ,
            **kept,
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "PENSTOCK_UP_LISTEN": f"127.0.0.1:{self._ingest}",
            "PENSTOCK_UP_TABLES": f"127.0.0.1:{self._tables}",
            "PENSTOCK_UP_READY_WITHIN": f"{DEADLINE:.0f}s",
            "PENSTOCK_UP_DRAIN": DRAIN,
            "PENSTOCK_TABLE_WAIT": "60s",
            "PENSTOCK_TABLE_BEHIND": "600s",
            "COLUMNS": "200",
        }

    async def run_block(self, block: str) -> None:
        if block.startswith("# Ctrl-C"):
            assert await self.running.pop("up").interrupt() == 0
        ready = next((said for start, said in READY.items() if block.startswith(start)), None)
        if ready is not None and (earlier := self.running.pop(block.split()[1], None)) is not None:
            assert await earlier.interrupt() == 0, earlier.err
        command = await self._start(block)
        if ready is not None:
            await command.until_said(ready)
            self.running[block.split()[1]] = command
            return
        try:
            status = await command.finish()
        except TimeoutError:
            raise TimeoutError(f"{block}\nprinted: {command.out}{command.err}\n{self._printed()}") from None
        finally:
            await command.kill()
        self.said += command.out + command.err
        assert status == 0, f"{block}\nended with {status}: {command.out}{command.err}"
        await asyncio.to_thread(self._change_ports_of_files)

    async def _start(self, block: str) -> Command:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"exec {block}" if block.startswith(tuple(READY)) else (CLOSE_OTHERS if "nohup" in block else "") + block,
            cwd=self._folder,
            env=self._environ(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return Command(process)

    def _printed(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self._folder.glob("*.txt"))

    def _change_ports_of_files(self) -> None:
        for path in self._folder.glob("*.yaml"):
            path.write_text(self._with_ports(path.read_text()))

    async def wait_for(self, name: str, condition: Callable[[str], bool]) -> None:
        """Until a running command has said what is expected of it."""
        command = self.running[name]
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while not condition(command.out):
                await pace.rest()

    async def stop(self) -> None:
        """Ctrl-C in every terminal, the fleet's first."""
        for name in ("up", "listen"):
            if (command := self.running.pop(name, None)) is not None:
                command.process.send_signal(signal.SIGINT)
                assert await command.finish() == 0, command.err

    async def kill(self) -> None:
        for command in self.running.values():
            await command.kill()


async def run_page(
    name: str,
    folder: Path,
    received: Callable[[str], object] = lambda _out: True,
    *,
    look_after: str = "\0",
    for_text: str = "",
    programs: Path = CLONE,
) -> Page:
    """Run a page; its reader waits for `for_text` at the receiver after a block with `look_after`, in the end for `received`.

    programs: the folder of the `penstock` that runs.
    """
    page = Page(name, folder, programs)
    try:
        for block in page.blocks:
            await page.run_block(block)
            if look_after in block:
                await page.wait_for("listen", lambda out: for_text in out)
        if "listen" in page.running:
            await page.wait_for("listen", lambda out: bool(received(out)))
        await page.stop()
    finally:
        await page.kill()
    return page


@pytest.mark.spark
async def test_readme(tmp_path: Path, wheel_programs: Path) -> None:
    """Broken: a newcomer who follows the README does not get a signed delivery, or only in a clone. It runs from the wheel."""

    def all_of_them(out: str) -> bool:
        return "signature good" in out and sum(map(int, re.findall(r" (\d+) events,", out))) == 94

    look = {"look_after": "curl", "for_text": '"vat":47.5'}
    page = await run_page("README.md", tmp_path, all_of_them, **look, programs=wheel_programs)
    assert '{"accepted":2}' in page.said
    assert "accepted 100, refused 0" in page.said
    assert "large-orders → billing" in page.said


async def test_sending(tmp_path: Path) -> None:
    """Broken: docs/sending.md shows commands that do not work."""
    page = await run_page("docs/sending.md", tmp_path)
    assert page.said.count("accepted 2, refused 0") == 3
    assert '"accepted": 2' in page.said


async def test_receiving(tmp_path: Path) -> None:
    """Broken: docs/receiving.md shows commands that do not work."""
    await run_page("docs/receiving.md", tmp_path, lambda out: '"id": "o-1"' in out)


async def test_operating(tmp_path: Path) -> None:
    """Broken: docs/operating.md shows commands that do not work."""
    page = await run_page("docs/operating.md", tmp_path)
    assert "large-orders → billing" in page.said
    assert "sound" in page.said
    assert re.search(r"^large-orders/billing: 1 member ", page.said, re.MULTILINE)
    assert "large-orders/billing: 2 events are skipped" in page.said
    assert "because=orders of a test" in page.said


async def test_fleet(tmp_path: Path) -> None:
    """Broken: docs/fleet.md shows commands that do not work, or a service that runs by itself does not drain."""
    page = await run_page("docs/fleet.md", tmp_path)
    assert '{"accepted":1}' in page.said
    assert page.said.count('"event":"drained"') == 2


async def test_upgrading(tmp_path: Path) -> None:
    """Broken: docs/upgrading.md shows commands that do not work."""
    page = await run_page("docs/upgrading.md", tmp_path)
    assert f"penstock {VERSION}" in page.said
    assert f"fleet {VERSION}" in page.said
    assert f'penstock_build_info{{service="expel",version="{VERSION}"}} 1.0' in page.said
    assert "stored in orders" in page.said or "accepted" in page.said


async def test_backup(tmp_path: Path) -> None:
    """Broken: docs/backup.md shows commands that do not work, or a restored fleet does not say what is lost."""
    page = await run_page("docs/backup.md", tmp_path)
    assert "is sound" in page.said
    assert "are lost, unless their senders send them again" in page.said
    assert page.said.count("accepted ") >= 2
    assert re.search(r"  restore +0  penstock.audit:0", page.said)


async def test_fidelity(tmp_path: Path) -> None:
    """Broken: docs/fidelity.md shows commands that do not work."""
    page = await run_page("docs/fidelity.md", tmp_path)
    assert "None of the minutes is final yet" in page.said
    assert '"kind":"deploy"' in page.said
    assert '"planned":"deploy"' in page.said


async def test_schemas(tmp_path: Path) -> None:
    """Broken: docs/schemas.md shows commands that do not work, or a refusal that names no fix."""
    page = await run_page("docs/schemas.md", tmp_path)
    assert "clicks-value version 1, id 1" in page.said
    assert "status 1" in page.said
    assert '{"op": "add", "path": "/fields/1/default", "value": 0}' in page.said
    assert "com.acme.Order version 1" in page.said


async def test_dead_letters(tmp_path: Path) -> None:
    """Broken: docs/dead-letters.md shows commands that do not work, or a redrive that brings nothing."""
    page = await run_page("docs/dead-letters.md", tmp_path, lambda out: '"id": "o-1"' in out and '"id": "o-2"' in out)
    assert "http_401" in page.said
    assert "redriven 2, refused 0" in page.said
    assert "\n0 dead letters\n" in page.said
    assert re.search(r"@\S+  redrive +\d  shop.dead:0 0", page.said)


async def test_tables(tmp_path: Path) -> None:
    """Broken: docs/tables.md shows commands that do not work."""
    page = await run_page("docs/tables.md", tmp_path)
    assert "enstock-" in page.said
    assert '{"id": "a-1", "owner": "Ada", "limit": 100}' in page.said
    assert '"next":null' in page.said
    assert '{"accepted":1}' in page.said


async def test_brokers(tmp_path: Path) -> None:
    """Broken: docs/brokers.md shows commands that do not work, or a stream does not live where the page says."""
    page = await run_page("docs/brokers.md", tmp_path, lambda out: '"id": "o-1"' in out and '"id": "i-1"' in out)
    assert "invoices.db" in page.said
    assert not (tmp_path / "data/log/topics/invoices.db").exists()


async def test_migrating(tmp_path: Path) -> None:
    """Broken: docs/migrating.md shows commands that do not work, or a move loses, repeats or stops what is in flight."""
    page = await run_page("docs/migrating.md", tmp_path, lambda out: '"id": "o-3"' in out and '"id": "o-1"' in out)
    assert "orders lives on second" in page.said
    assert "0 of 2 origins missing" in page.said
    assert "the pipe file says default, which no longer counts" in page.said
    assert not (tmp_path / "data/log/topics/orders.db").exists()


async def test_autoscaling(tmp_path: Path) -> None:
    """Broken: docs/autoscaling.md shows commands that do not work."""
    page = await run_page("docs/autoscaling.md", tmp_path)
    assert "Layouts with the shards that each needs" in page.said
    assert '"layout": "a stream per type"' in page.said


def test_links() -> None:
    """Broken: a reader follows a link into nothing."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "examples" / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
