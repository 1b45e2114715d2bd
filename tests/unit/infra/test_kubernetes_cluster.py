"""infra/kubernetes/cluster: transforms whose executors are pods, and that the autoscaler resizes."""

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.autoscaler.app import check_groups
from services.autoscaler.settings import EXECUTORS, AutoscalerSettings
from services.core.process.settings import load_settings
from spark.cluster.executor_pod import write_template
from spark.cluster.master import MasterKind
from spark.settings import TransformSettings, check_master
from tests.unit.infra.test_kubernetes import DEPLOYMENTS, INFRA, OBJECTS, VERSION, environment

FOLDER = INFRA / "kubernetes" / "cluster"
OVERLAY = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
ASKED = {
    "pods": {"create", "get", "list", "watch", "delete", "deletecollection"},
    "configmaps": {"create", "deletecollection"},
    "persistentvolumeclaims": {"list", "deletecollection"},
    "services": {"deletecollection"},
}
"""What Spark 4.2.0 asked an API that recorded it, with our settings: start, an executor, one that failed, stop. At its end Spark
removes claims and services by its label, also where it made none. To shrink, it lists pods and removes them by their labels."""


def patched(name: str) -> dict[str, Any]:
    """A Deployment with the overlay's JSON patches (RFC 6902: add, replace and remove are used)."""
    deployment = copy.deepcopy(
        next(one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == ("Deployment", name))
    )
    [patch] = [one for one in OVERLAY["patches"] if one["target"] == {"kind": "Deployment", "name": name}]
    for step in yaml.safe_load(patch["patch"]):
        *way, last = step["path"].strip("/").split("/")
        place: Any = deployment
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if step["op"] == "remove":
            del place[last]
        elif isinstance(place, list) and step["op"] == "add":
            assert last == "-"
            place.append(step["value"])
        elif isinstance(place, list):
            place[int(last)] = step["value"]
        else:
            assert (last in place) == (step["op"] == "replace"), f"{step['op']} {step['path']}"
            place[last] = step["value"]
    return deployment


def variables(deployment: dict[str, Any]) -> dict[str, str]:
    """Of its container; the address of the pod is made up."""
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return environment() | {one["name"]: one.get("value", "10.1.2.3") for one in container["env"]}


@pytest.mark.parametrize("name", ["transform", "autoscaler"])
def test_patched_deployments_are_taken(name: str) -> None:
    """Broken: `kubectl apply -k` refuses the overlay, or it leaves out a mount that a volume is for."""
    deployment = patched(name)
    kubernetes_validate.validate(deployment, VERSION, strict=True)
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_transform_starts_executors() -> None:
    """Broken: the transform ends with status 2, or nobody may start, reach or resize its executors."""
    deployment = patched("transform")
    settings = load_settings(TransformSettings, [], variables(deployment))
    check_master(settings)
    assert settings.master_kind() is MasterKind.KUBERNETES
    assert settings.checkpoint_root().startswith("s3a://"), "the volume of a pod ends with it"
    [image] = OVERLAY["images"]
    assert settings.executor_image == f"{image['newName']}:{image['newTag']}"
    pod = deployment["spec"]["template"]["spec"]
    [account] = [
        one["metadata"]["name"] for one in OBJECTS if one["kind"] == "ServiceAccount" and "transform" in str(one)
    ]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account, True)
    [policy] = [one for one in OBJECTS if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "driver"]
    opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert opened == [settings.driver_port, settings.driver_port + 1]
    [container] = pod["containers"]
    assert set(opened) <= {one["containerPort"] for one in container["ports"]}
    assert settings.executor_settings().resized


def test_the_driver_may_do_what_spark_asks_and_no_more() -> None:
    """Broken: Spark starts no executors, or leaves its pods behind; or who took over the driver may do more than it needs."""
    [role] = [one for one in OBJECTS if one["kind"] == "Role" and one["metadata"]["name"] == "transform"]
    assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {""}
    given = [(what, verb) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]]
    assert sorted(given) == sorted((what, verb) for what, verbs in ASKED.items() for verb in verbs)
    account = patched("transform")["spec"]["template"]["spec"]["serviceAccountName"]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": OVERLAY["namespace"]}
    bound = [one for one in OBJECTS if one["kind"] == "RoleBinding" and subject in one["subjects"]]
    assert [(one["roleRef"]["kind"], one["roleRef"]["name"], len(one["subjects"])) for one in bound] == [
        ("Role", "transform", 1)
    ]
    assert not [one["kind"] for one in OBJECTS if one["kind"].startswith("ClusterRole")], "all namespaces"


def test_the_autoscaler_resizes_them() -> None:
    """Broken: the autoscaler ends with status 2, asks somebody else, or orders what the transform refuses."""
    settings = load_settings(AutoscalerSettings, [], variables(patched("autoscaler")))
    check_groups(settings)
    transform = load_settings(TransformSettings, [], variables(patched("transform")))
    executors, rules = transform.executor_settings(), settings.groups[EXECUTORS]
    assert (rules.min, rules.max) == (executors.least, executors.most)
    assert rules.target_cpu < executors.cores, "a target that cannot be reached never grows the group"
    assert settings.transform == "transform:9100"
    assert settings.transform_token_file == transform.control_token_file
    assert settings.groups.keys() - {EXECUTORS} == {"ingest", "expel", "global-retrier"}


def test_pods_of_executors(tmp_path: Path) -> None:
    """Broken: Spark's pods are refused by a namespace that forbids root, no network policy knows them, or the autoscaler asks
    them for figures that they do not have."""
    write_template(tmp_path / "pod.yaml")
    template = yaml.safe_load((tmp_path / "pod.yaml").read_text())
    pod = copy.deepcopy(template)
    pod["metadata"]["name"] = pod["spec"]["containers"][0]["image"] = "x"
    kubernetes_validate.validate(pod, VERSION, strict=True)
    of_transform = DEPLOYMENTS["transform"]["template"]["spec"]
    assert template["spec"]["securityContext"] == of_transform["securityContext"]
    [policy] = [one for one in OBJECTS if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "executors"]
    assert policy["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    [asked] = [one for one in OBJECTS if one["kind"] == "Service" and one["metadata"]["name"] == "fleet"]
    assert not asked["spec"]["selector"].items() <= template["metadata"]["labels"].items()
