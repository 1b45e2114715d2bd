"""Which tests share a worker under `pytest -n`, and which begin first.

A Kafka cluster, a Kinesis emulator and a Spark session each take seconds of CPU to start, so all tests that need one run in one
worker, one after another. So do those on a Spark cluster. Tests of a Spark session are two groups: as one they would still run
when all others have ended. The groups are the longest chains and begin first. More than half of a test of real processes is
waiting, so `make test` has more workers than the machine has cores. Every other test goes to the first free worker: tests of many
seconds first, so that no worker begins one of them when the others have nothing left to do.

xdist's own `--dist loadgroup` marks nodes by a name that pytest 9 does not look at any more, and so groups nothing.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

_SERVERS = ("kafka", "kinesis")
_ALSO_USE = {
    "kafka": (
        "tests/integration/test_existing_topics.py",
        "tests/faults/test_disasters.py::test_a_cluster_that_is_built_again",
    ),
    "kinesis": ("tests/integration/test_autoscaler.py",),
}
"""Their names do not say so."""
_OWN_SERVER = (
    "tests/integration/test_demo.py",
    "tests/integration/test_up.py",
    "tests/integration/test_registry_clients.py",
    "tests/faults/test_limits.py::test_full_disk_of_kafka",
    "tests/faults/test_links.py::test_slow_and_cut_link_to_kafka",
    "tests/faults/test_links.py::test_kafka_acknowledges_late",
    "tests/kafka/test_startup.py",
    "tests/kafka/test_time.py",
    "tests/kafka/test_producer_expiry.py",
)
"""Each of these tests starts a server for itself, or needs none."""
_OWN_SERVER_FOR_ALL = ("tests/kafka/test_rights.py", "tests/kafka/test_security.py")
"""The tests of such a file share one that no other file uses."""
_OWN_SPARK = "tests/spark/test_service.py"
"""Each of its tests starts Spark for itself."""
_SECOND_SPARK = "tests/spark/test_kinesis"
"""The files before it, with the only ones that need a Kafka, take as long as those from it on."""
_CLUSTERS = ("tests/spark/test_cluster.py", "tests/spark/test_executor_group.py", "tests/spark/test_kinesis_cluster.py")
"""Their transforms are processes of their own, with executors; the broker is shared by all of them."""
_LONGEST_FIRST = (*_CLUSTERS, _OWN_SPARK, "tests/simulation/", "tests/integration/", "tests/faults/", "tests/")
_LAST = "tests/unit/"


class SharedWorkers(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Groups go to the first free workers, largest first; everything else goes one by one, in order, to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return find_group(nodeid) or nodeid


def find_group(nodeid: str) -> str | None:
    """The group whose worker runs this test. None: any worker may."""
    if nodeid.startswith(_CLUSTERS):
        return "cluster"
    if nodeid.startswith("tests/spark/") and not nodeid.startswith(_OWN_SPARK):
        return "spark" if nodeid < _SECOND_SPARK else "second spark"
    if nodeid.startswith((_LAST, _OWN_SPARK, *_OWN_SERVER)):
        return None
    if nodeid.startswith(_OWN_SERVER_FOR_ALL):
        return nodeid.partition("::")[0]
    return next((server for server in _SERVERS if server in nodeid or nodeid.startswith(_ALSO_USE[server])), None)


def sort_for_workers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests as their workers shall run them. Without `-n` they stay as they are."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item.nodeid))


def _rank(nodeid: str) -> int:
    if nodeid.startswith(_LAST):
        return len(_LONGEST_FIRST)
    return next(rank for rank, folder in enumerate(_LONGEST_FIRST) if nodeid.startswith(folder))
