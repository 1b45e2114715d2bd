"""Reads the metrics of a fleet's processes from their management ports."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from services.core.lag import LagHistogram

MAX_BODY = 32_000_000
"""The most bytes of one answer."""

Labels = frozenset[tuple[str, str]]


@dataclass(slots=True)
class Sample:
    """Metrics added up over processes. at: monotonic seconds. lags: merged without loss. unready: the reason, by address."""

    at: float
    values: dict[tuple[str, Labels], float] = field(default_factory=dict)
    lags: dict[tuple[str, Labels], LagHistogram] = field(default_factory=dict)
    unready: dict[str, str] = field(default_factory=dict)

    def children(self, metric: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each child of a metric with these labels."""
        wanted, values = set(labels.items()), self.values.items()
        return [(dict(found), value) for (name, found), value in values if name == metric and wanted <= found]

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a metric over all children with these labels; 0 when there is none."""
        return sum(value for _, value in self.children(metric, **labels))

    def lag(self, metric: str, **labels: str) -> LagHistogram:
        """The merged histogram of all children with these labels."""
        merged, wanted = LagHistogram(), set(labels.items())
        for (name, found), histogram in self.lags.items():
            if name == metric and wanted <= found:
                merged.merge(histogram)
        return merged


async def scrape(addresses: Iterable[str], limit: float = 5.0) -> Sample:
    """Read all management addresses at once. Takes up to `limit` seconds."""
    sample = Sample(time.monotonic())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit)) as session:
        await asyncio.gather(*(_scrape_one(session, address, sample) for address in addresses))
    return sample


async def _scrape_one(session: aiohttp.ClientSession, address: str, sample: Sample) -> None:
    try:
        ready = orjson.loads(await _get(session, f"http://{address}/readyz", (200, 503)))
        metrics = (await _get(session, f"http://{address}/metrics", (200,))).decode(errors="replace")
        lags = orjson.loads(await _get(session, f"http://{address}/lags", (200,)))
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
        sample.unready[address] = "does not answer"
        return
    if not ready.get("ready"):
        sample.unready[address] = str(ready.get("reason") or "not ready")
    _add_values(sample, metrics)
    _add_lags(sample, lags)


async def _get(session: aiohttp.ClientSession, url: str, wanted: tuple[int, ...]) -> bytes:
    """The body. Follows no redirect. Raises aiohttp.ClientError, also for another status and for a body over MAX_BODY."""
    async with session.get(url, allow_redirects=False) as response:
        if response.status not in wanted:
            raise aiohttp.ClientPayloadError(f"status {response.status}")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_BODY:
                raise aiohttp.ClientPayloadError(f"more than {MAX_BODY} bytes")
        return bytes(body)


def _add_values(sample: Sample, text: str) -> None:
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge"):
            continue
        for one in family.samples:
            if not one.name.endswith("_created"):
                key = (one.name, frozenset(one.labels.items()))
                sample.values[key] = sample.values.get(key, 0.0) + one.value


def _add_lags(sample: Sample, families: dict[str, list[dict[str, object]]]) -> None:
    for name, children in families.items():
        for child in children:
            labels = child["labels"]
            assert isinstance(labels, dict)
            histogram = sample.lags.setdefault((name, frozenset(labels.items())), LagHistogram())
            histogram.merge(LagHistogram.load(child))
