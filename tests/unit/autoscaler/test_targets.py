"""Whom the autoscaler asks: a list in a file, or all addresses of a name."""

import socket
from pathlib import Path
from typing import Any

import pytest

from services.autoscaler.settings import AutoscalerSettings
from services.core.process.settings import load_settings
from services.core.process.targets import NoTargets, Target, find_targets, read_targets
from services.core.yaml_source import BadConfiguration


def test_targets_of_prometheus_and_of_a_fleet(tmp_path: Path) -> None:
    """Broken: the autoscaler waits for ever beside a list that it was given."""
    file = tmp_path / "targets.json"
    file.write_text('[{"targets": ["a:1", "b:2"], "labels": {"component": "ingest"}}]')
    assert read_targets(file) == (Target("a:1", "ingest"), Target("b:2", "ingest"))
    file.write_text('{"processes": [{"management": "c:3"}, {"management": ""}]}')
    assert read_targets(file) == (Target("c:3"),)
    for text in ("[1]", "{}", "nothing"):
        file.write_text(text)
        with pytest.raises(NoTargets, match="not a list of targets"):
            read_targets(file)
    with pytest.raises(NoTargets, match="Try:"):
        read_targets(tmp_path / "absent")


@pytest.mark.parametrize("where", ["127.0.0.1:9100", "[::1]:9100"])
async def test_a_name_stands_for_its_addresses(where: str) -> None:
    """Broken: on Kubernetes the autoscaler finds no pods, and streams keep their shards or partitions."""
    assert await find_targets(f"dns://{where}") == (Target(where),)


async def test_a_process_with_two_families_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: on a network with IPv4 and IPv6 every load counts twice, and streams get twice the shards."""

    def resolve(_host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        four = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("10.0.0.2", "10.0.0.1")]
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0)), *four, *four]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [one.address for one in await find_targets("dns://fleet:9100")] == ["10.0.0.1:9100", "10.0.0.2:9100"]


async def test_a_name_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the autoscaler ends while no pod runs, or says nothing of a name that is spelt wrongly."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(NoTargets, match=r"fleet has no address.*Try:"):
        await find_targets("dns://fleet:9100")


@pytest.mark.parametrize("where", ["dns://fleet", "dns://fleet:0", "dns://"])
def test_a_name_needs_a_port(where: str) -> None:
    """Broken: a mistake in a setting is found when a stream is full already."""
    with pytest.raises(BadConfiguration, match="targets"):
        load_settings(AutoscalerSettings, ["--broker", "log:/x", "--targets", where], {})
