"""Orders to the group of executors while Spark answers late. test_executor_group.py has a real Spark."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.group_control import SizeRefused
from spark.cluster import executor_group
from spark.cluster.executor_group import GROUP, ExecutorGroup
from spark.cluster.master import Executors, MasterKind
from spark.java import Executor
from tests.support.clock import Clock


class Java:
    """Its executors, and what they were asked. It answers an order once `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executors = [Executor(name, 0.0, 0, 0.0) for name in ("0", "1", "2")]
        self.answers, self.left, self.orders = threading.Event(), list[str](), list[int]()
        monkeypatch.setattr(executor_group, "list_executors", lambda _session: list(self.executors))
        monkeypatch.setattr(executor_group, "live_executors", lambda _session: [one.name for one in self.executors])
        monkeypatch.setattr(executor_group, "order_executors", self._order)
        monkeypatch.setattr(executor_group, "leave_executor", self._leave)

    def _order(self, _session: object, size: int) -> bool:
        self.orders.append(size)
        return True

    def _leave(self, _session: object, name: str, *, is_replaced: bool) -> bool:
        self.answers.wait(600)
        self.left.append(name)
        return True


async def test_a_late_order_is_the_only_one_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: Spark is slow, the autoscaler repeats its order for one executor less, and two leave."""
    java, group = Java(monkeypatch), ExecutorGroup(MasterKind.STANDALONE, Executors(1, 3, 1, 1, "python"))
    session: Any = object()
    group.open(session)
    monkeypatch.setattr(executor_group, "ANSWER_S", 0.05)
    with pytest.raises(SizeRefused, match="has not answered") as refused:
        await group.resize(GROUP, 3, 2, ())
    monkeypatch.setattr(executor_group, "ANSWER_S", 600.0)
    assert refused.value.again
    with pytest.raises(SizeRefused, match="another change is under way"):
        await group.resize(GROUP, 3, 2, ())
    with pytest.raises(SizeRefused, match="another change is under way"):
        await group.replace(GROUP, "0")
    assert (await group.describe(GROUP)).size == 3
    java.answers.set()
    async with asyncio.timeout(600):
        while (state := await group.describe(GROUP)).size == 3:
            await asyncio.sleep(0.01)
    assert (state.size, [one.name for one in state.instances if one.leaving], java.left) == (2, ["2"], ["2"])
    with pytest.raises(SizeRefused, match="2 executors are ordered, not 3"):
        await group.resize(GROUP, 3, 2, ())


async def test_a_long_task_is_no_leap_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a task of a minute ends, its executor of one core seems to use sixty, and the group grows to its most."""
    java, group = Java(monkeypatch), ExecutorGroup(MasterKind.STANDALONE, Executors(1, 3, 2, 1, "python"))
    session: Any = object()
    group.open(session)
    clock, cpu = Clock(), list[float]()
    monkeypatch.setattr(executor_group, "time", SimpleNamespace(time=clock, monotonic=clock))
    for clock.now, busy in ((1000.0, 5.0), (1001.0, 65.0), (1011.0, 66.0), (990.0, 66.0), (1031.0, 66.0)):
        java.executors = [Executor("0", 998.0, 1, busy)]
        (one,) = (await group.describe(GROUP)).instances
        assert one.figures is not None
        cpu.append(one.figures.cpu)
    assert cpu == [4.0, 6.0, 26.0, 26.0, 66.0]


async def test_a_driver_that_stands_by_holds_no_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a second driver takes the cores that the first one needs, or gets none when it takes over."""
    java, group = Java(monkeypatch), ExecutorGroup(MasterKind.STANDALONE, Executors(1, 3, 1, 1, "python"))
    java.answers.set()
    session: Any = object()
    group.open(session)
    ordered = list[str]()
    group.on_leave = ordered.append
    await group.set_standby(False)
    assert (java.orders, java.left) == ([], [])
    for _ in range(2):
        await group.set_standby(True)
        assert (java.orders, java.left) == ([0], ["0", "1", "2"])
    for request in (group.describe(GROUP), group.resize(GROUP, 3, 2, ()), group.replace(GROUP, "0")):
        with pytest.raises(SizeRefused, match="stands by") as refused:
            await request
        assert refused.value.again
    java.executors = [Executor("3", 0.0, 0, 0.0)]  # a master that was restarted has forgotten the order
    await group.set_standby(True)
    assert (java.orders, java.left[3:]) == ([0, 0], ["3"])
    assert ordered == java.left, "they count as lost"
    java.executors = []
    for _ in range(2):
        await group.set_standby(False)
        assert java.orders == [0, 0, 3]
    assert (await group.describe(GROUP)).size == 3


@pytest.mark.parametrize("kind", [MasterKind.STANDALONE, MasterKind.YARN])
async def test_what_was_forgotten_is_ordered_again(monkeypatch: pytest.MonkeyPatch, kind: MasterKind) -> None:
    """Broken: after its first order to shrink Spark replaces no executor that is lost, because it counts down from 0; or YARN
    starts another application master, which gives the number of the start, whatever was ordered."""
    java, group = Java(monkeypatch), ExecutorGroup(kind, Executors(1, 3, 1, 1, "python"))
    java.answers.set()
    session: Any = object()
    await group.set_standby(False)
    group.open(session)
    if kind is MasterKind.YARN:
        await group.resize(GROUP, 1, 3, ())
    await group.resize(GROUP, 3, 2, ())
    assert (java.orders[-1], java.left) == (3, ["2"])
    java.executors = java.executors[:2]
    before = list(java.orders)
    monkeypatch.setattr(executor_group, "POLL_EVERY_S", -1.0)
    await group.set_standby(False)
    assert java.orders == before, "it orders although none is missing"
    java.executors = java.executors[:1]
    monkeypatch.setattr(executor_group, "POLL_EVERY_S", 600.0)
    await group.set_standby(False)
    assert java.orders == before, "it looks twice a second"
    monkeypatch.setattr(executor_group, "POLL_EVERY_S", -1.0)
    await group.set_standby(False)
    assert java.orders == [*before, 2]
