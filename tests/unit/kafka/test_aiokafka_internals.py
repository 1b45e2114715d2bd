"""aiokafka's private parts that we use, as they were when they were read last."""

import hashlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import aiokafka.client
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher, FetchResult
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.record.default_records import DefaultRecordBatchBuilder

_READ = {
    AIOKafkaConsumer.start: "2f1ba7044332",
    AIOKafkaClient._metadata_update: "06dc51ed3e0d",
    AIOKafkaClient.send: "246b277687d7",
    Fetcher.__init__: "bf21ecb7e0f2",
    Fetcher._create_fetch_waiter: "61d840568746",
    Fetcher._get_actions_per_node: "1dab2cf937d1",
    Fetcher._proc_fetch_request: "59bf948fff47",
    Fetcher.fetched_records: "be4348896b9b",
    FetchResult.getall: "3e717e30de50",
    GroupCoordinator._do_heartbeat: "dc1d6632aaa6",
    GroupCoordinator._send_req: "fa4b12e914ce",
    GroupCoordinator.ensure_coordinator_known: "4dfb9ccd877a",
    GroupCoordinator.request_rejoin: "f70a261c91c3",
    GroupCoordinator.reset_generation: "537aa37c531b",
}


@pytest.mark.parametrize("part", _READ, ids=lambda part: part.__qualname__)
def test_a_part_of_aiokafka_is_the_one_that_was_read(part: Callable[..., Any]) -> None:
    """If it fails, aiokafka changed a part that `aiokafka_internals` uses: read it, then write its new digest here."""
    digest = hashlib.sha256(inspect.getsource(part).encode()).hexdigest()[:12]
    assert digest == _READ[part], f"{part.__qualname__} of aiokafka {version('aiokafka')}: {digest}"


def test_metadata_is_asked_for_without_creating_topics() -> None:
    """If it fails, a reader creates a topic again that was just deleted, empty."""
    request = aiokafka.client.MetadataRequest(["t"])
    assert request._allow_auto_topic_creation is False
    assert DefaultRecordBatchBuilder(2, 0, 0, 1, 0, 0, 1000).size() > 0
