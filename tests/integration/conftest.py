"""Penstock as a person without a clone has it: installed from the wheel."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wheel_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `penstock` and `python` of a new virtual environment that has the wheel, and no clone on its path.

    Its other packages are those of this environment, by a .pth file: to install Spark again takes half a minute. The clone is not
    among them, because Python reads the .pth file that names the clone only in this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "venv"
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=Path(__file__).parents[2], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"
