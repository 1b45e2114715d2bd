"""infra/aws: templates that AWS's rules take, and rights that are enough and no more."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.autoscaler.app import check_groups
from services.autoscaler.settings import AutoscalerSettings
from services.core.broker.prefix import check_prefix
from services.core.http.address import is_loopback, parse_address
from services.core.pipe_file.pipes import load_pipes
from services.core.process.lifecycle import CLOSE_S
from services.core.process.settings import load_settings, variable_name
from services.core.provision import wanted_topics
from services.expel.settings import ExpelSettings
from services.global_retrier.settings import RetrierSettings
from services.ingest.settings import IngestSettings
from services.observer.settings import ObserverSettings
from services.registry.settings import RegistrySettings
from spark.settings import TransformSettings, check_master

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "infra" / "aws"
PIPES = REPOSITORY / "infra" / "kubernetes" / "base" / "config" / "pipes.yaml"
BACKEND = REPOSITORY / "services" / "core" / "broker" / "kinesis"
FAN_OUT = ("RegisterStreamConsumer", "DescribeStreamConsumer", "SubscribeToShard")
"""For those who set fan_out, who add them: docs/kinesis.md."""

OPERATORS = {"CreateStream", "DeleteStream", "IncreaseStreamRetentionPeriod"}
"""What only `penstock apply` and people do."""


class Short(yaml.SafeLoader):
    """CloudFormation's short forms: `!Ref x` is {"Ref": "x"}."""


def _long_form(loader: Short, suffix: str, node: yaml.Node) -> dict[str, Any]:
    value: Any
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        assert isinstance(node, yaml.MappingNode)
        value = loader.construct_mapping(node, deep=True)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


Short.add_multi_constructor("!", _long_form)


