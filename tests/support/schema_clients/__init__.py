"""Existing clients of schema registries: two of npm, installed from the lock beside this file into ~/.cache/penstock."""

import sys
from pathlib import Path

from services.core.aws_emulator import EmulatorNotReady, install_npm

FOLDER = Path(__file__).parent


def install() -> Path:
    """The folder with their node_modules. Blocks up to 300 s the first time. Raises EmulatorNotReady."""
    return install_npm(FOLDER, "schema-clients", "clients of schema registries")


def main() -> int:
    """Install them if they are missing. `make setup` calls this."""
    try:
        install()
    except EmulatorNotReady as error:
        print(error, file=sys.stderr)
        return 1
    return 0
