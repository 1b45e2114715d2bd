"""Expel with a name server of ours: `quick.test` answers at once; `slow.test` hangs while a file of that name exists.

python -m tests.faults.slow_dns ARGUMENTS OF EXPEL      the file lies beside the pipe file
"""

import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

_ours = Path(sys.argv[sys.argv.index("--pipes") + 1]).parent
_real = socket.getaddrinfo


def look_up(host: Any, *rest: Any, **more: Any) -> Any:
    """As socket.getaddrinfo."""
    while host == "slow.test" and (_ours / "slow.test").exists():
        time.sleep(0.1)
    return _real("127.0.0.1" if str(host).endswith(".test") else host, *rest, **more)


if __name__ == "__main__":
    socket.getaddrinfo = look_up
    runpy.run_module("services.expel", run_name="__main__")
