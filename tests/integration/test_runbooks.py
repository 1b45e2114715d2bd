"""The commands of docs/runbooks that only look are run on a small fleet, in the folder in which an engineer would run them."""

import asyncio
import re
from pathlib import Path

from tests.integration.fleet_process import DEADLINE, REPOSITORY, Desk
from tests.integration.test_docs import CLONE

PAGES = sorted((REPOSITORY / "docs" / "runbooks").glob("*.md"))
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def lines() -> list[str]:
    """Each distinct command of a block that only looks, in the order of the pages."""
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    return list(dict.fromkeys(line.strip() for block in blocks for line in block.splitlines() if line.strip()))


async def test_looking_at_a_fleet(tmp_path: Path) -> None:
    """Broken: a command of a runbook fails on a healthy fleet, or the doctor finds a fault there."""
    desk = Desk(tmp_path)
    (tmp_path / "pipes.yaml").write_text(
        "streams: {orders: {id: id}, latest: {key: id, compact: true}}\n"
        "pipes:\n  shop:\n    sources: [orders]\n    destinations:\n"
        f"      - {{name: crm, webhook: {{url: 'http://127.0.0.1:{desk.hook_port}/', secret: {{file: webhook.secret}}}}}}\n"
    )
    async with desk.receive(), desk.up("--tables", "127.0.0.1:0") as fleet:
        made = await desk.run("keys", "create", "--name", "the shop", "--stream", "orders", "--keys", "keys.yaml")
        assert made.process.returncode == 0, made.err
        sent = await desk.run("send", "orders", desk.write_events(20), "--url", f"http://127.0.0.1:{desk.ingest_port}")
        assert sent.process.returncode == 0, sent.err
        async with asyncio.timeout(DEADLINE):
            while len(desk.ids) < 20:
                await asyncio.sleep(0.1)
        limit = asyncio.Semaphore(2)
        found = await asyncio.gather(*(run(line, tmp_path, limit) for line in lines() if line != "penstock doctor"))
        assert [one for one in found if one[1] and not (one[0].startswith("grep") and not one[2])] == []
        async with asyncio.timeout(DEADLINE):  # beside the others it may wait too long for an answer, and says so
            while "Nothing is wrong" not in (said := (await run("penstock doctor", tmp_path, limit))[2]):
                print(said)
        assert await fleet.interrupt() == 0


async def run(line: str, folder: Path, limit: asyncio.Semaphore) -> tuple[str, int | None, str]:
    """The line, its exit status, and its output."""
    environ = {
        "PATH": f"{CLONE}:/usr/bin:/bin:/usr/sbin",
        "PENSTOCK_UP_ALLOW_NETWORKS": "127.0.0.0/8",
        "COLUMNS": "200",
    }
    async with limit, asyncio.timeout(DEADLINE):
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-uo",
            "pipefail",
            "-c",
            line,
            cwd=folder,
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
    return line, process.returncode, out.decode()
