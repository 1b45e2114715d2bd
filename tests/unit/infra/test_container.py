"""infra/container: the image is built from pinned parts alone, runs as nobody in particular, and holds no secret.

There is no Docker where the tests run: the file is read, and what can be run of it is run.
"""

import asyncio
import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

from services.core.process.management import serve_management
from services.core.process.settings import SECTIONS
from tests.support.ports import free_port
from tests.unit.infra.dockerfile import Instruction, read_dockerfile

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "infra" / "container"
IMAGE = read_dockerfile(FOLDER / "Dockerfile")
LAST = IMAGE[-1].stage
MANAGEMENT = re.compile(r"PENSTOCK_([A-Z]+)_MANAGEMENT=0\.0\.0\.0:9100")


def named(name: str, stage: int | None = None) -> list[Instruction]:
    return [one for one in IMAGE if one.name == name and stage in (None, one.stage)]


def copied() -> list[str]:
    """What the build takes from the repository."""
    return [source for one in named("COPY", 1) for source in one.rest.split()[:-1]]


def test_bases_are_pinned() -> None:
    """Broken: the same commit builds another image next week, or runs on another Python than it was built with."""
    bases = {one.rest.split()[0] for one in named("FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.1[1-9]\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", bases.pop())
    assert not named("ARG"), "nothing from outside decides on what is built"


def test_packages_are_pinned() -> None:
    """Broken: an image holds other packages than those that were tested."""
    assert "infra/lock" in copied()
    (run,) = [one.rest for one in named("RUN") if "pip install" in one.rest]
    *installs, own, check = [part for part in run.split("&& ") if "pip" in part]
    assert all("--require-hashes --no-deps" in install for install in installs)
    assert re.findall(r"infra/lock/(\w+)\.txt", run) == ["build", "services", "java"]
    assert ("--no-index --no-deps --no-build-isolation ." in own, "pip check" in check) == (True, True)


def test_services_run_as_nobody_in_particular() -> None:
    """Broken: whoever breaks into a service is root in its container, or can change the program."""
    last = [one for one in IMAGE if one.stage == LAST]
    users = [at for at, one in enumerate(last) if one.name == "USER"]
    assert [last[at].rest for at in users] == ["10001:10001"]
    assert any("useradd --uid 10001 " in one.rest for one in named("RUN", LAST)), (
        "Spark starts under no uid without a name"
    )
    assert {one.name for one in last[users[0] :]} <= {"USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert not [one for one in named("COPY", LAST) if "--chown" in one.rest or "--from=build" not in one.rest]


def test_nothing_private_gets_in() -> None:
    """Broken: a key, a data folder or the repository's history is published with the image."""
    assert not [source for source in copied() if not (REPOSITORY / source).exists() or source in (".", "*")]
    everything, *rules = [
        line for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert everything == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())
    last = max(at for at, rule in enumerate(rules) if rule.startswith("!"))
    for private in ("services/webhook.secret", "services/orders.key", "spark/keys.yaml"):
        assert any(fnmatch(private, rule) for rule in rules[last + 1 :]), private
    said = " ".join(one.rest for one in (*named("ENV"), *named("ARG")))
    assert not re.search(r"secret|token|passw|key", said, re.IGNORECASE)


def test_every_service_can_be_started() -> None:
    """Broken: a service has no fixed management port in the image, so that it counts as dead and is never ready."""
    assert json.loads(named("ENTRYPOINT", LAST)[0].rest) == ["python", "-m"]
    sections = {found[1].lower() for one in named("ENV", LAST) if (found := MANAGEMENT.fullmatch(one.rest))}
    assert sections == SECTIONS - {"fleet", "up"}
    comments = (FOLDER / "Dockerfile").read_text().split("FROM")[0]
    modules = {f"services.{path.parent.name}" for path in (REPOSITORY / "services").glob("*/__main__.py")}
    assert (modules | {"spark"}) - {"services.fleet"} == set(re.findall(r"services\.\w+|spark", comments))


async def test_the_health_check_tells_alive_from_dead() -> None:
    """Broken: Docker restarts services that are well, or leaves dead ones alone."""
    command = json.loads(named("HEALTHCHECK", LAST)[0].rest.partition("CMD ")[2])
    assert "9100" in command[-1]
    port = free_port()

    async def status() -> int:
        check = [part.replace("9100", str(port)) for part in command[1:]]
        devnull = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(sys.executable, *check, stderr=devnull)
        async with asyncio.timeout(600):
            return await process.wait()

    assert await status() != 0
    async with serve_management(f"127.0.0.1:{port}", lambda: "the broker is away"):
        assert await status() == 0
    async with serve_management(f"127.0.0.1:{port}", lambda: None, why_not_alive=lambda: "a batch is stuck"):
        assert await status() != 0
