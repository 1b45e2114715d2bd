"""`python -m services.registry`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.registry.app import start
from services.registry.settings import RegistrySettings

if __name__ == "__main__":
    sys.exit(run_service(RegistrySettings, start, sys.argv[1:], dict(os.environ)))
