"""The commands of docs/runbooks are run on a small fleet, in the folder in which an engineer would run them.

Those in ```sh blocks only look. Those in ```bash blocks mend, or need something that not every fleet has.
"""

import asyncio
import re
import shlex
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.fleet_process import DEADLINE, DRAIN, REPOSITORY, SECRET, Command, Desk, until
from tests.integration.test_docs import CLONE

PAGES = sorted((REPOSITORY / "docs" / "runbooks").glob("*.md"))


def lines(kind: str) -> list[str]:
    """Each distinct command of the blocks of a kind, in the order of the pages."""
    found = re.compile(rf"^ *```{kind}\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    blocks = [block for page in PAGES for block in found.findall(page.read_text())]
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
        found = await asyncio.gather(*(run(line, tmp_path, limit) for line in lines("sh") if line != "penstock doctor"))
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
    began = time.monotonic()
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
    print(f"{time.monotonic() - began:5.1f} s  {line}")
    return line, process.returncode, out.decode()


ELSEWHERE = {
    r"kubectl |dns://": "Kubernetes",
    r"aws ": "AWS",
    r"kafka-configs\.sh |kafka\.yaml|kafka-client\.pem|kafka-1:9093": "a Kafka cluster of its own, with a login",
    r"crm\.example\.com": "the receiver of somebody else",
    r"PROMETHEUS|ALERTMANAGER": "Prometheus and Alertmanager",
    r"chronyc |timedatectl": "a machine with a time service",
    r"autoscaler-1\.log": "an autoscaler, which has a log of its own",
    r"--pipe store": "dead letters of the retrier, of a pipe that has another name now",
    r"transform-1\.log|penstock group reset shop --to-earliest|penstock resume shop": "a transform, so Spark",
}
"""The mending commands that are not run here, as regular expressions, and what they need. Those of `penstock` are parsed in
`unit/infra/test_runbooks.py`."""
STOPPED = (
    "penstock group reset shop/crm",
    "penstock group skip",
    "cp -a data/log",
    "penstock log repair",
)
"""The beginnings of those for which the page stops the fleet, in the order in which they are run."""
START = "penstock up "
LAST = "kill "
"""Of those for a fleet that runs: the others need its processes."""
RESUME = "penstock destination resume crm --pipe shop"
SAYS = {
    "penstock keys list": "the shop",
    "penstock dead show": "http_400",
    "penstock dead redrive --pipe shop --destination crm": "redriven 20",
    "penstock event": "delivered (2xx)",
    "penstock log repair": "sound",
    "penstock apply": "there already  latest",
    "curl ": "ok",
    "cut ": '"exp"',
    "ls -la webhook.secret": "-rw-------",
}
"""What the commands with these beginnings print."""


def test_the_commands_that_are_not_run() -> None:
    """Broken: a reason for not running a command outlives the command, or covers one that could be run."""
    mending = lines("bash")
    for pattern, reason in ELSEWHERE.items():
        assert any(re.search(pattern, line) for line in mending), (pattern, reason)
    assert len([line for line in mending if needed(line) is None]) > 30
    assert all(any(line.startswith(start) for line in mending) for start in (*STOPPED, START, LAST))


async def test_mending_a_fleet(tmp_path: Path) -> None:
    """Broken: at 3 a.m. a command that mends fails for another reason than the fault, or does not do what its page says."""
    desk = Desk(tmp_path)
    await asyncio.to_thread(prepare, desk)
    mending = [line for line in lines("bash") if needed(line) is None]
    stopped = [line for start in STOPPED for line in mending if line.startswith(start)]
    first, *others = (line for line in mending if line.startswith(START))
    live = [line for line in mending if not line.startswith((*STOPPED, START))]
    live.sort(
        key=lambda line: (line.startswith(LAST), line.startswith("install"))
    )  # what reads a file comes before its change
    names = {
        "kafka://host:9092": f"log://{desk.data / 'log'}",
        "observer.token": "data/observer.token",
        "0:4712": "0:5",
    }
    async with desk.receive():
        async with started(desk, first) as fleet:
            made = await desk.run("keys", "create", "--name", "the shop", "--stream", "orders", "--keys", "keys.yaml")
            names["k3v9x0qa"] = made.out.strip().split("_")[1]
            desk.receiver.fail, desk.receiver.refusal = 1.0, 400
            sent = await desk.send(tmp_path / "orders.ndjson", stream="orders")
            assert sent.process.returncode == 0, sent.err
            names["2026-11-21T08:05Z"] = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
            await until(lambda: desk.receiver.failed, "a refused request")
            desk.receiver.fail = 0.0
            state = await desk.state()
            [expel] = [one for one in state.processes if one.service == "expel"]
            names |= {"ADDRESS": expel.management or "", "observer:8081": state.observer}
            wrong = [await mend(line, names, tmp_path) for line in (*live, RESUME)]  # three pages pause the destination
            assert "\n".join(filter(None, wrong)) == ""
            async with asyncio.timeout(DEADLINE):
                while not await has_another(desk, expel.pid):
                    await asyncio.sleep(0.1)
            await until(lambda: len(desk.ids) == EVENTS, "all events, after they were redriven")
            assert await fleet.interrupt() == 0
        wrong = [await mend(line, names, tmp_path) for line in stopped]
        assert "\n".join(filter(None, wrong)) == ""
        for line in others:
            async with started(desk, line) as fleet:
                await until(lambda: desk.receiver.duplicates, "events behind the skipped ones, again")
                assert await fleet.interrupt() == 0, fleet.err


@asynccontextmanager
async def started(desk: Desk, line: str) -> AsyncIterator[Command]:
    """The fleet as this command starts it, ready, on the ports of the test."""
    own = ("--listen", f"127.0.0.1:{desk.ingest_port}", "--tables", "127.0.0.1:0", "--drain", DRAIN)
    fleet = await desk.penstock(*shlex.split(line)[1:], "--ready-within", f"{DEADLINE:.0f}s", *own, *NETWORKS)
    try:
        await fleet.until_said("Penstock runs")
        yield fleet
    finally:
        await fleet.kill()


EVENTS = 20
NETWORKS = ("--allow-networks", "127.0.0.0/8")
"""The receiver is on this machine."""


def prepare(desk: Desk) -> None:
    """What the commands find in the folder of an engineer: files of secrets, old logs, versions of the pipe file."""
    folder, hook = desk.folder, f"http://127.0.0.1:{desk.hook_port}/"
    pipes = (
        "streams: {orders: {id: id, partitions: 1}, latest: {key: id, compact: true}}\n"
        "pipes:\n  shop:\n    sources: [orders]\n    destinations:\n"
        f"      - {{name: crm, webhook: {{url: '{hook}', secret: {{file: webhook.secret}}}}}}\n"
    )
    for version in (pipes, f"{pipes}# A change that was wrong.\n"):
        (folder / "pipes.yaml").write_text(version)
        git = "git -c user.name=n -c user.email=e@example.com"
        subprocess.run(f"git init -q; git add pipes.yaml; {git} commit -qm change", shell=True, cwd=folder, check=True)
    ids = ["o-88121", *(f"o-{number}" for number in range(1, EVENTS))]
    (folder / "orders.ndjson").write_text("".join(f'{{"id": "{one}"}}\n' for one in ids))
    (folder / "webhook.secret").write_text(f"# expires: 2027-11-30\n{SECRET}\n")
    (folder / "crm.token").write_text("e30.eyJleHAiOjE3OTU5OTk5OTl9.c2ln\n")
    (folder / "data" / "logs").mkdir(parents=True)
    (folder / "data" / "logs" / "expel-1.log.3").write_text("{}\n")
    (folder / "infra").symlink_to(REPOSITORY / "infra")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=expel -keyout k -out expel.pem"
    subprocess.run(shlex.split(make), cwd=folder, check=True, capture_output=True)


async def has_another(desk: Desk, pid: int | None) -> bool:
    """Whether another expel runs in place of this one."""
    return any(one.service == "expel" and one.pid not in (None, pid) for one in (await desk.state()).processes)


def needed(line: str) -> str | None:
    """What a command needs that this test has not."""
    return next((reason for pattern, reason in ELSEWHERE.items() if re.search(pattern, line)), None)


async def mend(line: str, names: dict[str, str], folder: Path) -> str:
    """Run the line with the names of this fleet in place of the page's, and answer yes to its question.

    What was wrong with it; empty: it ended with 0, and said what it should.
    """
    for name, ours in names.items():
        line = line.replace(name, ours)
    _, status, out = await run(f"new=secret; {{ {line}; }} < <(echo y)", folder, asyncio.Semaphore())
    is_grep_of_nothing = line.startswith("grep") and status == 1 and not out  # a healthy fleet has no such line
    said = next((text for start, text in SAYS.items() if line.startswith(start)), "")
    is_good = (status == 0 or is_grep_of_nothing) and said in out
    return "" if is_good else f"{line}\nended with {status} and does not say {said!r}: {out}"
