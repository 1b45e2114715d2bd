"""infra/kubernetes: manifests that Kubernetes' schemas take, and that keep what the services promise."""

import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from services.autoscaler.settings import AutoscalerSettings
from services.core.broker.connect import open_broker
from services.core.http.address import parse_address
from services.core.process.lifecycle import CLOSE_S
from services.core.process.settings import Settings, load_settings
from services.core.security.keys import load_keys
from services.core.security.signing import read_signing_keys
from services.expel.settings import ExpelSettings
from services.fleet import cli
from services.fleet.pipes.check import check_pipe_file
from services.fleet.verbs.app import APP
from services.global_retrier.settings import RetrierSettings
from services.ingest.settings import IngestSettings
from services.observer.settings import ObserverSettings
from services.registry.settings import RegistrySettings
from services.table.settings import TableSettings
from spark.cluster.master import MasterKind
from spark.settings import TransformSettings
from tests.unit.infra.dockerfile import read_dockerfile

INFRA = Path(__file__).parents[3] / "infra"
BASE = INFRA / "kubernetes" / "base"
VERSION = "1.33"
SETTINGS: dict[str, type[Settings]] = {
    "services.ingest": IngestSettings,
    "services.expel": ExpelSettings,
    "services.global_retrier": RetrierSettings,
    "services.observer": ObserverSettings,
    "services.table": TableSettings,
    "services.autoscaler": AutoscalerSettings,
    "services.registry": RegistrySettings,
    "spark": TransformSettings,
}
SCALED = {"ingest", "expel", "global-retrier"}
SINGLE = {"observer", "transform", "autoscaler"}
FIXED = {"registry": 2}
"""They share a bucket. One may be lost."""
ONE_AT_A_TIME = {"autoscaler"}
"""Two at once would decide twice. Of transform and observer the second stands by."""


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


FILES = [path for path in sorted((INFRA / "kubernetes").glob("*/*.yaml")) if path.name != "kustomization.yaml"]
OBJECTS = [found for path in FILES for found in read(path)]
DEPLOYMENTS = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Deployment"}


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == kind}


PODS = {
    one["metadata"]["name"]: one["spec"].get("jobTemplate", one)["spec"]["template"]["spec"]
    for one in OBJECTS
    if one["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob")
}


def environment() -> dict[str, str]:
    lines = (BASE / "config" / "environment.env").read_text().split()
    variables = dict(line.split("=", 1) for line in lines)
    return {name: value.replace("/etc/penstock/", f"{BASE}/config/") for name, value in variables.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_schemas(path: Path) -> None:
    """Broken: `kubectl apply` refuses a file, or drops a misspelt field without a word."""
    for found in read(path):
        kubernetes_validate.validate(found, VERSION, strict=True)


def test_every_file_is_applied() -> None:
    """Broken: a service is left out, or its names in the cluster and in the files differ."""
    for folder in ("base", "autoscaled", "cluster", "registry", "tables"):
        kustomization = yaml.safe_load((INFRA / "kubernetes" / folder / "kustomization.yaml").read_text())
        listed = {name for name in kustomization["resources"] if not name.startswith("../")}
        assert listed == {path.name for path in FILES if path.parent.name == folder}
    names = {
        source["name"]: source
        for source in yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]
    }
    assert set(names) == {"penstock", "environment"}
    for source in (*names["penstock"]["files"], *names["environment"]["envs"]):
        assert (BASE / source).is_file()


