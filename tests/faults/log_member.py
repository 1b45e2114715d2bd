"""A process to kill or freeze: one member of group "g", with a lease that no test waits for.

python -m tests.faults.log_member FOLDER TOPIC LEASE
Says {"owns": n} once it owns something; then, for each line on standard input, tries to commit offset 0 of all it owned
and says {"refused": n}, how many partitions were refused.
"""

import asyncio
import sys

from services.core.broker.errors import NotOwner
from services.core.broker.log import LogBroker
from services.core.broker.log.membership import Timing
from tests.contract.traffic import ignore_revoke
from tests.faults.log_child import say


async def be_a_member(folder: str, topic: str, lease: float) -> None:
    """Until standard input ends."""
    async with (
        LogBroker.open(folder, timing=Timing(lease=lease)) as broker,
        broker.consumer("g", [topic], start="earliest", on_revoke=ignore_revoke) as consumer,
    ):
        owned = consumer.assignment()
        say({"owns": len(owned)})
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                await consumer.commit(dict.fromkeys(owned, 0))
            except NotOwner as error:
                say({"refused": len(error.partitions)})
            else:
                say({"refused": 0})


if __name__ == "__main__":
    asyncio.run(be_a_member(sys.argv[1], sys.argv[2], float(sys.argv[3])))
