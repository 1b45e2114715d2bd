"""The Makefile: what a target runs before it, as the first command in a new clone."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def steps(tmp_path: Path, *arguments: str) -> str:
    """The commands that make would run where nothing is installed yet. It runs none of them."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", "--file", str(REPOSITORY / "Makefile")]
    for name in ("pyproject.toml", "infra"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return subprocess.run([*command, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("arguments", ["--broker kinesis", "--chaos --broker=kinesis"])
def test_the_kinesis_demo_installs_its_emulator(tmp_path: Path, arguments: str) -> None:
    """Broken: `make demo ARGS="--broker kinesis"` as the first command ends with "not installed"."""
    said = steps(tmp_path, "demo", f"ARGS={arguments}")
    order = ["setup.sh\n", "setup.sh emulator", "infra/dev/node.sh", "services.core.aws_emulator", f"demo {arguments}"]
    found = [said.index(step) for step in order]
    assert found == sorted(found)


@pytest.mark.parametrize("command", [["install"], ["demo"], ["demo", "ARGS=--chaos"], ["demo", "ARGS=--broker kafka"]])
def test_nothing_is_installed_that_a_user_does_not_need(tmp_path: Path, command: list[str]) -> None:
    """Broken: a newcomer waits for the packages of tests and of the emulator."""
    said = steps(tmp_path, *command)
    assert "setup.sh\n" in said
    assert [word for word in ("emulator", "setup.sh dev", "jars", "node.sh") if word in said] == []