def test_every_service_has_its_objects() -> None:
    """Broken: a service is not watched, all of it goes at once when nodes are drained, or it is scaled although it is one."""
    assert set(DEPLOYMENTS) == SCALED | SINGLE | set(FIXED)
    assert set(of_kind("StatefulSet")) == {"table"}
    expected = SCALED | SINGLE | set(FIXED) | {"table"}
    assert set(of_kind("PodDisruptionBudget")) == set(of_kind("Service")) - {"fleet"} == expected
    scalers = of_kind("HorizontalPodAutoscaler")
    assert {scaler["scaleTargetRef"]["name"] for scaler in scalers.values()} == set(scalers) == SCALED
    for name, spec in DEPLOYMENTS.items():
        assert spec.get("replicas") == (None if name in SCALED else FIXED.get(name, 1)), (
            "an apply would undo the scaler's number"
        )
        assert spec["strategy"]["type"] == ("Recreate" if name in ONE_AT_A_TIME else "RollingUpdate")
        if name not in ONE_AT_A_TIME:
            rolling = spec["strategy"]["rollingUpdate"]
            assert rolling == {"maxSurge": 1, "maxUnavailable": 0}, "a bad configuration would replace what works"
        labels = {"app.kubernetes.io/name": name}
        assert (
            spec["selector"]["matchLabels"] == of_kind("PodDisruptionBudget")[name]["selector"]["matchLabels"] == labels
        )
        assert of_kind("Service")[name]["selector"] == labels
    for scaler in scalers.values():
        assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"], "one may be lost"
        assert scaler["metrics"][0]["resource"]["name"] == "cpu"


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_probes_ask_the_management_port(name: str) -> None:
    """Broken: a service gets work before it is ready, or is killed while it waits for its broker."""
    [container] = DEPLOYMENTS[name]["template"]["spec"]["containers"]
    image = {one.rest for one in read_dockerfile(INFRA / "container" / "Dockerfile") if one.name == "ENV"}
    [port] = {text.rpartition(":")[2] for text in image if "_MANAGEMENT=" in text}
    assert {"name": "management", "containerPort": int(port)} in container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "management"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "management"}
    assert DEPLOYMENTS[name]["template"]["metadata"]["annotations"]["prometheus.io/port"] == port


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_a_drain_is_never_cut_short(name: str) -> None:
    """Broken: every roll-out kills what is in flight."""
    pod = DEPLOYMENTS[name]["template"]["spec"]
    [container] = pod["containers"]
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    settings = load_settings(SETTINGS[container["args"][0]], [], environment())
    assert pod["terminationGracePeriodSeconds"] >= sleep + settings.drain + CLOSE_S + 10
    if name in SCALED:
        policies = of_kind("HorizontalPodAutoscaler")[name]["behavior"]["scaleDown"]["policies"]
        assert [(one["type"], one["value"]) for one in policies] == [("Pods", 1)]
        assert policies[0]["periodSeconds"] > pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", sorted(PODS))
def test_pods_may_do_nothing_they_need_not(name: str) -> None:
    """Broken: whoever breaks into a service gets root, the node or the cluster's API; or the service does not start."""
    pod = PODS[name]
    [container] = pod["containers"]
    assert pod["enableServiceLinks"] is False, "PENSTOCK_INGEST_SERVICE_HOST is no setting of ingest"
    if name == "autoscaler":
        assert pod["serviceAccountName"] == "autoscaler"
    else:
        assert pod["automountServiceAccountToken"] is False
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert [one.rest for one in read_dockerfile(INFRA / "container" / "Dockerfile") if one.name == "USER"] == [user]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_settings_are_taken() -> None:
    """Broken: a service ends with status 2 as soon as it starts in the cluster."""
    run = {pod["containers"][0]["args"][0] for pod in PODS.values()}
    assert run == {*SETTINGS, "services.fleet"}
    for model in SETTINGS.values():
        settings = load_settings(model, [], environment())
        open_broker(settings.broker)
        assert settings.pipes == BASE / "config" / "pipes.yaml"
    ingest = load_settings(IngestSettings, [], environment())
    assert ingest.address() == ("0.0.0.0", 8080)
    transform = load_settings(TransformSettings, [], environment())
    requests = DEPLOYMENTS["transform"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert transform.master_kind() is MasterKind.LOCAL, "the manifests have no executors"
    assert transform.memory < int(requests["memory"].removesuffix("Gi")) << 30
    mounts = DEPLOYMENTS["transform"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "data", "mountPath": str(transform.data)} in mounts


def test_the_example_needs_only_the_secret_that_expel_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: whoever follows docs/fleet.md has a pipe file that is refused, or a secret in a ConfigMap."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BILLING_SECRET", "whsec_" + "A" * 32)
    listen = yaml.safe_load((BASE / "config" / "penstock.yaml").read_text())["expel"]["own_addresses"]
    pipes = check_pipe_file(BASE / "config" / "pipes.yaml", listen=listen)
    [destination] = [one for pipe in pipes.pipes.values() for one in pipe.destinations]
    assert destination.webhook is not None
    assert destination.webhook.secret is not None
    assert read_signing_keys(destination.webhook.secret, BASE, dict(os.environ))
    with_secrets = {name for name, pod in PODS.items() if "webhook-secrets" in str(pod)}
    assert with_secrets == {"expel"}
    assert not [one for one in OBJECTS if one["kind"] in ("Secret", "ConfigMap")]
    said = "".join(path.read_text() for path in (INFRA / "kubernetes").rglob("*.*"))
    assert not re.search(r"whsec_|psk_|AKIA|BEGIN [A-Z ]*PRIVATE", said)


