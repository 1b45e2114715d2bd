"""`python -m services.observer`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.observer.app import start
from services.observer.settings import ObserverSettings

if __name__ == "__main__":
    sys.exit(run_service(ObserverSettings, start, sys.argv[1:], dict(os.environ)))
