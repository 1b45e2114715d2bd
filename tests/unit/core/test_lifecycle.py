"""The runner of every service: exit status, drain, second signal, bad configuration. Each case is a real process."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAM = """
import asyncio, sys
from typing import ClassVar
from services.core.process import lifecycle
from services.core.process.lifecycle import Supervision, run_service
from services.core.process.settings import Settings
from services.core.yaml_source import BadConfiguration, Problem

class Sample(Settings):
    '''A sample.'''
    section: ClassVar[str] = "ingest"

async def component(supervision, drain):
    print("running", flush=True)
    await supervision.stopping.wait()
    print("draining", flush=True)
    await asyncio.sleep(drain)
    print("settled", flush=True)

async def start(settings: Sample, supervision: Supervision) -> None:
    {body}

lifecycle.CLOSE_S = 600.0  # a busy machine may need longer
sys.exit(run_service(Sample, start, sys.argv[1:], {{}}))
"""


@contextmanager
def service(body: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM.format(body=body), *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drains_on_a_signal(number: signal.Signals) -> None:
    """Broken: a stop loses what is in flight, or reports failure to the orchestrator."""
    with service("supervision.run(component(supervision, 0.05), 'c')", "--drain", "600s") as process:
        assert first_line(process) == "running\n"
        process.send_signal(number)
        status, out, err = finish(process)
    assert (status, out) == (0, "draining\nsettled\n")
    assert '"event":"drained"' in err


def test_drain_is_bounded() -> None:
    """Broken: one stuck request keeps a machine from being replaced."""
    with service("supervision.run(component(supervision, 600), 'c')", "--drain", "50ms") as process:
        first_line(process)
        process.terminate()
        status, out, err = finish(process)
    assert (status, out) == (1, "draining\n")
    assert "not_drained_in_time" in err


def test_second_signal_ends_at_once() -> None:
    """Broken: a person presses Ctrl-C twice and still waits."""
    with service("supervision.run(component(supervision, 600), 'c')") as process:
        first_line(process)
        process.terminate()
        assert first_line(process) == "draining\n"
        process.terminate()
        assert finish(process)[0] == 1


def test_signal_while_starting() -> None:
    """Broken: a service that waits for its broker at start cannot be stopped."""
    with service("print('starting', flush=True); await asyncio.sleep(600)", "--drain", "50ms") as process:
        first_line(process)
        process.terminate()
        assert finish(process)[0] == 1


def test_a_component_that_ends_by_itself_fails_the_service() -> None:
    """Broken: a service without its consumer looks healthy and does nothing."""
    with service(
        "supervision.run(asyncio.sleep(0), 'lane ops'); supervision.run(component(supervision, 0), 'c')"
    ) as process:
        status, _, err = finish(process)
    assert status == 1
    assert "lane ops ended by itself" in err


def test_a_crash_is_logged_once_and_fails() -> None:
    """Broken: nobody learns why a service stopped."""
    with service("raise RuntimeError('psk_boom')") as process:
        status, _, err = finish(process)
    assert status == 1
    assert err.count('"event":"failed"') == 1
    assert "psk_boom" not in err


def test_bad_configuration_is_status_2() -> None:
    """Broken: a supervisor restarts for ever what only a person can repair."""
    with service(
        "raise BadConfiguration([Problem('f:1', 'a', 'is bad'), Problem('f:2', 'b', 'is bad too')])"
    ) as process:
        status, _, err = finish(process)
    assert status == 2
    assert err.endswith("error: f:1: a: is bad\nerror: f:2: b: is bad too\n")
    with service("pass", "--drain", "10") as process:
        status, _, err = finish(process)
    assert status == 2
    assert err == "error: --drain: a duration with a unit is needed (ms, s, m, h, d). Try: 10s or 7d\n"
