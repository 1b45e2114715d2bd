"""Which tests share a worker under `pytest -n`: those on Kafka one, for one cluster is enough, and so Kinesis and Spark.

xdist's own `--dist loadgroup` marks nodes by a name that pytest 9 does not look at any more, and so groups nothing.
"""

from xdist.scheduler import LoadScopeScheduling


class SharedWorkers(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Groups go to the first free workers, largest first; everything else goes one by one to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        for server in ("kafka", "kinesis"):
            if server in nodeid and not nodeid.startswith("tests/unit/"):
                return server
        return "spark" if nodeid.startswith("tests/spark/") else nodeid
