"""`penstock rate` on this machine, in a few short steps: it rates both services, and writes what the autoscaler reads."""

import asyncio
import json
from pathlib import Path

import pytest

from services.autoscaler.settings import AutoscalerSettings
from services.core.process.settings import load_settings
from tests.integration.fleet_process import Desk


@pytest.mark.parametrize("service", ["expel", "ingest"])
async def test_rates_and_sets_the_target(tmp_path: Path, service: str, wheel_programs: Path) -> None:
    """Broken: a service cannot be rated, or only in a clone; the instance is measured wrong, or is left running."""
    desk = Desk(tmp_path, wheel_programs)
    config = tmp_path / "penstock.yaml"
    config.write_text(f"autoscaler:\n  groups:\n    {service}: {{max: 7}}  # ours\n")
    short = ("--step", "3s", "--first", "50", "--batch", "1", "--size", "2KB")  # a busy machine keeps up with so few
    said = await desk.run("rate", service, *short, "--config", config, "--json")
    assert said.process.returncode == 0, said.err
    found = json.loads(said.out)
    assert found["rate"] >= 10
    assert 0 < found["target_cpu"] < found["plateau_cpu"] < 3
    kept = [step for step in found["steps"] if step["kept"]]
    assert all(step["done"] > 0 and step["cpu"] > 0 for step in kept)
    settings = await asyncio.to_thread(load_settings, AutoscalerSettings, ["--config", str(config)], {})
    group = settings.groups[service]
    assert (group.max, group.target_cpu) == (7, found["target_cpu"])
    assert "# ours" in config.read_text()
    assert f"autoscaler.groups.{service}.target_cpu is set" in said.err


async def test_mistakes(tmp_path: Path) -> None:
    """Broken: a slip is found out after a minute of load."""
    desk = Desk(tmp_path)
    said = await desk.run("rate", "observer")
    assert said.process.returncode == 2
    assert "Try: one of expel, ingest" in said.err
    assert (await desk.run("rate", "expel", "--step", "5")).process.returncode == 2
