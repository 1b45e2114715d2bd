"""The services that a fleet needs, as a metric. Alerts compare them with the processes that answer.

Under dynamic discovery a process that is gone has no target either, so only such a list shows that it is missing. The list
follows from the pipe file and from the settings `ledger` and `schemas`. Each service shows the whole list, so one service that is
left is enough.
"""

from services.core.metrics import FLEET_EXPECTED
from services.core.pipe_file.pipes import PipeFile, needs_retrier


def show_expected(pipes: PipeFile, *, ledger: bool, registry: bool) -> None:
    """Set the metric. ledger: whether the services report, so that an observer must read. registry: whether the fleet has a
    registry, by the setting `schemas`. A registry itself gives True.

    Later calls replace the list.
    """
    FLEET_EXPECTED.clear()
    for service, pipe in list_expected(pipes, ledger=ledger):
        FLEET_EXPECTED.labels(service, pipe).set(1)
    if registry:
        FLEET_EXPECTED.labels("registry", "").set(1)


def list_expected(pipes: PipeFile, *, ledger: bool) -> list[tuple[str, str]]:
    """The needed services as (service, pipe). Only expel and transform have a pipe, because their processes may divide the pipes;
    else it is "".

    The autoscaler is not in the list: nothing says whether a fleet has one. `show_expected` adds the registry.
    """
    expected = [("ingest", "")]
    if pipes.removed:
        expected.append(("expel", ""))
    if needs_retrier(pipes):
        expected.append(("retrier", ""))
    if any(stream.compact for stream in pipes.streams.values()):
        expected.append(("table", ""))
    if ledger:
        expected.append(("observer", ""))
    expected += [("expel", name) for name, pipe in pipes.pipes.items() if pipe.destinations]
    return expected + [("transform", name) for name, pipe in pipes.pipes.items() if pipe.transform is not None]
