"""The observer's loss table, for a terminal."""

from typing import Any

from rich.table import Table
from rich.text import Text


def loss_table(body: dict[str, Any]) -> Table:
    """body: the answer to GET /v1/pipes/{pipe}/loss, with at least one minute."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    rows = body["minutes"]
    steps = [step["node"] + (f" to {step['destination']}" if step["destination"] else "") for step in rows[-1]["steps"]]
    table.add_column("minute", no_wrap=True, min_width=17)
    for name in ("accepted", *steps, "waiting", "loss"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        lossy = row["loss"] > body["threshold"]
        style = "dim" if not row["final"] else "red" if lossy else "green"
        state = "final" if row["final"] else row["why_open"]
        late = f", {row['late']} settled late" if row["late"] else ""
        missing = [Text(str(step["missing"]), style=style if step["missing"] else "") for step in row["steps"]]
        cells = [row["minute"], str(row["accepted"]), *missing, str(row["waiting"])]
        table.add_row(*cells, Text(f"{row['loss']:.2%}", style=style), Text(state + late))
    return table
