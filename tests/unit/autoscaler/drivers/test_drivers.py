"""What one driver alone can meet."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from services.autoscaler.groups.drivers import contract
from services.autoscaler.groups.drivers.aws import AwsDriver
from services.autoscaler.groups.drivers.contract import Away, DriverError, Refused, SizeChanged
from services.autoscaler.groups.drivers.open import open_driver
from tests.unit.autoscaler.drivers.fake_kubernetes import TOKEN, FakeCluster


class FakeAutoScaling:
    """What moto does not play: instances that leave slowly, groups without a hook."""

    def __init__(self, states: list[str], hooks: list[str], size: int) -> None:
        self.states, self.hooks, self.size = states, hooks, size
        self.ended: list[str] = []
        self.tags: list[dict[str, str]] = []

    async def describe_auto_scaling_groups(self, **_: Any) -> dict[str, Any]:
        instances = [{"InstanceId": f"i-{n}", "LifecycleState": state} for n, state in enumerate(self.states)]
        found = {"DesiredCapacity": self.size, "MinSize": 1, "MaxSize": 4, "Instances": instances, "Tags": self.tags}
        return {"AutoScalingGroups": [found]}

    async def set_instance_health(self, **order: Any) -> None:
        assert order["HealthStatus"] == "Unhealthy"
        self.ended.append(order["InstanceId"])

    async def set_desired_capacity(self, **order: Any) -> None:
        self.size = order["DesiredCapacity"]

    async def describe_lifecycle_hooks(self, **_: Any) -> dict[str, Any]:
        return {"LifecycleHooks": [{"LifecycleTransition": f"autoscaling:EC2_INSTANCE_{hook}"} for hook in self.hooks]}

    async def terminate_instance_in_auto_scaling_group(self, **order: Any) -> None:
        assert order["ShouldDecrementDesiredCapacity"]
        self.ended.append(order["InstanceId"])

    async def describe_instances(self, Filters: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803 as the SDK has it
        names = Filters[0]["Values"]
        ages = {name: f"2026-11-{20 - int(name[2:]):02}" for name in names}
        found = [{"InstanceId": name, "LaunchTime": ages[name], "PrivateIpAddress": "10.0.0.7"} for name in names]
        return {"Reservations": [{"Instances": found}]}


async def test_aws_never_ends_an_instance_that_cannot_drain() -> None:
    """Broken: without a hook EC2 pulls the plug in the middle of deliveries."""
    fake = FakeAutoScaling(["InService"] * 2, ["LAUNCHING"], 2)
    with pytest.raises(Refused, match="lifecycle hook"):
        await AwsDriver(fake, fake, 9100).resize("expel", 2, 1)
    assert not fake.ended


async def test_aws_waits_for_who_leaves_and_then_ends_the_youngest() -> None:
    """Broken: two drain at once, or the instance with the warmest caches goes."""
    fake = FakeAutoScaling(["InService", "InService", "Terminating:Wait"], ["TERMINATING"], 2)
    driver = AwsDriver(fake, fake, 9100)
    assert [one.leaving for one in (await driver.describe("expel")).members] == [False, False, True]
    with pytest.raises(SizeChanged):
        await driver.resize("expel", 2, 1)
    fake.states.pop()
    await driver.resize("expel", 2, 1)
    assert fake.ended == ["i-0"]


async def test_aws_has_one_attempt_for_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a platform that answers slowly, page by page, holds up every group's look."""
    monkeypatch.setattr(contract, "TIMEOUT_S", 0.01)
    fake = FakeAutoScaling(["InService"], ["TERMINATING"], 1)

    async def hang(**_: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(fake, "describe_instances", hang)
    async with asyncio.timeout(600):
        with pytest.raises(Away, match="within"):
            await AwsDriver(fake, fake, 9100).describe("expel")
        monkeypatch.setattr(fake, "describe_auto_scaling_groups", hang)
        with pytest.raises(Away, match="within"):
            await AwsDriver(fake, fake, 9100).resize("expel", 1, 2)


async def test_aws_stays_within_the_bounds_of_the_group() -> None:
    """Broken: the size that we believe in is not the one that AWS has."""
    fake = FakeAutoScaling(["InService"] * 4, ["TERMINATING"], 4)
    with pytest.raises(Refused, match="allows 1 to 4"):
        await AwsDriver(fake, fake, 9100).resize("expel", 4, 5)


async def test_aws_does_not_wait_for_a_leaver_that_has_failed() -> None:
    """Broken: an instance that hangs in Terminating:Wait blocks its group for as long as the hook's time limit, up to days."""
    fake = FakeAutoScaling(["InService", "InService", "Terminating:Wait"], ["TERMINATING"], 2)
    driver = AwsDriver(fake, fake, 9100)
    await driver.resize("expel", 2, 1, {"i-2"})
    await driver.replace("expel", "i-1", {"i-2"})
    assert fake.ended == ["i-0", "i-1"]
    with pytest.raises(SizeChanged):
        await driver.replace("expel", "i-2", {"i-2"})


async def test_aws_takes_back_an_order_before_it_ends_an_instance() -> None:
    """Broken: AWS has no machine for the third instance, and one of the two that work is ended."""
    fake = FakeAutoScaling(["InService"] * 2, ["TERMINATING"], 3)
    await AwsDriver(fake, fake, 9100).resize("expel", 3, 2)
    assert (fake.size, fake.ended) == (2, [])


async def test_a_person_freezes_a_group_on_its_platform(tmp_path: Path) -> None:
    """Broken: a tag or annotation that a person set at night is ignored; or a missing right stops all scaling."""
    fake = FakeAutoScaling(["InService"], ["TERMINATING"], 1)
    cluster = FakeCluster("expel", 2)
    (tmp_path / "token").write_text(TOKEN)
    async with (
        TestServer(cluster.app()) as server,
        open_driver(f"kubernetes://penstock?endpoint={server.make_url('/')}&account={tmp_path}") as kubernetes,
    ):
        for text, frozen in ((None, None), ("they debug", "they debug"), ("false", None), ("", "no reason given")):
            fake.tags = [] if text is None else [{"Key": contract.FROZEN, "Value": text}]
            cluster.annotations = {} if text is None else {contract.FROZEN: text}
            for driver in (AwsDriver(fake, fake, 9100), kubernetes):
                assert (await driver.describe("expel")).frozen == frozen
        cluster.annotations = None
        group = await kubernetes.describe("expel")
        assert (group.size, group.frozen, "deployments (get)" in str(group.problem)) == (2, None, True)


@pytest.mark.parametrize(("status", "kind"), [(403, Refused), (429, Away), (503, Away)])
async def test_kubernetes_errors(tmp_path: Path, status: int, kind: type[DriverError]) -> None:
    """Broken: a missing right is asked for again and again without a word, or a busy API server is given up."""
    cluster = FakeCluster("expel", 2, fails=status)
    (tmp_path / "token").write_text(TOKEN)
    async with (
        TestServer(cluster.app()) as server,
        open_driver(f"kubernetes://penstock?endpoint={server.make_url('/')}&account={tmp_path}") as driver,
    ):
        with pytest.raises(kind, match="no"):
            await driver.describe("expel")


async def test_kubernetes_needs_a_cluster_or_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: outside of a cluster the reason is a KeyError."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Refused, match="no Kubernetes cluster"):
        async with open_driver("kubernetes://penstock"):
            pass


@pytest.mark.parametrize(
    "url",
    [
        "expel",
        "fleet://host/data",
        "fleet:",
        "aws://",
        "aws://r?port=0",
        "kubernetes://n?prt=1",
        "kubernetes://n/x",
        "kubernetes://n?endpoint=http://10.0.0.1:8001",
        "kubernetes://n?endpoint=10.0.0.1:8001",
        "x://y",
    ],
)
def test_urls_that_name_no_driver(url: str) -> None:
    """Broken: a slip in a URL is found out by the first decision."""
    with pytest.raises(ValueError):
        open_driver(url)
