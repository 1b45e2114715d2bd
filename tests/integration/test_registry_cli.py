"""`penstock schemas` as a step of CI: its exit codes, and JSON for programs."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from services.fleet.problem import CommandFailed
from services.fleet.verbs.schemas import Registry, ask
from tests.unit.registry.service import Client, running_registry
from tests.unit.registry.test_api import IDL, INCOMPATIBLE, V1

DEADLINE = 600


async def penstock(client: Client, *arguments: str | Path) -> tuple[int, str]:
    """The exit status, and what was printed on stdout."""
    command = [sys.executable, "-m", "services.fleet", "schemas", *map(str, arguments), "--registry", client.base]
    run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE):
        out, _ = await run.communicate()
    assert run.returncode is not None
    return run.returncode, out.decode()


async def test_exit_codes(tmp_path: Path) -> None:
    """Broken: a pipeline deploys a producer whose schema breaks its readers, or stops for one that breaks nobody."""
    worse = json.loads(INCOMPATIBLE)
    worse["fields"].append({"name": "more", "type": "long"})
    files = {"good.avsc": V1, "bad.avsc": INCOMPATIBLE, "worse.avsc": json.dumps(worse), "broken.avsc": "{"}
    for name, text in (files | {"shop.avdl": IDL}).items():
        await asyncio.to_thread((tmp_path / name).write_text, text)
    subject = ("--subject", "clicks-value")
    async with running_registry() as client:
        status, out = await penstock(client, "push", tmp_path / "good.avsc", *subject, "--json")
        assert (status, json.loads(out)["version"]) == (0, 1)
        status, out = await penstock(client, "check", tmp_path / "bad.avsc", *subject, "--json")
        assert (status, json.loads(out)["differences"][0]["path"]) == (1, "/fields/1")
        status, out = await penstock(client, "push", tmp_path / "bad.avsc", *subject)
        assert status == 1
        assert "/fields/1" in out
        assert "fix" in out
        assert "\x1b" not in out
        status, out = await penstock(client, "check", tmp_path / "worse.avsc", *subject)
        together = out.splitlines()[-2:]
        assert (status, "fix" in out) == (1, False)
        assert [json.loads(step)["path"] for step in together] == ["/fields/1/default", "/fields/2/default"]
        assert (await penstock(client, "push", tmp_path / "broken.avsc", *subject))[0] == 2
        assert (await penstock(client, "diff", "clicks-value@1", tmp_path / "bad.avsc"))[0] == 1
        status, out = await penstock(client, "check", tmp_path / "shop.avdl", "--json")
        assert (status, json.loads(out)["compatible"]) == (0, True)
        assert await client.ask("GET", "/subjects") == ["clicks-value"]
        assert (await penstock(client, "push", tmp_path / "shop.avdl"))[0] == 0
        status, out = await penstock(client, "show", "clicks-value@latest")
        assert (status, json.loads(out)) == (0, json.loads(V1))
        with pytest.raises(CommandFailed, match="there is no such subject") as caught:
            await ask(Registry(client.base), "GET", "/v1/subjects/clicks")
        assert "penstock schemas list" in caught.value.remedy
        status, out = await penstock(client, "push", tmp_path / "good.avsc", "--subject", "click-value")
        assert out.startswith("click-value version 1, ")
        assert "a new subject" in out, "the name may be misspelt"
