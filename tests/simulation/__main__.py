"""`python -m tests.simulation`: run seeds, replay one, prove that mends are needed."""

import gc
import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text are walked in the same order each time
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
    )

from tests.simulation.clock import install

gc.disable()  # also while everything is imported; `command.main` collects between histories
install()  # before anything takes `time.monotonic` as a default argument

if "--without" in sys.argv and not any(word.startswith("--prove") for word in sys.argv):
    from tests.simulation.patch import take_out
    from tests.simulation.patches import PATCHES

    take_out({patch.name: patch for patch in PATCHES}[sys.argv[sys.argv.index("--without") + 1]])

from tests.simulation.command import main  # noqa: E402 - see above

sys.exit(main())
