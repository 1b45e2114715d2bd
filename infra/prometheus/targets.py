"""Print Prometheus' list of a running fleet's processes (file_sd), from the state file in its data folder.

A process that is started again has another port, so this is run at intervals; see docs/monitoring.md.
"""

import json
import sys
from pathlib import Path
from typing import Any


def list_targets(state: dict[str, Any]) -> list[dict[str, Any]]:
    """One group for each process, with `component` and `process` as labels (no metric has these), the supervisor first."""
    fleet = {"name": "fleet", "service": "fleet", "management": state["management"]}
    return [
        {"targets": [one["management"]], "labels": {"component": one["service"], "process": one["name"]}}
        for one in [fleet, *state["processes"]]
        if one["management"]
    ]


def main() -> None:
    """`targets.py DATA/fleet.json`. Ends with 1 when there is no such file: the fleet does not run."""
    path = Path(sys.argv[1])
    try:
        state = json.loads(path.read_bytes())
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}. Try: the data folder of a fleet that runs")
    print(json.dumps(list_targets(state), indent=2))


if __name__ == "__main__":
    main()
