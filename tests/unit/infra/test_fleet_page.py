"""docs/fleet.md: what is run on other machines only is held against the files that it speaks of."""

import re
import subprocess
from pathlib import Path

import yaml

from services.core.process.settings import load_settings
from services.ingest.settings import IngestSettings
from tests.unit.infra.test_aws import streams_template, template
from tests.unit.infra.test_kubernetes import DEPLOYMENTS, PODS

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "fleet.md").read_text()
COMMANDS = "\n".join(re.findall(r"^ *```bash\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", "")


def test_commands_can_be_parsed() -> None:
    """Broken: a quote or bracket is missing in a command."""
    done = subprocess.run(["bash", "-n", "-c", COMMANDS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_exist() -> None:
    """Broken: the page sends its reader to files that have moved."""
    named = set(re.findall(r"\binfra/[\w./-]*\w", PAGE))
    assert {"infra/kubernetes/base", "infra/container/Dockerfile", "infra/aws/streams.py"} <= named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
    [build] = re.findall(r"docker build.*? \.$", COMMANDS, re.MULTILINE)
    assert re.sub(r":\d+\.\d+\.\d+", "", build) in (REPOSITORY / "infra" / "container" / "Dockerfile").read_text()


def test_parameters_and_outputs_exist() -> None:
    """Broken: CloudFormation refuses a command of the page, or a parameter without a default is not given."""
    for name, file in (("penstock-balancer", "balancer.yaml"), ("penstock-$1", "service.yaml")):
        [command] = [line for line in COMMANDS.splitlines() if f'{name}" ' in line or f"{name} --template" in line]
        given = set(re.findall(r"\b([A-Z]\w+)=", command))
        parameters = template(file)["Parameters"]
        assert given <= set(parameters)
        assert {key for key, one in parameters.items() if "Default" not in one} <= given
    parameters = template("service.yaml")["Parameters"]
    outputs = streams_template()["Outputs"]
    calls = re.findall(r"^service ([a-z-]+) (\w+)(.*)$", COMMANDS + "\n" + PAGE.replace("`", "\n"), re.MULTILINE)
    # the registry is a service of its own, which the page names without a command
    assert {service for service, _, _ in calls} | {"registry"} == set(parameters["Service"]["AllowedValues"])
    for _service, policy, more in calls:
        assert policy in outputs
        assert set(re.findall(r" ([A-Z]\w+)=", more)) <= set(parameters)
    for stack, output in re.findall(r"output penstock-(\w+) (\w+)", PAGE):
        file = "service" if stack in parameters["Service"]["AllowedValues"] else stack
        assert output in template(f"{file}.yaml")["Outputs"]


def test_names_in_the_cluster_exist() -> None:
    """Broken: pods wait for a Secret that the page calls otherwise."""
    made = set(re.findall(r"create secret generic ([\w-]+)", COMMANDS))
    wanted = {
        found
        for pod in PODS.values()
        for found in re.findall(r"'secretName': '([\w-]+)'|'secretRef': {'name': '([\w-]+)'", str(pod))
    }
    assert made == {name for pair in wanted for name in pair if name}
    assert set(re.findall(r"deployment/([\w-]+)", PAGE)) <= set(DEPLOYMENTS)


def test_the_settings_file_that_it_uploads_is_one() -> None:
    """Broken: every service on AWS ends with status 2."""
    assert "--body infra/penstock.default.yaml" in COMMANDS
    path = REPOSITORY / "infra" / "penstock.default.yaml"
    assert yaml.safe_load(path.read_text()) is None
    assert load_settings(IngestSettings, [], {"PENSTOCK_CONFIG": str(path)}).drain == 25