def template(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((FOLDER / name).read_text(), Short)
    return found


@cache
def streams_template() -> dict[str, Any]:
    """What infra/aws/streams.py prints, run as docs/fleet.md says."""
    command = [sys.executable, "infra/aws/streams.py", str(PIPES)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def statements(policy: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = streams_template()["Resources"][policy]["Properties"]["PolicyDocument"]["Statement"]
    return found


def may(policy: str, action: str, resource: str) -> bool:
    """As IAM decides, for policies that only allow."""
    return any(
        action in one["Action"]
        and any(where == "*" or fnmatchcase(resource, where["Fn::Sub"].rpartition("/")[2]) for where in one["Resource"])
        for one in statements(policy)
    )


def test_templates_are_valid(tmp_path: Path) -> None:
    """Broken: CloudFormation refuses a template, or takes one that AWS's services then refuse."""
    streams = tmp_path / "streams.json"
    streams.write_text(json.dumps(streams_template()))
    command: list[str | Path] = [
        Path(sys.executable).with_name("cfn-lint"),
        "--template",
        *FOLDER.glob("*.yaml"),
        streams,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_call_is_allowed_to_somebody() -> None:
    """Broken: the backend makes a call that no role allows, or a role allows what nobody calls."""
    source = "\n".join(path.read_text() for path in BACKEND.glob("*.py"))
    calls = set(re.findall(r"\b_?kinesis\.(\w+)\(\n?", source)) - {"of", "forget"}
    called = {"kinesis:" + name.title().replace("_", "") for name in calls}
    called |= {"dynamodb:" + name.title().replace("_", "") for name in re.findall(r"\b_dynamodb\.(\w+)\(", source)}
    policies = [name for name, one in streams_template()["Resources"].items() if "ManagedPolicy" in one["Type"]]
    allowed = {action for policy in policies for one in statements(policy) for action in one["Action"]}
    called |= {"kinesis:" + name for name in re.findall(r"""\bheaders\(["'](\w+)["']""", source)}
    assert called - {f"kinesis:{name}" for name in (*OPERATORS, *FAN_OUT)} <= allowed
    by_autoscaler = {"kinesis:MergeShards", "kinesis:UpdateShardCount", "kinesis:DescribeLimits"}
    assert allowed - called <= by_autoscaler


READ, WRITE, LEASE = "kinesis:GetRecords", "kinesis:PutRecords", "dynamodb:UpdateItem"
LIST, TAGS = "kinesis:ListStreams", "kinesis:ListTagsForStream"
LIST_TOPICS = ("Expel", "GlobalRetrier", "Observer")
"""Services that call `Admin.topics`: it lists every stream of the account, and reads its shards and tags."""


@pytest.mark.parametrize(
    ("policy", "action", "may_on", "may_not_on"),
    [
        ("IngestPolicy", WRITE, ["orders", "penstock.telemetry", "penstock.control"], ["large-orders.dead", "theirs"]),
        ("IngestPolicy", READ, ["orders", "penstock.control"], ["large-orders.out", "penstock.audit"]),
        ("TransformPolicy", READ, ["orders", "penstock.control"], ["large-orders.retry", "penstock.audit", "theirs"]),
        (
            "TransformPolicy",
            WRITE,
            ["large-orders.out", "large-orders.dead", "penstock.control", "penstock.telemetry"],
            ["orders", "large-orders.retry", "theirs"],
        ),
        ("ExpelPolicy", READ, ["orders", "large-orders.out", "large-orders.retry", "large-orders.parked"], ["theirs"]),
        (
            "ExpelPolicy",
            WRITE,
            ["large-orders.dead", "large-orders.parked", "penstock.retry-in", "penstock.control", "penstock.telemetry"],
            ["penstock.observer"],
        ),
        ("ExpelPolicy", LEASE, ["penstock-large-orders.billing"], ["theirs"]),
        ("ExpelPolicy", READ, ["penstock.retry-in", "penstock.control"], ["large-orders.dead", "penstock.audit"]),
        ("GlobalRetrierPolicy", READ, ["penstock.retry-in", "penstock.delay-300s", "large-orders.retry"], ["orders"]),
        ("GlobalRetrierPolicy", WRITE, ["penstock.delay-300s", "large-orders.retry", "penstock.dead"], ["orders"]),
        ("GlobalRetrierPolicy", WRITE, ["penstock.telemetry"], ["penstock.observer"]),
        ("GlobalRetrierPolicy", LEASE, ["penstock-penstock.retrier"], ["penstock-large-orders.billing"]),
        ("ObserverPolicy", READ, ["orders", "large-orders.dead", "penstock.control", "penstock.dead"], ["theirs"]),
        (
            "ObserverPolicy",
            WRITE,
            ["penstock.observer", "penstock.telemetry"],
            ["orders", "penstock.control", "large-orders.dead"],
        ),
        ("ObserverPolicy", LEASE, [], ["penstock-large-orders.billing"]),
        *((f"{service}Policy", LIST, ["*"], []) for service in LIST_TOPICS),
        *((f"{service}Policy", TAGS, ["theirs"], []) for service in LIST_TOPICS),
        ("IngestPolicy", LIST, [], ["*"]),
        ("AutoscalerPolicy", "kinesis:SplitShard", ["orders", "large-orders.out"], ["penstock.control", "theirs"]),
        ("AutoscalerPolicy", WRITE, [], ["orders", "penstock.control"]),
        ("AutoscalerPolicy", READ, ["penstock.control", "orders", "large-orders.out"], ["large-orders.dead", "theirs"]),
        ("AutoscalerPolicy", "dynamodb:GetItem", ["penstock-large-orders.billing"], []),
        ("AutoscalerPolicy", LEASE, [], ["penstock-large-orders.billing"]),
    ],
)
def test_who_may_do_what(policy: str, action: str, may_on: list[str], may_not_on: list[str]) -> None:
    """Broken: a service cannot do its work on AWS, or can do another's."""
    assert [name for name in may_on if not may(policy, action, name)] == []
    assert [name for name in may_not_on if may(policy, action, name)] == []


HOOKS = {
    one["LifecycleTransition"]: one
    for one in template("service.yaml")["Resources"]["Group"]["Properties"]["LifecycleHookSpecificationList"]
}


def test_a_drain_is_never_cut_short() -> None:
    """Broken: every update of a group kills what is in flight."""
    service = template("service.yaml")["Resources"]
    data = str(service["Template"]["Properties"]["LaunchTemplateData"]["UserData"])
    found = re.search(r"docker stop --time (\d+).*TimeoutStopSec=(\d+)", data, re.DOTALL)
    assert found is not None
    stop, unit = int(found[1]), int(found[2])
    hook = HOOKS["autoscaling:EC2_INSTANCE_TERMINATING"]
    [serves] = re.findall(r"= ingest \]; then sleep (\d+)", data)
    assert ExpelSettings.model_fields["drain"].default + CLOSE_S + 10 <= stop < unit
    assert unit + int(serves) < hook["HeartbeatTimeout"] - 30
    target = template("balancer.yaml")["Resources"]["TargetGroup"]["Properties"]
    assert int(serves) >= 2 * target["HealthCheckIntervalSeconds"] * target["UnhealthyThresholdCount"]
    assert f"--lifecycle-hook-name {hook['LifecycleHookName']}" in data


def test_a_bad_version_replaces_nothing() -> None:
    """Broken: an update replaces one instance after the other with a version that never gets ready, and ends well."""
    group = template("service.yaml")["Resources"]["Group"]
    rolling, created = group["UpdatePolicy"]["AutoScalingRollingUpdate"], group["CreationPolicy"]["ResourceSignal"]
    assert (rolling["WaitOnResourceSignals"], rolling["MaxBatchSize"]) == (True, 1)
    assert created["Count"] == {"Ref": "Min"}
    hook = HOOKS["autoscaling:EC2_INSTANCE_LAUNCHING"]
    assert hook["DefaultResult"] == "ABANDON", "what does not even run its script gets work"
    data = str(template("service.yaml")["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"])
    [(attempts, limit, pause)] = re.findall(
        r"\{1\.\.(\d+)\}.*?--max-time (\d+).*?readyz.*?sleep (\d+)", data, re.DOTALL
    )
    longest = int(attempts) * (int(limit) + int(pause)) + 60
    assert longest < hook["HeartbeatTimeout"], "the group ends an instance before it has reported"
    assert {rolling["PauseTime"], created["Timeout"]} == {f"PT{hook['HeartbeatTimeout'] // 60}M"}


def test_old_versions_are_kept() -> None:
    """Broken: nobody can go back to the pipe file of yesterday; deleting a stack deletes events; others read what is private."""
    bucket = template("data.yaml")["Resources"]["Bucket"]
    assert bucket["Properties"]["VersioningConfiguration"] == {"Status": "Enabled"}
    assert list(bucket["Properties"]["PublicAccessBlockConfiguration"].values()) == [True] * 4
    streams = [one for one in streams_template()["Resources"].values() if one["Type"] == "AWS::Kinesis::Stream"]
    assert {one["DeletionPolicy"] for one in (bucket, *streams)} == {"Retain"}


def test_groups_follow_their_cpu_one_decider_at_a_time() -> None:
    """Broken: a group stays as it is under load, or the autoscaler and AWS undo each other's decisions."""
    found = template("service.yaml")
    policy = found["Resources"]["Cpu"]
    assert policy["Condition"] == "TracksCpu"
    assert policy["Properties"]["PolicyType"] == "TargetTrackingScaling"
    metric = policy["Properties"]["TargetTrackingConfiguration"]["PredefinedMetricSpecification"]
    assert metric == {"PredefinedMetricType": "ASGAverageCPUUtilization"}
    assert {"Fn::Equals": [{"Ref": "ScaledBy"}, "target-tracking"]} in found["Conditions"]["TracksCpu"]["Fn::And"]


def test_the_autoscaler_changes_groups_only_where_it_decides() -> None:
    """Broken: whoever takes over the autoscaler's host can end the observer, or groups that AWS scales."""
    found = template("service.yaml")
    assert {"Fn::Equals": [{"Ref": "ScaledBy"}, "penstock"]} in found["Conditions"]["ScalesGroups"]["Fn::And"]
    assert {"Condition": "IsAutoscaler"} in found["Conditions"]["ScalesGroups"]["Fn::And"]
    policies = found["Resources"]["Role"]["Properties"]["Policies"]
    statements = [one for policy in policies for one in policy["PolicyDocument"]["Statement"]]
    changing = [one for one in statements if "SetDesiredCapacity" in str(one)]
    assert [one["Fn::If"][0] for one in changing] == ["ScalesGroups"]
    for action in ("TerminateInstanceInAutoScalingGroup", "SetInstanceHealth"):  # a failed instance is replaced
        assert f"autoscaling:{action}" in changing[0]["Fn::If"][1]["Action"]
    groups = [one["Fn::Sub"].rpartition("/")[2] for one in changing[0]["Fn::If"][1]["Resource"]]
    assert groups == ["${Fleet}-ingest", "${Fleet}-expel", "${Fleet}-global-retrier"]


def test_a_transform_has_its_checkpoints_in_the_bucket() -> None:
    """Broken: a transform begins from the start on each new instance, cannot write its checkpoints, or can change the pipe file;
    two work at once; or every version of every file of a checkpoint is kept for a year."""
    found = template("service.yaml")
    data = str(found["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"])
    [folder] = re.findall(r"PENSTOCK_TRANSFORM_CHECKPOINTS=s3a://\$\{Bucket\}/(\S+)", data)
    policies = found["Resources"]["Role"]["Properties"]["Policies"]
    statements = [one for policy in policies for one in policy["PolicyDocument"]["Statement"]]
    mine = [one["Fn::If"][1] for one in statements if one.get("Fn::If", [""])[0] == "IsTransform"]
    writes = [one["Resource"]["Fn::Sub"] for one in mine if "s3:PutObject" in one["Action"]]
    assert [where.partition(":s3:::")[2] for where in writes] == [f"${{Bucket}}/{folder}/*"]
    assert found["Rules"]["OneWorks"]["RuleCondition"]["Fn::Contains"][0] == ["observer", "transform"]
    assert {"Fn::Not": [{"Condition": "HasStandby"}]} in found["Conditions"]["TracksCpu"]["Fn::And"]
    rules = template("data.yaml")["Resources"]["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    [kept] = [one for one in rules if one.get("Prefix") == f"{folder}/"]
    assert kept["NoncurrentVersionExpiration"]["NoncurrentDays"] <= 7


def test_a_registry_has_its_schemas_in_the_bucket() -> None:
    """Broken: a registry cannot read or add schemas, can delete or replace other files, or needs a right on streams."""
    found = template("service.yaml")
    data = str(found["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"])
    [folder] = re.findall(r"PENSTOCK_REGISTRY_STORE=s3://\$\{Bucket\}/(\S+)", data)
    role = found["Resources"]["Role"]["Properties"]
    statements = [one for policy in role["Policies"] for one in policy["PolicyDocument"]["Statement"]]
    objects, listing = (one["Fn::If"][1] for one in statements if one.get("Fn::If", [""])[0] == "IsRegistry")
    assert objects["Action"] == ["s3:GetObject", "s3:PutObject"]
    assert objects["Resource"]["Fn::Sub"].endswith(f"${{Bucket}}/{folder}/*")
    assert (listing["Action"], listing["Condition"]) == ("s3:ListBucket", {"StringLike": {"s3:prefix": f"{folder}/*"}})
    assert role["ManagedPolicyArns"]["Fn::If"][0] == "HasBroker"
    flags = found["Mappings"]["Services"]["registry"]["Flags"]
    port = template("balancer.yaml")["Resources"]["TargetGroup"]["Properties"]["Port"]
    assert f"PENSTOCK_REGISTRY_LISTEN=0.0.0.0:{port}" in flags, "one balancer template for both"


def test_a_transform_on_emr() -> None:
    """Broken: the script of EMR's nodes gives settings that the transform does not know, gets other arguments than it reads, or
    may not read what it fetches; or the autoscaler asks another transform, or with another token."""
    found, script = template("emr.yaml"), (FOLDER / "emr-bootstrap.sh").read_text()
    given = dict(re.findall(r"(PENSTOCK_[A-Z_]+)=(\S+)", script))
    for name, value in (("prefix", "acme."), ("region", "eu-west-1"), ("bucket", "mine"), ("executors", "2-10")):
        given = {key: text.replace(f"${name}", value) for key, text in given.items()}
    given |= {"PENSTOCK_CONFIG": "", "PENSTOCK_PIPES": "/etc/penstock/pipes.yaml"}
    settings = load_settings(TransformSettings, [], {key: value for key, value in given.items() if value})
    check_master(settings, {"HADOOP_CONF_DIR": "/etc/hadoop/conf"})
    assert settings.executor_settings().most == 10
    known = {variable_name(TransformSettings, field) for field in TransformSettings.model_fields}
    assert given.keys() - known == {"PENSTOCK_CONFIG", "PENSTOCK_JARS"}
    assert settings.executor_settings().resized
    assert "Environment=PENSTOCK_TRANSFORM_CONTROL_TOKEN_FILE" not in script, "also where there is no token"
    action = found["Resources"]["Cluster"]["Properties"]["BootstrapActions"][0]["ScriptBootstrapAction"]
    *always, token = action["Args"]
    assert token == {"Fn::If": ["HasSecret", {"Ref": "Secret"}, "none"]}
    asked = [next(iter(one.values())).rpartition("::")[2].lower() for one in always]
    assert re.findall(r"(\w+)=\$\d", script) == [*asked, "secret"]
    assert asked == ["bucket", "wheel", "region", "prefix", "executors"]
    service = template("service.yaml")
    [(_, names)] = service["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"][
        "Fn::Base64"
    ].values()
    flags = dict(re.findall(r"--env (\w+)=(\S+)", names["WithTransform"]["Fn::If"][1]))
    flags["PENSTOCK_AUTOSCALER_GROUPS"] = '{"executors": {"max": 10}}'
    autoscaler = load_settings(AutoscalerSettings, ["--broker", "kinesis://eu-west-1"], flags)
    check_groups(autoscaler)
    assert autoscaler.transform == f"transform:{parse_address(given['PENSTOCK_TRANSFORM_MANAGEMENT'])[1]}"
    tags = {one["Key"]: one["Value"] for one in found["Resources"]["Cluster"]["Properties"]["Tags"]}
    assert tags["penstock:service"] == "transform"
    statements = found["Resources"]["NodeRole"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    readable = {one["Fn::Sub"].partition("/")[2] for one in statements[0]["Resource"]}
    assert readable == {"pipes.yaml", "penstock.yaml", "emr-bootstrap.sh", "${Wheel}"}
    assert subprocess.run(["bash", "-n", FOLDER / "emr-bootstrap.sh"], check=False).returncode == 0


def test_the_balancer_and_ingest_agree() -> None:
    """Broken: ingest closes connections that the balancer still uses, which clients see as a 502."""
    resources = template("balancer.yaml")["Resources"]
    attributes = {one["Key"]: one["Value"] for one in resources["Balancer"]["Properties"]["LoadBalancerAttributes"]}
    idle = IngestSettings.model_fields["idle_timeout"].default
    assert float(attributes["idle_timeout.timeout_seconds"]) < idle
    target = resources["TargetGroup"]["Properties"]
    assert (target["HealthCheckPort"], target["HealthCheckPath"]) == ("9100", "/readyz")


def test_settings_that_instances_get_exist() -> None:
    """Broken: a service on AWS ends with status 2 as soon as it starts, or misses a setting."""
    models = (
        IngestSettings,
        TransformSettings,
        ExpelSettings,
        AutoscalerSettings,
        ObserverSettings,
        RetrierSettings,
        RegistrySettings,
    )
    known = {variable_name(model, field) for model in models for field in model.model_fields}
    given = set(re.findall(r"PENSTOCK_[A-Z_]+", (FOLDER / "service.yaml").read_text()))
    assert len(given) >= 5
    assert given - known == {"PENSTOCK_CONFIG"}


def test_the_autoscaler_asks_where_the_observer_listens() -> None:
    """Broken: the observer listens on one port, is asked on another, and a third is open."""
    found = template("service.yaml")
    flags = {name: one["Flags"] for name, one in found["Mappings"]["Services"].items()}
    listens = re.search(r"PENSTOCK_OBSERVER_LISTEN=(\S+)", flags["observer"])
    asks = re.search(r"PENSTOCK_AUTOSCALER_OBSERVER=(\S+)", flags["autoscaler"])
    assert listens is not None
    assert asks is not None
    host, port = parse_address(listens[1])
    assert not is_loopback(host)
    rule = found["Resources"]["ObserverApi"]["Properties"]
    assert {parse_address(asks[1])[1], rule["FromPort"], rule["ToPort"]} == {port}
    targets = re.search(r"PENSTOCK_AUTOSCALER_TARGETS=(\S+)", flags["autoscaler"])
    assert targets is not None
    given = {"PENSTOCK_AUTOSCALER_TARGETS": targets[1], "PENSTOCK_AUTOSCALER_OBSERVER": asks[1]}
    settings = load_settings(AutoscalerSettings, ["--broker", "kinesis://eu-west-1"], given)
    assert (settings.targets, settings.observer) == (targets[1], asks[1])
    assert f"PENSTOCK_OBSERVER_NAMES={parse_address(asks[1])[0]}" in flags["observer"]
    secrets = {name: one["SecretFlags"] for name, one in found["Mappings"]["Services"].items()}
    assert secrets["observer"] == "--env PENSTOCK_OBSERVER_TOKEN_FILE=/etc/penstock/secret"
    assert secrets["autoscaler"] == "--env PENSTOCK_AUTOSCALER_OBSERVER_TOKEN_FILE=/etc/penstock/secret"
    needs = found["Rules"]["ObserverHasToken"]
    assert needs["RuleCondition"]["Fn::Contains"][0] == ["observer", "autoscaler"]


def test_ec2_takes_the_descriptions_of_rules() -> None:
    """Broken: EC2 refuses a security group's rule for a letter, which no check of a template knows."""
    groups = [one for file in ("service.yaml", "balancer.yaml") for one in template(file)["Resources"].values()]
    rules = [one["Properties"] for one in groups if one["Type"] == "AWS::EC2::SecurityGroupIngress"]
    rules += [rule for one in groups for rule in one.get("Properties", {}).get("SecurityGroupIngress", [])]
    assert len(rules) >= 5
    assert [
        rule for rule in rules if not re.fullmatch(r"[\w .:/()#,@\[\]+=&;{}!$*-]{1,255}", rule["Description"])
    ] == []


def test_no_secret_is_in_a_template() -> None:
    """Broken: a secret can be read by whoever may look at the stacks or at an instance's user data."""
    for path in FOLDER.iterdir():
        if path.is_file():
            assert not re.search(r"whsec_|psk_|AKIA|BEGIN [A-Z ]*PRIVATE|SecretString:", path.read_text()), path
    for file, name in (("service.yaml", "Secret"), ("service.yaml", "TransformSecret"), ("emr.yaml", "Secret")):
        assert template(file)["Parameters"][name]["AllowedPattern"].startswith("(arn:")


def test_streams_without_a_pipe_file_that_is_right(tmp_path: Path) -> None:
    """Broken: a mistake in a pipe file becomes streams."""
    (tmp_path / "pipes.yaml").write_text("version: 1\nstreams: {Orders: {}}\n")
    command = [sys.executable, "infra/aws/streams.py", str(tmp_path / "pipes.yaml")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Orders" in done.stderr


def test_a_prefix_is_in_every_name() -> None:
    """Broken: a fleet may read, write or take over what another fleet in the account has, or not what it has itself."""
    command = [sys.executable, "infra/aws/streams.py", str(PIPES), "acme."]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout
    names = [one["Properties"].get("Name", "") for one in json.loads(found)["Resources"].values()]
    assert sorted(filter(None, names)) == sorted(f"acme.{spec.name}" for spec in wanted_topics(load_pipes(PIPES)))
    resources = re.findall(r"(?:stream|table)/[^\"]+", found)
    assert [name for name in resources if not name.partition("/")[2].startswith("acme.")] == []
    assert "table/acme.penstock-*" in resources
    plain = json.dumps(streams_template(), indent=2) + "\n"
    assert (
        re.sub(r"(stream|table)/acme\.|(?<=Name\": \")acme\.", lambda hit: f"{hit[1]}/" if hit[1] else "", found)
        == plain
    )
    allowed = re.compile(template("service.yaml")["Parameters"]["Prefix"]["AllowedPattern"])
    for text in ("", "acme.", "a.b-c."):
        assert allowed.fullmatch(text)
        assert check_prefix(text) == text
    refused = subprocess.run([*command[:-1], "acme"], cwd=REPOSITORY, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Try: prefix=acme." in refused.stderr
