"""The processes of a fleet, planned from its settings."""

import os
from pathlib import Path

import services
from services.core.http.address import parse_address
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import read_contents, write_snapshot
from services.fleet.up.plan import make_plan
from services.fleet.up.settings import UpSettings


def test_port_0_becomes_one_free_port_for_all(tmp_path: Path) -> None:
    """Broken: `up --listen 127.0.0.1:0` tells people to send events to port 0, and each ingest listens on a port of its own."""
    path = tmp_path / "pipes.yaml"
    path.write_text(
        "version: 1\nstreams: {s: {}, t: {}}\npipes: {p: {sources: [s], destinations: [{name: d, stream: t}]}}\n"
    )
    write_snapshot(tmp_path / "snapshot", read_contents([path]))
    settings = UpSettings(pipes=path, data=tmp_path / "data", listen="[::1]:0", observer="127.0.0.1:0", ingest=2)
    plan = make_plan(settings, load_pipes(path), "log:", None, tmp_path / "snapshot", has_retrier=False)
    (ingest_host, ingest_port), (_, observer_port) = parse_address(plan.listen), parse_address(plan.observer)
    assert ingest_host == "::1"
    assert 0 not in (ingest_port, observer_port)
    assert ingest_port != observer_port
    arguments = [spec.arguments for spec in plan.services if spec.service == "ingest"]
    assert [given[given.index("--listen") + 1] for given in arguments] == [plan.listen] * 2


def test_services_find_our_packages_from_any_folder(tmp_path: Path) -> None:
    """Broken: services and Spark's workers import another Penstock, or take a module of ours for one of a transform's own."""
    path = tmp_path / "pipes.yaml"
    path.write_text("version: 1\nstreams: {s: {}}\npipes: {}\n")
    write_snapshot(tmp_path / "snapshot", read_contents([path]))
    plan = make_plan(UpSettings(), load_pipes(path), "log:", None, tmp_path / "snapshot", has_retrier=False)
    first = {Path(spec.environ["PYTHONPATH"].split(os.pathsep)[0]) for spec in plan.services}
    assert first == {Path(services.__path__[0]).parent}


def test_services_know_whether_there_is_a_registry(tmp_path: Path) -> None:
    """Broken: the only registry vanishes, and no service that is left says that the fleet needs one."""
    path = tmp_path / "pipes.yaml"
    path.write_text("version: 1\nstreams: {s: {}}\npipes: {}\n")
    write_snapshot(tmp_path / "snapshot", read_contents([path]))
    own, elsewhere, none = UpSettings(registry="127.0.0.1:8084"), UpSettings(schemas=True), UpSettings()
    for settings, known in ((own, "true"), (elsewhere, "true"), (none, "false")):
        plan = make_plan(settings, load_pipes(path), "log:", None, tmp_path / "snapshot", has_retrier=False)
        assert {spec.arguments[spec.arguments.index("--schemas") + 1] for spec in plan.services} == {known}
