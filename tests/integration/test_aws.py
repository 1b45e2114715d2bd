"""infra/aws, deployed: the fleet's groups, streams and rights are there, and its instances do what they must."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jmespath
import pytest

from services.core.aws_emulator import kinesis_url
from services.core.broker.connect import open_broker
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics, wanted_topics
from tests.integration.aws_account import (
    FOLDER,
    MAX_OF_ONE,
    PIPES,
    POLICIES,
    SECRET,
    Account,
    deploy_fleet,
    open_account,
)

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/penstock:0.1.0"
COMMANDS = {
    "aws": 'case "$*" in *get-secret-value*) echo hidden ;; *Values=observer*) cat "$FAKE/observer" ;; '
    '*Values=transform*) cat "$FAKE/transform" ;; '
    '*describe-instances*) echo "[]" ;; esac',
    "curl": 'all="$*"; case "$all" in *-X*) echo token ;; *instance-id) echo i-1 ;; '
    '*9100*) grep -q "${all##*/}" "$FAKE/answers" ;; '
    '*) tail -n1 "$FAKE/state" ;; esac',
    "sleep": 'echo Terminated >>"$FAKE/state"',
    "dnf": "",
    "systemctl": "",
    "docker": "",
    "sudo": '"$@"',
    "chown": "",
    "python3.11": 'case "$*" in *venv*) mkdir -p "$3/bin"; ln -sf "$0" "$3/bin/python" ;; esac',
}
"""What stands in for the commands that reach out of an instance, each in bash. The group wants it gone after one wait."""


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with open_account(tmp_path_factory.mktemp("moto") / "moto.log") as account:
        yield account


async def test_the_streams_are_those_that_apply_makes(account: Account) -> None:
    """Broken: on AWS ingest never becomes ready: streams are missing, or have other partitions than the pipe file says."""
    pipes = await asyncio.to_thread(load_pipes, PIPES)
    async with open_broker(kinesis_url(account.endpoint, account.endpoint)) as broker:
        done = await ensure_topics(broker.admin, pipes)
    assert (done.created, done.grown) == ((), ())
    assert set(done.kept) == {spec.name for spec in wanted_topics(pipes)}


async def test_the_fleet_comes_up_in_another_region(account: Account) -> None:
    """Broken: a region is lost, and the templates name it, or what an account has only once: nothing starts elsewhere."""
    other = Account(account.endpoint, "eu-central-1")
    await asyncio.to_thread(deploy_fleet, other)
    assert other.outputs["data"]["Bucket"] != account.outputs["data"]["Bucket"]
    for service in POLICIES:
        assert (await asyncio.to_thread(other.group, service))["MaxSize"] == account.group(service)["MaxSize"]
        script = await asyncio.to_thread(other.user_data, service)
        assert "PENSTOCK_BROKER=kinesis://eu-central-1?" in script
        assert account.region not in script
        for action, where in (await asyncio.to_thread(other.rights, service)).items():
            assert action.startswith("secretsmanager") or account.region not in str(where)
    pipes = await asyncio.to_thread(load_pipes, PIPES)
    url = kinesis_url(account.endpoint, account.endpoint).replace(account.region, other.region)
    async with open_broker(url) as broker:
        done = await ensure_topics(broker.admin, pipes)
    assert (done.created, done.grown) == ((), ())


@pytest.mark.parametrize("service", POLICIES)
def test_each_service_is_a_group_of_its_own(account: Account, service: str) -> None:
    """Broken: a group runs another service, services scale together, or two do what one must."""
    group, script = account.group(service), account.user_data(service)
    assert (group["MinSize"], group["MaxSize"]) == ((1, MAX_OF_ONE[service]) if service in MAX_OF_ONE else (2, 8))
    assert bool(group["TargetGroupARNs"]) == (service == "ingest")
    assert group["HealthCheckType"] == "EC2", "a broker that is away would cost every instance its life"
    module = "spark" if service == "transform" else f"services.{service.replace('-', '_')}"
    assert f" $image {module}\n" in script
    assert "${" not in script, "not replaced by CloudFormation"


@pytest.mark.parametrize("service", POLICIES)
def test_instances_may_do_only_their_own(account: Account, service: str) -> None:
    """Broken: a service's instances may read a secret, change files, let an instance go or scale a group of others; or a
    transform may not write its checkpoints.
    """
    rights = account.rights(service)
    own = [rights["autoscaling:CompleteLifecycleAction"]]
    if service != "autoscaler":  # which may also have instances of the groups replaced that it scales
        own.append(rights["autoscaling:SetInstanceHealth"])
    assert all(where.endswith(f"autoScalingGroupName/penstock-{service}") for where in own)
    assert f":stack/{service}/" in rights["cloudformation:SignalResource"]
    assert rights.get("secretsmanager:GetSecretValue") == (SECRET if service == "ingest" else None)
    assert ("autoscaling:SetDesiredCapacity" in rights) == (service == "autoscaler")
    anywhere = {action for action, where in rights.items() if where == "*" and not action.startswith("ssm")}
    looks = {"autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeLifecycleHooks", "ec2:DescribeInstances"}
    assert anywhere == {"ecr:GetAuthorizationToken"} | (looks if service == "autoscaler" else set())
    name = account.outputs["data"]["Bucket"]
    bucket = f"arn:aws:s3:::{name}"
    in_bucket = {action: where for action, where in rights.items() if action.startswith("s3:")}
    assert in_bucket.pop("s3:GetObjectVersion") == [f"{bucket}/{file}.yaml" for file in ("pipes", "penstock")]
    files = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
    checkpoints = {f"s3:{action}": f"{bucket}/checkpoints/*" for action in files}
    checkpoints |= {"s3:ListBucket": bucket, "s3:GetBucketLocation": bucket}
    assert in_bucket == (checkpoints if service == "transform" else {})
    assert f" --env PENSTOCK_TRANSFORM_CHECKPOINTS=s3a://{name}/checkpoints " in account.user_data(service)


def run_on_instance(
    script: str,
    root: Path,
    *arguments: str,
    answers: str = "readyz healthz",
    status: int = 0,
    failing: tuple[str, ...] = (),
) -> list[str]:
    """Run a script of an instance, with these arguments, on a root of its own. Returns what it told the commands that reach out,
    in order.

    answers: the paths at which the service answers 200. status: of the script. failing: commands that do not work.
    """
    fake = root / "fake"
    fake.mkdir(exist_ok=True)
    (fake / "state").write_text("InService\n")
    (fake / "answers").write_text(answers)
    for name, body in COMMANDS.items():
        (fake / name).write_text(
            f'#!/bin/bash\necho "{name} $*" >>"$FAKE/said"\n{"exit 1" if name in failing else body}\n'
        )
        (fake / name).chmod(0o755)
    for path in (
        "/etc/penstock",
        "/etc/systemd/system",
        "/usr/local/sbin",
        "/opt/penstock",
        "/var/lib",
        "/mnt/var/lib",
    ):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
        script = re.sub(rf"(?<![\w/]){path}", f"{root}{path}", script)
    script = re.sub("(install -m [0-7]+) -[go] [a-z0-9]+", r"\1", script)  # not everybody may give a file away
    environment = {"PATH": f"{fake}{os.pathsep}{os.environ['PATH']}", "FAKE": str(fake)}
    done = subprocess.run(
        ["bash", "-c", script, "script", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    said = (fake / "said").read_text().splitlines()
    (fake / "said").unlink()
    return said


def test_an_instance_starts_its_service_and_drains_it(account: Account, tmp_path: Path) -> None:
    """Broken: instances come up without their service, or are gone before it has drained."""
    said = run_on_instance(account.user_data("ingest"), tmp_path)
    assert f"docker pull --quiet {IMAGE}" in said
    assert any("--key pipes.yaml --version-id v1" in line for line in said)
    assert any("--key penstock.yaml --version-id v2" in line for line in said)
    started = said.index("systemctl enable --now penstock penstock-drain")
    assert "complete-lifecycle-action" not in "".join(said[:started])
    kept, stack = [line for line in said[started:] if line.startswith("aws ")]
    assert "--auto-scaling-group-name penstock-ingest --lifecycle-hook-name ready --instance-id i-1 " in kept
    assert kept.endswith("--lifecycle-action-result CONTINUE")
    assert stack.endswith("--stack-name ingest --logical-resource-id Group --unique-id i-1 --status SUCCESS")
    assert "systemctl enable --now penstock-health" in said[started:]
    secret = tmp_path / "etc" / "penstock" / "secret"
    assert secret.read_text() == "hidden\n"
    assert secret.stat().st_mode & 0o777 == 0o640
    unit = (tmp_path / "etc" / "systemd" / "system" / "penstock.service").read_text()
    [start] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert start.endswith(f" {IMAGE} services.ingest")
    assert " --env PENSTOCK_BROKER=kinesis://us-east-1?prefix= " in start
    assert " --env PENSTOCK_INGEST_LISTEN=0.0.0.0:8080 --env PENSTOCK_INGEST_KEYS=" in start

    drain = (tmp_path / "usr" / "local" / "sbin" / "penstock-drain").read_text().replace(str(tmp_path), "")
    told = [line for line in run_on_instance(drain, tmp_path) if not line.startswith("curl")]
    assert told[:4] == ["sleep 5", "systemctl stop penstock-health", "sleep 20", "systemctl stop penstock"]
    assert "complete-lifecycle-action" in told[4]
    assert "--auto-scaling-group-name penstock-ingest --lifecycle-hook-name drain --instance-id i-1" in told[4]


def test_an_instance_whose_service_is_not_ready_is_ended(account: Account, tmp_path: Path) -> None:
    """Broken: a bad version, or an instance that could not fetch its files, gets work and counts as updated; or the group ends
    the instance before the stack knows, and the update goes on for a quarter of an hour.
    """
    script = account.user_data("expel")
    for broken, answers in ((script, "healthz"), (script.replace("docker pull", "false"), "readyz")):
        said = run_on_instance(broken, tmp_path, answers=answers, status=1)
        stack, group = [line for line in said if "lifecycle-action " in line or "signal-resource" in line]
        assert group.endswith("--lifecycle-hook-name ready --instance-id i-1 --lifecycle-action-result ABANDON")
        assert stack.endswith("--unique-id i-1 --status FAILURE")


def test_an_instance_whose_service_is_not_alive_is_replaced(account: Account, tmp_path: Path) -> None:
    """Broken: a hung service stays as it is; or one that only waits for its broker costs its instance."""
    run_on_instance(account.user_data("expel"), tmp_path)
    watch = (tmp_path / "usr" / "local" / "sbin" / "penstock-health").read_text()
    watch = watch.replace("while true", "for round in {1..60}").replace(str(tmp_path), "")
    done = [line for line in run_on_instance(watch, tmp_path, answers="none") if line.startswith(("aws", "systemctl"))]
    assert done[:-1] == ["systemctl restart penstock"] * 9
    assert "set-instance-health" in done[-1]
    assert done[-1].endswith("--health-status Unhealthy --instance-id i-1")
    assert not [line for line in run_on_instance(watch, tmp_path) if line.startswith(("aws", "systemctl"))]
    longer = watch.replace("{1..60}", "{1..66}")
    said = run_on_instance(longer, tmp_path, answers="none", failing=("aws", "systemctl"))
    done = [line.split()[1] for line in said if line.startswith(("aws", "systemctl"))]
    assert done == ["restart"] * 9 + ["autoscaling"] * 2, (
        "without Docker no restart works, and only a new instance helps"
    )


def test_the_autoscaler_knows_where_the_others_are(account: Account, tmp_path: Path) -> None:
    """Broken: the autoscaler sees no load, and no stream gets shards."""
    script = account.user_data("autoscaler")
    said = run_on_instance(script, tmp_path)
    enabled = [line.rpartition(" --now ")[2] for line in said if "--now" in line]
    assert enabled == ["docker", "penstock-targets", "penstock penstock-drain", "penstock-health"]
    assert not any(
        "enable --now penstock-targets" in line for line in run_on_instance(account.user_data("expel"), tmp_path)
    )
    [asks] = [line for line in script.splitlines() if "--query" in line and "targets" in line]
    [query] = re.findall(r'--query "(.*?)"', asks)
    [instances] = re.findall(r'instances="(.*?)"', script)
    role = "aws:elasticmapreduce:instance-group-role"
    tags_of = [[], [{"Key": role, "Value": "MASTER"}], [{"Key": role, "Value": "CORE"}]]
    found = [{"PrivateIpAddress": f"10.0.0.{number}", "Tags": tags} for number, tags in enumerate(tags_of)]
    answer = {"Reservations": [{"Instances": found[:1]}, {"Instances": found[1:]}]}
    query = query.replace("$instances", instances)
    assert jmespath.search(query, answer) == [{"targets": ["10.0.0.0:9100", "10.0.0.1:9100"]}]
    group = account.group("observer")
    tags = {tag["Key"]: tag["Value"] for tag in group["Tags"] if tag["PropagateAtLaunch"]}
    asked = script.replace("Values=$service ", f"Values={tags['penstock:service']} ")
    for tag in ("penstock:fleet", "penstock:service"):
        assert f"Name=tag:{tag},Values={tags[tag]} " in asked


def test_the_autoscaler_knows_where_the_observer_is(account: Account, tmp_path: Path) -> None:
    """Broken: on AWS groups grow and never shrink, and a change of shards is announced to nobody."""
    script = account.user_data("autoscaler")
    run_on_instance(script, tmp_path)
    hosts = tmp_path / "etc" / "penstock" / "hosts"
    assert hosts.read_text() == "127.0.0.1 localhost\n", "Docker would make a folder of a file that is not there"
    inode = hosts.stat().st_ino
    unit = (tmp_path / "etc" / "systemd" / "system" / "penstock.service").read_text()
    assert f" --volume {hosts}:/etc/hosts:ro " in unit
    assert " --env PENSTOCK_AUTOSCALER_OBSERVER=observer:8081 " in unit
    keeping = (tmp_path / "usr" / "local" / "sbin" / "penstock-targets").read_text()
    once = keeping.replace(str(tmp_path), "").replace("while true", "for round in 1 2")
    for answer, wanted in (("None", ""), ("10.0.0.7", "10.0.0.7 observer\n"), ("10.0.0.70", "10.0.0.70 observer\n")):
        (tmp_path / "fake" / "observer").write_text(f"{answer}\n")
        (tmp_path / "fake" / "transform").write_text("None\n")
        run_on_instance(once, tmp_path)
        assert hosts.read_text() == f"127.0.0.1 localhost\n{wanted}"
    (tmp_path / "fake" / "transform").write_text("10.0.0.8\n")
    run_on_instance(once, tmp_path)
    assert hosts.read_text() == "127.0.0.1 localhost\n10.0.0.70 observer\n10.0.0.8 transform\n"
    assert hosts.stat().st_ino == inode, "the container would keep the old file"
    assert (tmp_path / "etc" / "penstock" / "targets.json").read_text() == "[]\n"
    [query] = re.findall(r'--query "(sort_by.*?)"', keeping)
    [instances] = re.findall(r'instances="(.*?)"', keeping)
    query = query.replace("$instances", instances)
    old = {"LaunchTime": "2026-01-01T00:00:00+00:00", "PrivateIpAddress": "10.0.0.2"}
    new = {"LaunchTime": "2026-01-02T00:00:00+00:00", "PrivateIpAddress": "10.0.0.1"}
    assert jmespath.search(query, {"Reservations": [{"Instances": [new]}, {"Instances": [old]}]}) == "10.0.0.1"
    assert jmespath.search(query, {"Reservations": []}) is None


def test_the_autoscaler_may_ask_the_others(account: Account) -> None:
    """Broken: the autoscaler sees no load, or no health; or others may call the observer's API, which asks for no key."""
    autoscaler = account.outputs["autoscaler"]["SecurityGroup"]
    memberships = set(account.launch("autoscaler")["SecurityGroupIds"])
    assert autoscaler in memberships
    for service in POLICIES:
        callers = account.callers(service)
        assert callers[9100] & memberships
        assert callers.get(8081) == ({autoscaler} if service == "observer" else None)


