"""Settings: flags over variables over the file over defaults; every mistake at once, each where it stands."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from services.core.process.settings import Settings, load_settings
from services.core.units import Duration, Size
from services.core.yaml_source import BadConfiguration
from spark.settings import TransformSettings


class Sample(Settings):
    """A sample service."""

    section: ClassVar[str] = "ingest"

    max_body: Size = Field(5_000_000, description="Largest body.")
    wait: Duration = Field(2.0, description="How long.")
    workers: int = Field(1, ge=1)
    open_to_all: bool = False


def mistakes(argv: list[str], environ: dict[str, str]) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        load_settings(Sample, argv, environ)
    return [str(problem) for problem in caught.value.problems]


def test_precedence(tmp_path: Path) -> None:
    """Broken: an operator's flag is overruled by a forgotten file."""
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "fleet: {broker: 'log:///file', log_level: error, pipes: file.yaml}\n"
        "ingest: {max_body: 1MB, wait: 1s, workers: 2}\nexpel: {anything: 1}\n"
    )
    environ = {"PENSTOCK_CONFIG": str(file), "PENSTOCK_BROKER": "log:///env", "PENSTOCK_INGEST_WAIT": "3s"}
    environ["PENSTOCK_LOG_LEVEL"] = "warning"
    settings = load_settings(Sample, ["--broker", "log:///flag", "--workers", "4"], environ)
    assert (settings.broker, settings.log_level, settings.pipes) == ("log:///flag", "warning", Path("file.yaml"))
    assert (settings.max_body, settings.wait, settings.workers) == (1_000_000, 3.0, 4)
    assert load_settings(Sample, [], {}).wait == 2.0


def test_a_switch_may_stand_alone() -> None:
    """Broken: `--dry-run` is refused with a word about an argument; or a switch cannot be switched off."""
    flag = "--open-to-all"
    for argv, value in (([flag], True), ([flag, "--broker", "log:///x"], True), ([flag, "false"], False), ([], False)):
        assert load_settings(Sample, argv, {}).open_to_all is value


def test_every_mistake_at_once(tmp_path: Path) -> None:
    """Broken: an operator repairs one mistake, starts again, meets the next."""
    file = tmp_path / "penstock.yaml"
    file.write_text("fleet:\n  brocker: x\ningset: {}\ningest:\n  wait: 10\n  acks: 1\n  open_to_all: perhaps\n")
    environ = {"PENSTOCK_INGEST_MAX_BODY": "-1MB", "PENSTOCK_INGEST_WAITT": "1s"}
    assert mistakes(["--config", str(file), "--workers", "0"], environ) == [
        "PENSTOCK_INGEST_WAITT: unknown setting",
        (
            f"{file}:3: ingset: unknown section. Try one of: "
            "autoscaler, expel, fleet, ingest, observer, registry, retrier, table, transform, up"
        ),
        f"{file}:2: fleet.brocker: unknown key. Try one of: broker, ledger, log_level, pipes, schemas",
        f"{file}:6: ingest.acks: unknown key. Try one of: drain, management, max_body, open_to_all, wait, workers",
        "PENSTOCK_INGEST_MAX_BODY: a size with a unit is needed (B, KB, MB, GB, KiB, MiB, GiB). Try: 1MB",
        f"{file}:5: ingest.wait: a duration with a unit is needed (ms, s, m, h, d). Try: 10s or 7d",
        "--workers: must be at least 1",
        f"{file}:7: ingest.open_to_all: true or false is needed",
    ]


@pytest.mark.parametrize("text", ["ingest: [1]\n", "ingest: 5\n", "- ingest\n", "just text\n"])
def test_shapes_that_are_no_settings(tmp_path: Path, text: str) -> None:
    """Broken: a file of another shape gives a traceback, or is ignored."""
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    assert mistakes(["--config", str(file)], {})[0].startswith(f"{file}:1: ")


def test_empty_file_and_empty_sections(tmp_path: Path) -> None:
    """Broken: the generated file, in which everything is commented out, is refused."""
    file = tmp_path / "penstock.yaml"
    for text in ("", "# nothing\n", "ingest:\nfleet:\n"):
        file.write_text(text)
        assert load_settings(Sample, ["--config", str(file)], {}) == Sample()


def test_unknown_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a typo in a flag is ignored, or help does not say default, unit and variable."""
    with pytest.raises(SystemExit) as caught:
        load_settings(Sample, ["--worker-count", "2"], {})
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as helped:
        load_settings(Sample, ["--help"], {})
    assert helped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Largest body. Default: 5MB. [PENSTOCK_INGEST_MAX_BODY]" in text
    assert "How long. Default: 2s. [PENSTOCK_INGEST_WAIT]" in text
    assert "[PENSTOCK_BROKER]" in text


def test_settings_are_frozen() -> None:
    """Broken: some code changes a setting for all others at run time."""
    with pytest.raises(ValueError, match="frozen"):
        Sample().workers = 3  # type: ignore[misc]


def test_memory_that_spark_refuses() -> None:
    """Broken: a heap that Spark does not start with is found by Spark, and looks like a crash that is worth another try."""
    with pytest.raises(BadConfiguration, match=r"--memory: Spark needs at least 480MiB\. Try: 1GiB"):
        load_settings(TransformSettings, ["--memory", "479MiB"], {})
    assert load_settings(TransformSettings, ["--memory", "480MiB"], {}).memory == 480 << 20
