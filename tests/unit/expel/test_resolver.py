"""Name lookups: broken, one slow name server delays the deliveries to all others."""

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from services.core.http import resolver as resolver_module
from services.core.http.net_guard import NetPolicy
from services.core.http.resolver import AddressInfo, RefusedAddress, Resolver, find_addresses

PUBLIC: list[AddressInfo] = [(socket.AF_INET, 1, 6, "", ("93.184.216.34", 0))]


def blocking(release: threading.Event, calls: list[str]) -> Callable[..., list[AddressInfo]]:
    def lookup(host: str, *_arguments: object, **_options: object) -> list[AddressInfo]:
        calls.append(host)
        if host.startswith("slow"):
            release.wait(600)
        return PUBLIC

    return lookup


async def test_slow_names_do_not_delay_others() -> None:
    """Broken: fifty hosts whose name server hangs take all lookup threads."""
    release, calls = threading.Event(), list[str]()
    resolver = Resolver(blocking(release, calls))
    slow = [asyncio.create_task(resolver.resolve(f"slow{n}")) for n in range(50)]
    await asyncio.sleep(0)
    assert await resolver.resolve("quick") == PUBLIC
    assert not any(task.done() for task in slow)
    release.set()
    assert await asyncio.gather(*slow) == [PUBLIC] * 50


async def test_one_thread_per_host_and_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: retries against a host whose lookup hangs pile up threads, or wait as long as the name server likes."""
    monkeypatch.setattr(resolver_module, "LOOKUP_TIMEOUT", 0.05)
    release, calls = threading.Event(), list[str]()
    resolver = Resolver(blocking(release, calls))
    for _ in range(3):
        with pytest.raises(OSError, match="not found within"):
            await resolver.resolve("slow")
    async with asyncio.timeout(600):
        while not calls:
            await asyncio.sleep(0.01)
    assert calls == ["slow"]
    release.set()
    async with asyncio.timeout(600):
        while True:
            try:
                assert await resolver.resolve("slow") == PUBLIC
                break
            except OSError:
                await asyncio.sleep(0.01)


async def test_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a thousand unanswered names are a thousand threads."""
    monkeypatch.setattr(resolver_module, "MAX_THREADS", 2)
    release, calls = threading.Event(), list[str]()
    resolver = Resolver(blocking(release, calls))
    slow = [asyncio.create_task(resolver.resolve(f"slow{n}")) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="lookups of names"):
        await resolver.resolve("quick")
    release.set()
    await asyncio.gather(*slow)
    assert await resolver.resolve("quick") == PUBLIC


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
async def test_failed_lookups_are_os_errors(error: Exception) -> None:
    """Broken: an unknown name ends the lane instead of being a failed attempt."""

    def lookup(*_arguments: object, **_options: object) -> list[AddressInfo]:
        raise error

    with pytest.raises(OSError, match=r"unknown|label"):
        await Resolver(lookup).resolve("nowhere")
    with pytest.raises(OSError, match="no address"):
        await Resolver(lambda *_a, **_o: []).resolve("empty")


async def test_one_inside_answer_refuses_the_name() -> None:
    """Broken: a name with a public and an inside address reaches the inside one, by happy eyeballs or by chance."""
    mixed = [*PUBLIC, (socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0))]
    with pytest.raises(RefusedAddress):
        await find_addresses(Resolver(lambda *_a, **_o: mixed), "mixed", 443, NetPolicy())
    found = await find_addresses(Resolver(lambda *_a, **_o: PUBLIC), "public", 443, NetPolicy())
    assert [address for *_, address in found] == [("93.184.216.34", 443)]


async def test_addresses_are_not_looked_up() -> None:
    """Broken: an address written as a number goes to a name server, which may say anything."""
    calls = list[str]()
    resolver = Resolver(blocking(threading.Event(), calls))
    assert [a for *_, a in await find_addresses(resolver, "93.184.216.34", 80, NetPolicy())] == [("93.184.216.34", 80)]
    (found,) = await find_addresses(resolver, "2606:4700::1111", 443, NetPolicy())
    assert (found[0], found[4]) == (socket.AF_INET6, ("2606:4700::1111", 443))
    assert calls == []