def test_keys_can_be_read_as_the_secret_mounts_them(tmp_path: Path) -> None:
    """Broken: ingest refuses its keys file, which Kubernetes gives to the pod's group."""
    pod = DEPLOYMENTS["ingest"]["template"]["spec"]
    [secret] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    mode = secret["defaultMode"]
    assert mode & stat.S_IRGRP
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    file = tmp_path / "keys.yaml"
    file.write_text("version: 1\nkeys: []\n")
    file.chmod(mode)
    assert load_keys(file) == []
    [mount] = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "keys"]
    assert load_settings(IngestSettings, [], environment()).keys == Path(mount["mountPath"]) / "keys.yaml"


def test_the_registry_keeps_nothing_in_the_cluster() -> None:
    """Broken: two registries have two stores; one starts without keys; or its clients ask under a name that it refuses."""
    [container] = PODS["registry"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    settings = load_settings(RegistrySettings, [], environment() | variables)
    overlay = yaml.safe_load((INFRA / "kubernetes" / "registry" / "kustomization.yaml").read_text())
    [more] = overlay["configMapGenerator"]  # for all services, so that they miss it
    assert (more["name"], more["behavior"], more["literals"]) == ("environment", "merge", ["PENSTOCK_SCHEMAS=true"])
    assert settings.store.startswith("s3://")
    assert [volume["name"] for volume in PODS["registry"]["volumes"]] == ["config", "tmp", "keys"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "keys"]
    assert settings.keys == Path(mount["mountPath"]) / "keys.yaml"
    assert settings.names.split(",")[0] == "registry"
    port = parse_address(settings.listen)[1]
    assert {"name": "http", "containerPort": port} in container["ports"]
    policy = of_kind("NetworkPolicy")["schemas"]
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "registry"}
    assert policy["ingress"] == [{"from": [{"namespaceSelector": {}}], "ports": [{"port": port}]}]
    assert policy["egress"][0]["to"] == of_kind("NetworkPolicy")["receivers"]["egress"][0]["to"]
    assert policy["egress"][0]["ports"] == [{"port": 443}]


