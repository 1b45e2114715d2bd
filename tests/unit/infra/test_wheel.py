"""The wheel has every file that the program reads: the page, the interface descriptions, the locks, the demo's data."""

import subprocess
import sys
import zipfile
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
    files = {name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()}
    with zipfile.ZipFile(wheel) as packed:
        assert files <= set(packed.namelist())
        for name in ("pipes.yaml", "flights.ndjson.gz"):
            example = (REPOSITORY / "examples" / name).read_bytes()
            assert packed.read(f"services/fleet/demo/{name}") == example, "a link was packed instead of the file"
        java = packed.getinfo("services/core/jvm/launcher/bin/java")
        assert java.external_attr >> 16 & 0o111, "it is a program"