@pytest.mark.parametrize(
    ("primary", "secret"), [(True, SECRET), (True, "none"), (False, SECRET)], ids=["primary", "without-token", "core"]
)
def test_a_node_of_emr_gets_what_its_part_needs(tmp_path: Path, primary: bool, secret: str) -> None:
    """Broken: the cluster's nodes do not start, executors have no packages, a core node runs a second transform or has the
    secret, or the transform begins without its files or its token.
    """
    node = tmp_path / "mnt" / "var" / "lib" / "info" / "instance.json"
    node.parent.mkdir(parents=True)
    node.write_text(f'{{"isMaster": {str(primary).lower()}, "isRunningNameNode": false}}')
    script = (FOLDER / "emr-bootstrap.sh").read_text()
    wheel = "penstock-0.1.0-py3-none-any.whl"
    said = run_on_instance(script, tmp_path, "mine", wheel, "eu-west-1", "acme.", "2-10", secret)
    fetched = [line.split(" s3://mine/")[1].split()[0] for line in said if line.startswith("aws s3 cp")]
    assert fetched == [wheel, *(["pipes.yaml", "penstock.yaml"] if primary else [])]
    packages = said.index(f"python3.11 -m pip install --quiet /tmp/{wheel}")
    assert said.index(f"aws s3 cp --quiet s3://mine/{wheel} /tmp/{wheel}") < packages
    assert any(line.startswith("dnf ") and "java-17" in line for line in said[:packages])
    token, unit = (tmp_path / "etc" / path for path in ("penstock/transform.token", "systemd/system/penstock.service"))
    asked = [line for line in said if "get-secret-value" in line]
    with_token = primary and secret != "none"
    assert (len(asked), token.exists(), unit.exists()) == (with_token, with_token, primary)
    assert [line for line in said if line.startswith("systemctl")] == ["systemctl enable --now penstock"] * primary
    if with_token:
        assert f" --region eu-west-1 --secret-id {SECRET} " in asked[0]
        assert (token.read_text(), token.stat().st_mode & 0o777) == ("hidden\n", 0o600)
    if primary:
        text = unit.read_text()
        assert text.count(f"PENSTOCK_TRANSFORM_CONTROL_TOKEN_FILE={token}\n") == with_token
        assert f"\nExecStart={tmp_path}/opt/penstock/bin/python -m spark\n" in text
        for setting in ("BROKER=kinesis://eu-west-1?prefix=acme.", "TRANSFORM_EXECUTORS=2-10", "TRANSFORM_MASTER=yarn"):
            assert f"PENSTOCK_{setting} " in text
