"""What the page says of groups and shards: as the broker knows it, whoever is a member."""

import asyncio
from pathlib import Path

from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pipe_file.pipes import load_pipes
from services.observer.backlogs import Backlogs
from services.observer.view import ShardView

PIPES = """streams: {s: {}, t: {}}
pipes: {late: {sources: [s], destinations: [{name: copy, stream: t}, {name: more, stream: t}]}}
"""


async def test_each_group_of_a_pipe_is_asked(tmp_path: Path) -> None:
    """Broken: the page shows no backlog, or that of another group, while events pile up."""
    (tmp_path / "pipes.yaml").write_text(PIPES)
    pipes = await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml")
    async with LogBroker.open(str(tmp_path / "log")) as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec("s", 3))
        (await producer.send_to("s", {1: [Record(None, b"{}", 0)] * 5, 2: [Record(None, b"{}", 0)]})).raise_first()
        await broker.admin.set_committed("late.copy", "s", {1: 4, 2: 0})
        backlogs, stopping = Backlogs(pipes, broker.admin), asyncio.Event()
        following = asyncio.create_task(backlogs.follow(stopping))
        async with asyncio.timeout(600):
            while len(backlogs.of("late")) < 2:
                await asyncio.sleep(0.01)
        stopping.set()
        await following
    copy, more = backlogs.of("late")
    assert copy == ShardView("s", "late.copy", 3, None, 0, 0)
    assert (more.group, more.partitions, more.furthest, more.records) == ("late.more", 3, 1, 6)
    assert more.millis > 0
    assert backlogs.of("other") == ()
