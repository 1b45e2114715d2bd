"""The wheel has every file that the program reads: the page, the interface descriptions, the locks, the demo's data."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
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
