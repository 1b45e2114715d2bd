"""infra/lock and what is made of it: nothing is installed without a known hash, and the bill of materials is whole."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from infra.dev.lock_packages import FOLDER, SETS, Locked, read_lock
from services.core.jvm.jars import LOCK_FILE

REPOSITORY = Path(__file__).parents[3]
LOCKS = {name: list(read_lock(FOLDER / f"{name}.txt")) for name in SETS}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def find(name: str, *sets: str) -> Locked:
    wanted = name.lower().replace("_", "-")
    (found,) = [one for part in sets for one in LOCKS[part] if one.name == wanted]
    return found


def test_every_package_has_its_hashes_and_stands_once() -> None:
    """Broken: a package is installed unchecked, or in one of two versions."""
    names = [one.name for part in LOCKS.values() for one in part]
    assert len(names) == len(set(names)) > 100
    assert {path.stem for path in FOLDER.glob("*")} == set(SETS)
    many = [len(one.hashes) for one in LOCKS["services"]]
    assert sum(count > 5 for count in many) > 20, "of each release all files, so that other Pythons are served too"


def test_the_locks_are_those_of_the_project() -> None:
    """Broken: a dependency was added or raised, and the lock was not written anew."""
    extras = PROJECT["project"]["optional-dependencies"]
    wanted: list[tuple[str, tuple[str, ...]]] = [
        (text, ("services", "build")) for text in PROJECT["project"]["dependencies"]
    ]
    wanted += [(text, ("emulator", "services", "build")) for text in extras["emulator"]]
    wanted += [(text, ("dev", "emulator", "services", "build")) for text in extras["dev"]]
    wanted += [(text, ("java",)) for text in extras["java"]]
    wanted += [(text, ("build",)) for text in PROJECT["dependency-groups"]["build"]]
    wanted += [(text, ("build",)) for text in PROJECT["build-system"]["requires"]]
    for text, sets in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(find(requirement.name, *sets).version), text


@pytest.mark.parametrize("text", ["one==1.0\n", "one>=1.0 --hash=sha256:" + "0" * 64 + "\n", "-e .\n"])
def test_what_is_not_locked_is_refused(tmp_path: Path, text: str) -> None:
    """Broken: a line that was added by hand, without a hash, goes unseen."""
    (tmp_path / "lock.txt").write_text(text)
    with pytest.raises(ValueError, match="not `name==version` with hashes"):
        list(read_lock(tmp_path / "lock.txt"))


def test_the_set_up_installs_nothing_unchecked() -> None:
    """Broken: `make setup` fetches what no lock names: a package, or what builds one."""
    script = (REPOSITORY / "infra" / "dev" / "setup.sh").read_text()
    assert "--no-deps --no-build-isolation" in script
    installs = [line for line in script.splitlines() if line.strip().startswith("install ")]
    assert [line for line in installs if "--require-hashes" not in line] == ["install --editable ."]
    assert re.findall(r"infra/lock/(\$?\w+)\.txt", "".join(installs)) == ["$1", "build", "services", "java"]


NPM_LOCKS = ["services/core/emulator/package-lock.json", "tests/support/schema_clients/package-lock.json"]


def modules_of(lock: str) -> dict[str, dict[str, str]]:
    """By their places."""
    return {name: one for name, one in json.loads((REPOSITORY / lock).read_text())["packages"].items() if name}


@pytest.mark.parametrize("lock", NPM_LOCKS)
def test_the_modules_of_npm_have_their_hashes(lock: str) -> None:
    """Broken: the Kinesis emulator, or a client of the registry, is another program than the one that was tried."""
    modules = modules_of(lock)
    assert modules
    assert all(one["integrity"].startswith("sha512-") for one in modules.values())


def test_the_bill_of_materials_names_everything(tmp_path: Path) -> None:
    """Broken: somebody looks up whether a bad library is in Penstock, and is told that it is not."""
    said = []
    for name in ("one.json", "two.json"):
        command = [sys.executable, "infra/dev/sbom.py", str(tmp_path / name)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        said.append((tmp_path / name).read_bytes())
    assert said[0] == said[1], "the same locks make the same document"
    document = json.loads(said[0])
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    found = {one["purl"]: one for one in document["components"]}
    assert len(found) == len(document["components"])
    text = "".join(path.read_text() for path in FOLDER.glob("*.txt"))
    packages = set(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))
    assert packages == {(one["name"], one["version"]) for purl, one in found.items() if purl.startswith("pkg:pypi/")}
    jars = set(re.findall(r"^(\S+):(\S+):(\S+) ([0-9a-f]{64})$", LOCK_FILE.read_text(), re.MULTILINE))
    described = [one for purl, one in found.items() if purl.startswith("pkg:maven/")]
    assert jars == {(one["group"], one["name"], one["version"], one["hashes"][0]["content"]) for one in described}
    modules = {
        (name.rpartition("node_modules/")[2], one["version"])
        for lock in NPM_LOCKS
        for name, one in modules_of(lock).items()
    }
    assert modules == {(one["name"], one["version"]) for purl, one in found.items() if purl.startswith("pkg:npm/")}
    scopes = {one["name"]: one["scope"] for one in found.values()}
    assert (scopes["aiohttp"], scopes["pytest"], scopes["hatchling"]) == ("required", "excluded", "excluded")