def test_each_replica_of_the_tables_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: two replicas write one file; a new pod lacks the disk of its table; or it gets work while it lacks events."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    spec = of_kind("StatefulSet")["table"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    [claim] = [one["metadata"]["name"] for one in spec["volumeClaimTemplates"]]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == claim]
    settings = load_settings(TableSettings, [], environment())
    assert settings.data.parent == Path(mount)
    assert settings.address() == ("0.0.0.0", 8082)
    assert {"name": "http", "containerPort": 8082} in container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "management"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "management"}
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep == PODS["ingest"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep == PODS["registry"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= sleep + settings.drain + CLOSE_S + 10
    spread = pod["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    [keys] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "keys"]
    assert settings.keys == Path(keys) / "keys.yaml"
    labels = {"app.kubernetes.io/name": "table"}
    assert (settings.snapshot_from, settings.snapshot_key) == ("http://table", Path(keys) / "replica.key")
    assert of_kind("Service")["table"]["ports"][0] == {"name": "http", "port": 80, "targetPort": "http"}
    assert of_kind("NetworkPolicy")["tables"]["egress"] == [
        {"to": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": 8082}]}
    ]
    assert spec["selector"]["matchLabels"] == of_kind("Service")["table"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["table"]["selector"]["matchLabels"] == labels
    assert spec["replicas"] > 1, "one builds its table again, the other answers"


def test_only_the_scaled_can_be_scaled() -> None:
    """Broken: the autoscaler may change what it must not, the HPAs work against it, or the observer tells everybody."""
    [role] = [one for one in OBJECTS if one["kind"] == "Role" and one["metadata"]["name"] == "autoscaler"]
    rights = {rule["resources"][0]: (rule["verbs"], rule.get("resourceNames")) for rule in role["rules"]}
    assert set(rights) == {"deployments", "deployments/scale", "pods"}
    assert rights["pods"] == (["list", "delete"], None)
    for resource, verbs in (("deployments/scale", ["get", "update"]), ("deployments", ["get"])):
        assert rights[resource][0] == verbs
        assert set(rights[resource][1] or ()) == SCALED
    [container] = PODS["autoscaler"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    settings = load_settings(AutoscalerSettings, [], environment() | variables)
    assert set(settings.groups) == SCALED
    assert settings.group_driver == "kubernetes://penstock"
    overlay = yaml.safe_load((INFRA / "kubernetes" / "autoscaled" / "kustomization.yaml").read_text())
    scalers, observer = overlay["patches"]
    assert scalers["target"] == {"kind": "HorizontalPodAutoscaler"}
    assert "$patch: delete" in scalers["patch"]
    assert observer["target"] == {"kind": "Deployment", "name": "observer"}
    opened, mount, volume = yaml.safe_load(observer["patch"])
    opens = {one["name"]: one["value"] for one in opened["value"]}
    asked = load_settings(ObserverSettings, [], opens)
    assert (asked.listen, settings.observer) == ("0.0.0.0:8081", f"{asked.names}:8081")
    assert asked.token_file == settings.observer_token_file == Path(mount["value"]["mountPath"]) / "token"
    assert mount["value"] in container["volumeMounts"]
    assert volume["value"] in PODS["autoscaler"]["volumes"]
    assert not volume["value"]["secret"]["defaultMode"] & 0o007, "it is refused when others can read it"
    [rule] = of_kind("NetworkPolicy")["observer"]["ingress"]
    assert rule == {
        "from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "autoscaler"}}}],
        "ports": [{"port": 8081}],
    }


def test_pods_are_spread_over_hosts() -> None:
    """Broken: one node takes a whole group with it."""
    for name in SCALED | set(FIXED):
        spread = DEPLOYMENTS[name]["template"]["spec"]["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
        for one in spread:
            assert one["labelSelector"]["matchLabels"] == {"app.kubernetes.io/name": name}
            assert (one["maxSkew"], one["matchLabelKeys"]) == (1, ["pod-template-hash"])


def test_nobody_is_reached_but_as_written() -> None:
    """Broken: a pod of another team reads figures or stories of events; who breaks into expel reaches the whole cluster; or a
    service cannot do its work."""
    policies = of_kind("NetworkPolicy")
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    open_to_all = {
        (name, port["port"])
        for name, policy in policies.items()
        for rule in policy.get("ingress", [])
        if "from" not in rule
        for port in rule["ports"]
    }
    assert open_to_all == {("events", 8080), ("tables", 8082)}
    assert policies["tables"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "table"}
    assert policies["events"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "ingest"}
    kafka = {port["port"] for rule in policies["names-and-broker"]["egress"] for port in rule["ports"]}
    assert kafka == {53, 9092}
    assert f":{max(kafka)}" in environment()["PENSTOCK_BROKER"]
    [rule] = policies["receivers"]["egress"]
    four, six = (one["ipBlock"] for one in rule["to"])
    for block in (four, six):
        closed = [ipaddress.ip_network(one) for one in block["except"]]
        for address in ("10.1.2.3", "169.254.169.254", "192.168.1.1", "::1", "fd00::1"):
            inside = ipaddress.ip_address(address)
            if inside in ipaddress.ip_network(block["cidr"]):
                assert any(inside in network for network in closed), address


def test_the_doctor_reaches_every_pod() -> None:
    """Broken: at 3 a.m. the doctor finds silent processes only, because the network lets nobody ask them; or it runs unasked."""
    cron, policies = of_kind("CronJob")["doctor"], of_kind("NetworkPolicy")
    assert cron["suspend"] is True
    template = cron["jobTemplate"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    name, port = parse_address(container["args"][-1].removeprefix("dns://"))
    every, asks = (
        {"matchLabels": of_kind("Service")[name]["selector"]},
        {"podSelector": {"matchLabels": template["metadata"]["labels"]}},
    )
    assert policies["figures-for-doctor"]["podSelector"] == every
    assert policies["figures-for-doctor"]["ingress"] == [{"from": [asks], "ports": [{"port": port}]}]
    assert policies["doctor"]["podSelector"] == asks["podSelector"]
    assert policies["doctor"]["egress"] == [{"to": [{"podSelector": every}], "ports": [{"port": port}]}]
    assert every["matchLabels"].keys() - template["metadata"]["labels"].keys(), "it would ask itself"
    cli.load_verbs([])
    command: Any = get_command(APP)
    doctor = command.commands[container["args"][1]]
    options = {one.name: one.envvar for one in doctor.params}
    assert {options["broker"], options["pipes"]} <= environment().keys(), "it would not know its broker"
    doctor.make_context("doctor", container["args"][2:])


def test_ingest_serves_until_balancers_send_elsewhere() -> None:
    """Broken: each roll-out refuses the requests that balancers still send to a pod that leaves."""
    balancer = (INFRA / "aws" / "balancer.yaml").read_text()
    interval, count = (
        int(re.findall(rf"{key}: (\d+)", balancer)[0]) for key in ("IntervalSeconds", "UnhealthyThresholdCount")
    )
    [container] = DEPLOYMENTS["ingest"]["template"]["spec"]["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 2 * interval * count


def test_the_autoscaler_asks_every_pod() -> None:
    """Broken: streams keep their shards, or partitions, whatever is written: the autoscaler has nobody to ask, or asks few."""
    [container] = PODS["autoscaler"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    settings = load_settings(AutoscalerSettings, [], environment() | variables)
    name, port = parse_address(settings.targets.removeprefix("dns://"))
    assert settings.targets == f"dns://{name}:{port}"
    service = of_kind("Service")[name]
    assert service["clusterIP"] == "None", "a name with one address of its own stands for any pod, not for all"
    assert service["publishNotReadyAddresses"] is True, "who drains still writes"
    assert {"name": "management", "containerPort": port} in container["ports"]
    asked = {
        one["metadata"]["name"]
        for one in OBJECTS
        if one["kind"] in ("Deployment", "Job")
        and service["selector"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
    }
    assert asked == set(DEPLOYMENTS), "the Job has no management port, and who is silent holds up merges"


def test_cpu_targets_leave_room() -> None:
    """Broken: a group is told to use more CPU than its pods are promised, and never grows."""
    [container] = PODS["autoscaler"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    for name, rules in load_settings(AutoscalerSettings, [], variables).groups.items():
        [service] = PODS[name]["containers"]
        requested = int(service["resources"]["requests"]["cpu"].removesuffix("m")) / 1000
        scaler = of_kind("HorizontalPodAutoscaler")[name]
        percent = scaler["metrics"][0]["resource"]["target"]["averageUtilization"]
        assert rules.target_cpu == pytest.approx(requested * percent / 100)
        assert (rules.min, rules.max) == (scaler["minReplicas"], scaler["maxReplicas"])
