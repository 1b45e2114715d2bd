"""Three platforms, each with one group of two instances: a real supervisor, moto's AWS, a small Kubernetes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from aiohttp.test_utils import TestServer

from services.autoscaler.groups.drivers.contract import GroupDriver
from services.autoscaler.groups.drivers.open import open_driver
from tests.unit.autoscaler.drivers.fake_kubernetes import TOKEN, FakeCluster
from tests.unit.fleet.sample_service import LET_GO
from tests.unit.fleet.test_supervisor import DEADLINE, Bench

REGION = "eu-central-1"


@dataclass(frozen=True)
class Platform:
    """group: its name there. finish: lets what leaves be gone. shows_leaving: whether `look` meets it before that.
    ready: waits until all run, so that one that is told to leave drains."""

    driver: GroupDriver
    group: str
    finish: Callable[[], Awaitable[None]]
    shows_leaving: bool
    ready: Callable[[], Awaitable[None]]


async def _at_once() -> None:
    pass


@asynccontextmanager
async def fleet_platform(folder: Path) -> AsyncIterator[Platform]:
    bench = Bench(folder)
    async with bench.run("expel", mode="draining", drain=DEADLINE) as fleet, open_driver(f"fleet://{folder}") as driver:
        await fleet.resize("expel", 1, 2)
        await fleet.wait_ready()
        while not (folder / "fleet.json").exists():
            await asyncio.sleep(0.02)

        async def finish() -> None:
            (folder / LET_GO).touch()
            while any(process.leaving for process in fleet.processes):
                await asyncio.sleep(0.02)

        try:
            yield Platform(driver, "expel", finish, True, fleet.wait_ready)
        finally:
            (folder / LET_GO).touch()


@asynccontextmanager
async def kubernetes_platform(folder: Path) -> AsyncIterator[Platform]:
    cluster = FakeCluster("expel", 2)
    (folder / "token").write_text(TOKEN + "\n")
    async with TestServer(cluster.app()) as server:
        url = f"kubernetes://penstock?endpoint={server.make_url('/')}&account={folder}"
        async with open_driver(url) as driver:

            async def finish() -> None:
                cluster.finish()

            yield Platform(driver, "expel", finish, True, _at_once)


class Moto:
    """AWS in a thread of this process, with a network and a template from which instances can be launched."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        session = botocore.session.get_session()
        self.autoscaling, self._ec2 = (
            session.create_client(service, region_name=REGION, endpoint_url=endpoint)
            for service in ("autoscaling", "ec2")
        )
        self._subnet = self._ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        image = self._ec2.register_image(Name="ours", RootDeviceName="/dev/xvda")["ImageId"]
        made = self._ec2.create_launch_template(
            LaunchTemplateName="ours", LaunchTemplateData={"ImageId": image, "InstanceType": "t3.small"}
        )
        self._template = made["LaunchTemplate"]["LaunchTemplateId"]

    def make_group(self, name: str, size: int) -> None:
        """From 1 to 5 instances, with a hook for the drain."""
        self.autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            LaunchTemplate={"LaunchTemplateId": self._template, "Version": "1"},
            MinSize=1,
            MaxSize=5,
            DesiredCapacity=size,
            VPCZoneIdentifier=self._subnet,
        )
        self.autoscaling.put_lifecycle_hook(
            LifecycleHookName="drain",
            AutoScalingGroupName=name,
            LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
        )

    def drop_group(self, name: str) -> None:
        self.autoscaling.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True)


@asynccontextmanager
async def aws_platform(moto: Moto) -> AsyncIterator[Platform]:
    """moto ends an instance at once, hook or not."""
    await asyncio.to_thread(moto.make_group, "expel", 2)
    try:
        async with open_driver(f"aws://{REGION}?endpoint={moto.endpoint}") as driver:
            yield Platform(driver, "expel", _at_once, False, _at_once)
    finally:
        await asyncio.to_thread(moto.drop_group, "expel")
