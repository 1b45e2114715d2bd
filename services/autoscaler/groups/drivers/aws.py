"""Groups as AWS Auto Scaling groups.

An instance must drain before it ends, so a group shrinks only if it has a lifecycle hook for
EC2_INSTANCE_TERMINATING. The instance then stays in Terminating:Wait until the hook is completed, by whatever stopped
the service on it. Needs the rights autoscaling:DescribeAutoScalingGroups, DescribeLifecycleHooks, SetDesiredCapacity,
TerminateInstanceInAutoScalingGroup, SetInstanceHealth and ec2:DescribeInstances. Credentials come from the SDK's own chain.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import botocore.session
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError

from services.autoscaler.groups.drivers.contract import (
    FROZEN,
    TIMEOUT_S,
    Away,
    Group,
    GroupNotFound,
    Member,
    Refused,
    SizeChanged,
    check_step,
    frozen_by,
    one_attempt,
)

_SERVICES = ("autoscaling", "ec2")
_LATER = frozenset(
    [
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "InternalFailure",
        "Unavailable",
    ]
)
_BUSY = frozenset({"ScalingActivityInProgress", "ResourceContention", "ResourceInUse"})
_GONE = ("Terminated", "Detached")
_PAGE = 100


class AwsDriver:
    """The Auto Scaling groups of one region."""

    def __init__(self, autoscaling: Any, ec2: Any, port: int) -> None:
        self._autoscaling, self._ec2, self._port = autoscaling, ec2, port

    @one_attempt("AWS")
    async def describe(self, group: str) -> Group:
        found = await self._describe(group)
        members = [one for one in found["Instances"] if one["LifecycleState"] not in _GONE]
        known = await self._instances([one["InstanceId"] for one in members])
        return Group(
            found["DesiredCapacity"],
            tuple(self._member(one, known.get(one["InstanceId"], {})) for one in members),
            frozen_by(next((tag["Value"] for tag in found.get("Tags", ()) if tag["Key"] == FROZEN), None)),
        )

    @one_attempt("AWS")
    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.resize`; without a failed one the youngest leaves."""
        check_step(seen, size)
        found = await self._describe(group)
        if found["DesiredCapacity"] != seen:
            raise SizeChanged(f"Auto Scaling group {group} has size {found['DesiredCapacity']}, not {seen}")
        low, high = found["MinSize"], found["MaxSize"]
        if not low <= size <= high:
            raise Refused(
                f"Auto Scaling group {group} allows {low} to {high} instances, not {size}. "
                "Try: change its limits, or min and max of the group in the autoscaler's settings"
            )
        if size < seen:
            staying = await self._staying(group, found["Instances"], failed)
            if not staying:
                raise SizeChanged(f"Auto Scaling group {group} has no instances yet")
            if len(staying) >= seen:
                await self._terminate_one(staying, failed)
                return
        await _call(  # more; or one fewer of those that AWS has not started yet
            self._autoscaling.set_desired_capacity(
                AutoScalingGroupName=group, DesiredCapacity=size, HonorCooldown=False
            )
        )

    @one_attempt("AWS")
    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.replace`: AWS replaces an instance that is reported as unhealthy, after its drain."""
        found = await self._describe(group)
        if instance not in await self._staying(group, found["Instances"], failed):
            raise SizeChanged(f"instance {instance} is not in Auto Scaling group {group}, or leaves already")
        await _call(
            self._autoscaling.set_instance_health(
                InstanceId=instance, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
            )
        )

    async def _staying(self, group: str, instances: Sequence[dict[str, Any]], failed: Collection[str]) -> list[str]:
        """The instances of which one may leave now. Raises SizeChanged, Refused."""
        if any(_leaves(one) and one["InstanceId"] not in failed for one in instances):
            raise SizeChanged(f"an instance of Auto Scaling group {group} is leaving already")
        hooks = (await _call(self._autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=group)))["LifecycleHooks"]
        if not any(hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING" for hook in hooks):
            raise Refused(
                f"Auto Scaling group {group} would end an instance without its drain. "
                "Try: a lifecycle hook for autoscaling:EC2_INSTANCE_TERMINATING"
            )
        return [one["InstanceId"] for one in instances if one["LifecycleState"] not in _GONE and not _leaves(one)]

    async def _terminate_one(self, staying: Sequence[str], failed: Collection[str]) -> None:
        known = await self._instances(staying)
        youngest = max(staying, key=lambda name: (name in failed, str(known.get(name, {}).get("LaunchTime", "")), name))
        await _call(
            self._autoscaling.terminate_instance_in_auto_scaling_group(
                InstanceId=youngest, ShouldDecrementDesiredCapacity=True
            )
        )

    async def _describe(self, group: str) -> dict[str, Any]:
        answer = await _call(self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group]))
        if not answer["AutoScalingGroups"]:
            raise GroupNotFound(f"there is no Auto Scaling group {group} in this region")
        found: dict[str, Any] = answer["AutoScalingGroups"][0]
        return found

    async def _instances(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        known: dict[str, dict[str, Any]] = {}
        for start in range(0, len(names), _PAGE):
            wanted = {"Name": "instance-id", "Values": list(names[start : start + _PAGE])}
            answer = await _call(self._ec2.describe_instances(Filters=[wanted]))
            for reservation in answer["Reservations"]:
                known |= {one["InstanceId"]: one for one in reservation["Instances"]}
        return known

    def _member(self, one: dict[str, Any], known: dict[str, Any]) -> Member:
        ip = known.get("PrivateIpAddress")
        return Member(one["InstanceId"], f"{ip}:{self._port}" if ip else None, _leaves(one))


def _leaves(one: dict[str, Any]) -> bool:
    return str(one["LifecycleState"]).startswith("Terminating")


async def _call(request: Awaitable[Any]) -> Any:
    """The answer. Raises the SDK's errors as ours."""
    try:
        return await request
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        if code in _BUSY:
            raise SizeChanged(str(error)) from error
        if code in _LATER or status >= 500:
            raise Away(str(error)) from error
        raise Refused(str(error)) from error
    except (BotoCoreError, OSError, TimeoutError) as error:
        raise Away(f"AWS does not answer: {error}") from error


@asynccontextmanager
async def open_aws(region: str, port: int, endpoint: str | None) -> AsyncIterator[AwsDriver]:
    """Raises Refused when there are no credentials."""
    config = AioConfig(
        connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"mode": "standard", "total_max_attempts": 1}
    )
    session = await asyncio.to_thread(_prepare, region)
    async with AsyncExitStack() as closing:
        if await session.get_credentials() is None:
            raise Refused("no AWS credentials. Try: AWS_PROFILE, AWS_ACCESS_KEY_ID, or an instance role")
        clients = [
            await closing.enter_async_context(
                session.create_client(service, region_name=region, endpoint_url=endpoint, config=config)
            )
            for service in _SERVICES
        ]
        yield AwsDriver(clients[0], clients[1], port)


def _prepare(region: str) -> AioSession:
    """A session with its configuration files loaded. Blocks."""
    session = AioSession()
    session.register_component("data_loader", _loader(region))
    session.get_scoped_config()
    return session


@cache
def _loader(region: str) -> Any:
    """The service models, megabytes of JSON, loaded once per process by creating a client of each. Blocks."""
    reading = botocore.session.get_session()
    for service in _SERVICES:
        reading.create_client(service, region_name=region)
    return reading.get_component("data_loader")
