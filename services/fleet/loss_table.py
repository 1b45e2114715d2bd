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
        style = _style(row["final_loss"], row, body["threshold"])
        state = "final" if row["final"] else row["why_open"]
        late = f", {row['late']} settled late" if row["late"] else ""
        missing = [_missing(step, row, body["threshold"]) for step in row["steps"]]
        cells = [row["minute"], str(row["accepted"]), *missing, str(row["waiting"])]
        loss = row["final_loss"] or row["loss"]  # what is lost for sure, before what may come yet
        table.add_row(*cells, Text(f"{loss:.2%}", style=style), Text(state + late))
    return table


def _missing(step: dict[str, Any], row: dict[str, Any], threshold: float) -> Text:
    """A destination that is final is judged, whatever the others are still waiting for."""
    if not step["missing"]:
        return Text("0")
    lost = step["missing"] if step["final"] else 0
    return Text(str(step["missing"]), style=_style(lost / row["accepted"], step, threshold))


def _style(loss: float, judged: dict[str, Any], threshold: float) -> str:
    """loss: as far as it is final."""
    return "red" if loss > threshold else "green" if judged["final"] else "dim"
