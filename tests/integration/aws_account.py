"""An account of AWS on moto's server, with the whole fleet of infra/aws on it: moto makes what the templates describe.

It starts no instance. What it passes over, tests/unit/infra reads: the bucket's settings, the lifecycle hook, the scaling policy.
"""

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import BotoCoreError

from services.core.aws_emulator import CREDENTIALS, REGION
from services.core.jvm.child import start_child, stop_child
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "infra" / "aws"
PIPES = REPOSITORY / "infra" / "kubernetes" / "base" / "config" / "pipes.yaml"
POLICIES = {
    "ingest": "IngestPolicy",
    "transform": "TransformPolicy",
    "expel": "ExpelPolicy",
    "global-retrier": "GlobalRetrierPolicy",
    "observer": "ObserverPolicy",
    "autoscaler": "AutoscalerPolicy",
}
MAX_OF_ONE = {"transform": 2, "observer": 2, "autoscaler": 1}
"""Services of which one works: the most instances during an update."""
SECRET = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:penstock-ingest-AbCdEf"
_READY_S = 600.0


class Account:
    """In one region. outputs: of each stack, by the stack's name."""

    def __init__(self, endpoint: str, region: str = REGION) -> None:
        self.endpoint, self.region = endpoint, region
        self.outputs: dict[str, dict[str, str]] = {}

    def client(self, service: str) -> Any:
        """The SDK's client; it blocks."""
        return boto3.client(service, region_name=self.region, endpoint_url=self.endpoint)

    def deploy(self, stack: str, text: str, **parameters: str) -> None:
        """A new stack."""
        given = [{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()]
        cloud = self.client("cloudformation")
        cloud.create_stack(StackName=stack, TemplateBody=text, Parameters=given, Capabilities=["CAPABILITY_IAM"])
        [made] = cloud.describe_stacks(StackName=stack)["Stacks"]
        assert made["StackStatus"] == "CREATE_COMPLETE"
        self.outputs[stack] = {one["OutputKey"]: one["OutputValue"] for one in made.get("Outputs", [])}

    def group(self, service: str) -> dict[str, Any]:
        """The service's Auto Scaling group."""
        name = f"penstock-{service}"
        found = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
        [group] = found["AutoScalingGroups"]
        assert isinstance(group, dict)
        return group

    def launch(self, service: str) -> dict[str, Any]:
        """What an instance of this service is made from."""
        named = self.group(service)["LaunchTemplate"]
        found = self.client("ec2").describe_launch_template_versions(
            LaunchTemplateId=named["LaunchTemplateId"], Versions=[named["Version"]]
        )
        [version] = found["LaunchTemplateVersions"]
        data = version["LaunchTemplateData"]
        assert isinstance(data, dict)
        return data

    def user_data(self, service: str) -> str:
        """The script that an instance of this service begins with."""
        return base64.b64decode(self.launch(service)["UserData"]).decode()

    def callers(self, service: str) -> dict[int, set[str]]:
        """The security groups whose members may connect to an instance of this service, by port."""
        wanted = [self.outputs[service]["SecurityGroup"]]
        [group] = self.client("ec2").describe_security_groups(GroupIds=wanted)["SecurityGroups"]
        return {
            rule["FromPort"]: {one["GroupId"] for one in rule["UserIdGroupPairs"]} for rule in group["IpPermissions"]
        }

    def rights(self, service: str) -> dict[str, Any]:
        """What an instance of this service may do beside the broker: each action and on what."""
        resources = self.client("cloudformation").describe_stack_resources(StackName=service)["StackResources"]
        [role] = [one["PhysicalResourceId"] for one in resources if one.get("LogicalResourceId") == "Role"]
        policy = self.client("iam").get_role_policy(RoleName=role, PolicyName="instance")["PolicyDocument"]
        return {
            action: one["Resource"]
            for one in yaml.safe_load(policy)["Statement"]  # moto's text is Python's, which YAML can read, too
            if isinstance(one, dict)  # and keeps what AWS::NoValue takes away
            for action in ([one["Action"]] if isinstance(one["Action"], str) else one["Action"])
        }


@contextmanager
def open_account(log: Path) -> Iterator[Account]:
    """An account with the fleet on it. The environment has credentials for it until the context is left."""
    port = free_port()
    moto = start_child([sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)], log=log)
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in CREDENTIALS.items():
                environment.setenv(name, value)
            account = Account(f"http://127.0.0.1:{port}")
            _wait(account, log)
            deploy_fleet(account)
            yield account
    finally:
        stop_child(moto, grace_s=0)


def _wait(account: Account, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            account.client("sts").get_caller_identity()
        except BotoCoreError:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        else:
            return


def deploy_fleet(account: Account) -> None:
    """In the order of docs/fleet.md."""
    network = account.client("ec2").describe_subnets()["Subnets"]
    place = {"Vpc": network[0]["VpcId"], "Subnets": ",".join(subnet["SubnetId"] for subnet in network[:2])}
    certificate = account.client("acm").request_certificate(DomainName="events.example.com")["CertificateArn"]
    command = [sys.executable, "infra/aws/streams.py", str(PIPES)]
    streams = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout
    account.deploy("data", (FOLDER / "data.yaml").read_text())
    account.deploy("streams", streams)
    account.deploy("balancer", (FOLDER / "balancer.yaml").read_text(), Certificate=certificate, **place)
    balancer = account.outputs["balancer"]
    monitoring = account.client("ec2").create_security_group(
        GroupName="penstock-monitoring", Description="may ask the management ports", VpcId=place["Vpc"]
    )["GroupId"]
    for service, policy in POLICIES.items():
        given = {"Service": service, "BrokerPolicy": account.outputs["streams"][policy], **place}
        given |= {"Bucket": account.outputs["data"]["Bucket"], "PipesVersion": "v1", "SettingsVersion": "v2"}
        given |= {"ImageTag": "0.1.0", "MonitoringSecurityGroup": monitoring} | (
            {"Min": "1", "Max": str(MAX_OF_ONE[service])} if service in MAX_OF_ONE else {}
        )
        if service == "ingest":
            given |= {"TargetGroup": balancer["TargetGroup"], "BalancerSecurityGroup": balancer["SecurityGroup"]}
            given["Secret"] = SECRET.replace(REGION, account.region)
        if service == "autoscaler":  # one that scales groups, too, has the most rights
            given |= {"ScaledBy": "penstock", "ObserverSecurityGroup": account.outputs["observer"]["SecurityGroup"]}
        account.deploy(service, (FOLDER / "service.yaml").read_text(), **given)
