"""The doubt trial for minutes: make soak ARGS="--doubt --minutes 10"

Followers are frozen and thawed, brokers and controllers lose each other, ingest is killed and its clients' connections are lost,
while batches of equal size are sent over HTTP. Exit status 1 when an answer, a topic or a report is wrong (`doubt_oracle`), or
when nothing was ever in doubt.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import permutations
from pathlib import Path

from services.core.jvm.kafka import KafkaCluster, Node, free_ports, server_properties
from services.fleet.observer_client import Observer, get_json
from tests.faults.doubt import PIPE, DoubtTrial, open_doubt
from tests.faults.doubt_oracle import Verdict, explain, judge
from tests.faults.fleet import Service, wait_until
from tests.support.fault_table import HEAD
from tests.support.ports import free_port
from tests.support.tcp_proxy import open_proxy

FREEZE_S = (7.5, 30.0)
"""The controller misses a node after 6 s: then its leader has too few replicas in sync. An event is given up after 12 s, so the
events after it are refused when the freeze lasts for twice as long."""
SETTLE_S = 300.0
"""The observer reads what a killed ingest stored and did not report."""


class LinkedCluster(KafkaCluster):
    """Three nodes that reach each other through proxies only. links: the port for the broker of each node. quorum: (from, to) the
    ports for the controllers."""

    def __init__(self, folder: Path) -> None:
        often = {"leader.imbalance.check.interval.seconds": "10", "producer.id.expiration.check.interval.ms": "5000"}
        super().__init__(folder, settings={"replica.lag.time.max.ms": "4000", **often})
        taken = {port for one in self.brokers.values() for port in (one.node.port, one.node.controller_port)}
        free = [port for port in free_ports(len(taken) + len(self.brokers)) if port not in taken]
        self.inner = dict(zip(self.brokers, free, strict=False))
        self.links: dict[int, int] = {}
        self.quorum: dict[tuple[int, int], int] = {}

    def properties(self, node: Node, nodes: Sequence[Node]) -> str:
        """As without links, with a listener of its own for other brokers, that they hear of as the link's port."""
        shared = self.brokers[node.node_id].address
        listeners = f"BROKER://{shared},INNER://127.0.0.1:{self.inner[node.node_id]}"
        more = {
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{node.controller_port}",
            "advertised.listeners": f"BROKER://{shared},INNER://127.0.0.1:{self.links[node.node_id]}",
            "listener.security.protocol.map": "BROKER:PLAINTEXT,INNER:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INNER",
            "controller.quorum.voters": ",".join(f"{to.node_id}@127.0.0.1:{self._voter(node, to)}" for to in nodes),
        }
        return server_properties(node, nodes, str(self.brokers[node.node_id].data), {**self.settings, **more})

    def _voter(self, node: Node, to: Node) -> int:
        return self.quorum.get((node.node_id, to.node_id), to.controller_port)


async def soak(minutes: float, seed: int, folder: Path) -> int:
    """Run it on a Kafka of its own and print the row. The exit status."""
    cluster = LinkedCluster(folder / "kafka")
    async with AsyncExitStack() as stack:
        links = {n: await stack.enter_async_context(open_proxy("127.0.0.1", p)) for n, p in cluster.inner.items()}
        cluster.links = {node: link.port for node, link in links.items()}
        ports = {node: one.node.controller_port for node, one in cluster.brokers.items()}
        quorum = {
            pair: await stack.enter_async_context(open_proxy("127.0.0.1", ports[pair[1]]))
            for pair in permutations(ports, 2)
        }
        cluster.quorum = {pair: link.port for pair, link in quorum.items()}
        stack.callback(cluster.stop, grace_s=0)
        await asyncio.to_thread(cluster.start)
        trial = await stack.enter_async_context(open_doubt(cluster, folder, seed))
        trial.links, trial.quorum = links, quorum
        listen = f"127.0.0.1:{free_port()}"
        shared = ["--broker", f"kafka://{cluster.bootstrap}", "--pipes", str(trial.pipes), "--listen", listen]
        await trial.fleet.add(Service("observer", "services.observer", shared, folder))
        async with trial.load():
            await trial.strike_until(time.monotonic() + 60 * minutes, random.Random(seed), FREEZE_S)
        await trial.stop_ingest()
        verdict = await _settle(trial, Observer(listen))
        more = await explain(trial, verdict.twice[:20]) if verdict.twice else []
    print(f"{minutes:g} minutes, faults {dict(trial.faults)}, seed {seed}\n{HEAD}\n{verdict.row.text()}")
    for text in [*verdict.complaints[:500], *more]:
        print("FAILED:", text)
    return 1 if verdict.complaints else 0


async def _settle(trial: DoubtTrial, observer: Observer) -> Verdict:
    """The verdict, once the observer has made up for the reports of those that were killed, and counts what the reports say."""
    verdict: list[Verdict] = []

    async def holds() -> bool:
        verdict[:] = [await judge(trial)]
        rows = (await get_json(observer, f"/v1/pipes/{PIPE}/loss", {"from": "23h"}))["minutes"]
        if (counted := sum(row["accepted"] for row in rows)) != verdict[0].accepted:
            verdict[0].complaints.append(f"the observer counts {counted} accepted, the reports {verdict[0].accepted}")
        return not verdict[0].complaints

    with suppress(AssertionError):
        await wait_until(holds, SETTLE_S)
    return verdict[0]


def run(minutes: float, seed: int) -> int:
    """The exit status; what the services said is kept where it is not 0."""
    with tempfile.TemporaryDirectory(prefix="penstock-doubt-", ignore_cleanup_errors=True) as folder:
        status = asyncio.run(soak(minutes, seed, Path(folder)))
        if status:
            kept = Path(f"{folder}-kept")
            Path(folder).rename(kept)
            print(f"what the services said is in {kept}", file=sys.stderr)
            Path(folder).mkdir()
        return status
