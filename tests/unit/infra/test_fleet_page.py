"""docs/fleet.md and docs/clusters.md: what is run on other machines only is held against the files that they speak of."""

import re
import subprocess
from pathlib import Path

import yaml

from services.core.process.settings import load_settings
from services.ingest.settings import IngestSettings
from tests.unit.infra.test_aws import streams_template, template
from tests.unit.infra.test_kubernetes import DEPLOYMENTS, PODS
from tests.unit.infra.test_kubernetes_cluster import patched, variables

REPOSITORY = Path(__file__).parents[3]
FLEET, CLUSTERS = ((REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("fleet", "clusters"))
PAGES = FLEET + CLUSTERS
FIRST, MORE = (
    "\n".join(re.findall(r"^ *```bash\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)).replace("\\\n", "")
    for page in (FLEET, CLUSTERS)
)
COMMANDS = f"{FIRST}\n{MORE}"
"""The second page goes on in the shell of the first one."""


def test_commands_can_be_parsed() -> None:
    """Broken: a quote or bracket is missing in a command."""
    done = subprocess.run(["bash", "-n", "-c", COMMANDS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_exist() -> None:
    """Broken: a page sends its reader to files that have moved."""
    named = {*re.findall(r"\binfra/[\w./-]*\w", PAGES), *re.findall(r"`(spark/\S+\.py)`", PAGES)}
    assert {"infra/kubernetes/base", "infra/container/Dockerfile", "infra/aws/streams.py"} <= named
    assert {"infra/kubernetes/cluster", "infra/aws/emr-bootstrap.sh", "spark/cluster/executor_pod.py"} <= named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
    [build] = re.findall(r"docker build.*? \.$", COMMANDS, re.MULTILINE)
    assert re.sub(r":\d+\.\d+\.\d+", "", build) in (REPOSITORY / "infra" / "container" / "Dockerfile").read_text()


def test_parameters_and_outputs_exist() -> None:
    """Broken: CloudFormation refuses a command of a page, or a parameter without a default is not given."""
    stacks = {"penstock-balancer": "balancer.yaml", "penstock-$1": "service.yaml", "penstock-emr": "emr.yaml"}
    for name, file in stacks.items():
        [command] = [line for line in COMMANDS.splitlines() if f'{name}" ' in line or f"{name} --template" in line]
        given = set(re.findall(r"\b([A-Z]\w+)=", command))
        parameters = template(file)["Parameters"]
        assert f"--template-file infra/aws/{file} " in command
        assert given <= set(parameters)
        assert {key for key, one in parameters.items() if "Default" not in one} <= given
    parameters = template("service.yaml")["Parameters"]
    outputs = streams_template()["Outputs"]
    calls = re.findall(r"^service ([a-z-]+) (\w+)(.*)$", COMMANDS + "\n" + PAGES.replace("`", "\n"), re.MULTILINE)
    # the registry is a service of its own, which a page names without a command
    assert {service for service, _, _ in calls} | {"registry"} == set(parameters["Service"]["AllowedValues"])
    for _service, policy, more in calls:
        assert policy in outputs
        assert set(re.findall(r" ([A-Z]\w+)=", more)) <= set(parameters)
    for stack, output in re.findall(r"output penstock-(\w+) (\w+)", PAGES):
        file = "service" if stack in parameters["Service"]["AllowedValues"] else stack
        assert output in (outputs if stack == "streams" else template(f"{file}.yaml")["Outputs"])


def test_a_cluster_of_emr_finds_what_the_commands_upload() -> None:
    """Broken: the nodes of EMR end because a file is not in the bucket; or the transform and the autoscaler have two tokens."""
    uploaded = set(re.findall(r'aws s3 cp \S+ "s3://\$bucket/(\S+)"', MORE))
    uploaded |= set(re.findall(r'put-object --bucket "\$bucket" --key (\S+)', COMMANDS))
    [policy] = template("emr.yaml")["Resources"]["NodeRole"]["Properties"]["Policies"]
    files = policy["PolicyDocument"]["Statement"][0]["Resource"]
    wanted = {one["Fn::Sub"].partition("/")[2] for one in files}
    assert uploaded == {name.replace("${Wheel}", "$wheel") for name in wanted}
    [(driver, autoscaler)] = re.findall(r' Secret="(\S+)"\nservice autoscaler .* TransformSecret="(\S+)"', MORE)
    assert driver == autoscaler


def test_variables_of_the_second_page_are_known() -> None:
    """Broken: a command gets an empty value, because the shell has the variable under another name."""
    used = set(re.findall(r"\$\{?([a-z]\w*)", MORE))
    assert {"bucket", "wheel", "monitoring"} <= used
    known = {*re.findall(r"\b([a-z]\w*)=\$\(", COMMANDS), *re.findall(r"\$\{?([a-z]\w*)", FIRST)}
    assert used - known == set(re.findall(r"`\$(\w+)` is ", re.sub(r"\s+", " ", CLUSTERS)))


def test_names_in_the_cluster_exist() -> None:
    """Broken: pods wait for a Secret that a page calls otherwise."""
    made = set(re.findall(r"create secret generic ([\w-]+)", COMMANDS))
    wanted = {
        found
        for pod in (*PODS.values(), *(patched(name)["spec"]["template"] for name in ("transform", "autoscaler")))
        for found in re.findall(r"'secretName': '([\w-]+)'|'secretRef': {'name': '([\w-]+)'", str(pod))
    }
    assert made == {name for pair in wanted for name in pair if name}
    [key] = re.findall(r"transform-token --from-file=(\w+)=", COMMANDS)
    assert variables(patched("transform"))["PENSTOCK_TRANSFORM_CONTROL_TOKEN_FILE"].endswith(f"/{key}")
    assert set(re.findall(r"deployment/([\w-]+)", PAGES)) <= set(DEPLOYMENTS)


def test_the_settings_file_that_it_uploads_is_one() -> None:
    """Broken: every service on AWS ends with status 2."""
    assert "--body infra/penstock.default.yaml" in COMMANDS
    path = REPOSITORY / "infra" / "penstock.default.yaml"
    assert yaml.safe_load(path.read_text()) is None
    assert load_settings(IngestSettings, [], {"PENSTOCK_CONFIG": str(path)}).drain == 25
