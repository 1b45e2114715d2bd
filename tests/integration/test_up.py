"""`penstock up` as a person runs it: events arrive signed, crashes lose nothing, mistakes are named, nothing is left over."""

import asyncio
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from services.core.broker.connect import open_broker
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.topic_names import delay_topic, parked_topic
from services.core.provision import ensure_topics
from tests.integration.fleet_process import DEADLINE, Desk, family, living, until
from tests.support.waiting_events import store, waiting_event


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_from_send_to_signed_deliveries(desk: Desk) -> None:
    """Broken: the first thing that anybody tries does not work."""
    desk.write_pipes()
    events = desk.write_events(1000)
    async with desk.receive(), desk.up() as fleet:
        sent = await desk.send(events, "--json")
        assert json.loads(sent.out)["accepted"] == 1000
        await until(lambda: len(desk.ids) == 1000, "all events delivered")
        async with asyncio.timeout(DEADLINE):
            while True:  # a service that is starved for five seconds counts as one that does not answer
                status = json.loads((await desk.run("status", "--json")).out)
                if {process["state"] for process in status["processes"]} == {"ready"}:
                    break
        assert status["streams"][0]["accepted"] == 1000
        [destination] = status["destinations"]
        assert (destination["delivered"], destination["dead"], destination["up"]) == (1000, 0, True)
        assert destination["e2e_lag_ms"]["p99"] > 0
        assert (status["retrier"]["up"], status["retrier"]["waiting"], status["retrier"]["dead"]) == (True, 0, 0)
        assert [(process["name"], process["state"]) for process in status["processes"]] == [
            ("observer-1", "ready"),
            ("retrier-1", "ready"),
            ("expel-1", "ready"),
            ("ingest-1", "ready"),
        ]
        assert all(process["rss_bytes"] > 0 for process in status["processes"])
        pids = family(fleet.process.pid)
        assert await fleet.interrupt() == 0
    assert "draining ingest" in fleet.err
    assert not living(pids)
    assert not (desk.data / "fleet.json").exists()
    assert desk.receiver.unsigned == 0
    assert (await desk.run("status")).process.returncode == 1


async def _let_wait(desk: Desk, lane: str) -> None:
    """Events e1 and e2 wait for this lane: with the global retrier, until in a second, and parked."""
    pipes = await asyncio.to_thread(load_pipes, desk.folder / "pipes.yaml")
    due = int(time.time() * 1000) + 1000
    async with open_broker(f"log://{desk.data / 'log'}") as broker:
        await ensure_topics(broker.admin, pipes)
        await store(broker, delay_topic(4), [waiting_event(lane, 1, due=due)])
        await store(broker, parked_topic("p"), [waiting_event(lane, 2)])


@pytest.mark.parametrize("more", [", schedule: []", ", order: key"])
async def test_what_waits_arrives_when_the_last_schedule_is_turned_off(desk: Desk, more: str) -> None:
    """Broken: acknowledged events lie in a delay topic that nobody reads, and end there with its retention."""
    desk.write_pipes()
    await _let_wait(desk, "p/d")
    desk.write_pipes(more=more)
    async with desk.receive(), desk.up() as fleet:
        await until(lambda: desk.ids == {"e1", "e2"}, "what waited is delivered")
        assert json.loads((await desk.run("status", "--json")).out)["retrier"]["up"]
        assert await fleet.interrupt() == 0


async def test_what_waits_for_a_renamed_destination_is_asked_about_and_arrives(desk: Desk) -> None:
    """Broken: with the old name what was parked and retried under it is gone, and nobody is told."""
    desk.write_pipes()
    await _let_wait(desk, "p/d")
    desk.write_pipes(name="e")
    refused = await desk.run("up", "--listen", f"127.0.0.1:{desk.ingest_port}", "--allow-networks", "127.0.0.0/8")
    assert refused.process.returncode == 2
    assert "2 events wait" in refused.err
    desk.write_pipes(name="e", former="d")
    async with desk.receive(), desk.up() as fleet:
        await until(lambda: desk.ids == {"e1", "e2"}, "what waited is delivered to the new name")
        assert (await desk.run("check", "--allow-networks", "127.0.0.0/8")).process.returncode == 0
        assert await fleet.interrupt() == 0


MAX_KILLS = 8
"""The supervisor waits longer before each further start, up to 30 s: endless kills would only test that wait."""


async def test_kill_9_of_every_service_while_events_flow(desk: Desk) -> None:
    """Broken: a crash loses acknowledged events, or the fleet does not come back by itself."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    desk.write_pipes()
    events = desk.write_events(4000)
    async with desk.receive(), desk.up("--ingest", "2") as fleet:
        sending = asyncio.ensure_future(desk.send(events, "--rate", "500", "--json"))
        kills = 0
        while not sending.done() and kills < MAX_KILLS:
            await asyncio.sleep(dice.uniform(0.3, 1.0))
            victims = [process.pid for process in (await desk.state()).processes if process.pid is not None]
            if victims and not sending.done():
                os.kill(dice.choice(victims), signal.SIGKILL)
                kills += 1
        sent = json.loads((await sending).out)
        assert kills >= 4
        assert sent["accepted"] == 4000
        await until(lambda: len(desk.ids) == 4000, f"all delivered (seed {seed})")
        assert sum(process.restarts for process in (await desk.state()).processes) >= 1
        assert await fleet.interrupt() == 0


async def test_an_edit_takes_effect_at_the_next_start(desk: Desk) -> None:
    """Broken: a service that crashes after an edit of the pipe file ends the fleet, or runs another file than the others do."""
    desk.write_pipes()
    events = desk.write_events(300)
    async with desk.receive(), desk.up() as fleet:
        pipes = desk.folder / "pipes.yaml"
        good = pipes.read_text()
        for edited in (good.replace("destinations", "destinatons"), good.replace("name: d", "name: other")):
            pipes.write_text(edited)
            [expel] = [one for one in (await desk.state()).processes if one.service == "expel"]
            assert expel.pid is not None
            os.kill(expel.pid, signal.SIGKILL)
            await desk.send(events)
            status = json.loads((await desk.run("status", "--json")).out)
            assert [each["destination"] for each in status["destinations"]] == ["d"]
        await until(lambda: len(desk.ids) == 300, "all delivered")
        assert fleet.process.returncode is None
        assert await fleet.interrupt() == 0
    assert "configuration is wrong" not in fleet.err


async def test_restart_goes_on_where_it_stopped(desk: Desk) -> None:
    """Broken: what was accepted and not delivered when the fleet stopped is forgotten."""
    desk.write_pipes()
    desk.receiver.slow = 600.0
    async with desk.receive(), desk.up("--drain", "500ms") as fleet:
        assert (await desk.send(desk.write_events(500))).process.returncode == 0
        await fleet.interrupt()
    assert not desk.ids
    desk.receiver.slow = 0.0
    async with desk.receive(), desk.up() as fleet:
        await until(lambda: len(desk.ids) == 500, "all delivered after the restart")
        assert await fleet.interrupt() == 0


async def test_second_ctrl_c_ends_at_once(desk: Desk) -> None:
    """Broken: a receiver that hangs keeps a person waiting."""
    desk.write_pipes()
    desk.receiver.slow = 600.0
    async with desk.receive(), desk.up("--drain", "600s") as fleet:
        await desk.send(desk.write_events(10))
        await until(lambda: desk.receiver.requests, "a delivery under way")
        pids = family(fleet.process.pid)
        began = time.monotonic()
        fleet.process.send_signal(signal.SIGINT)
        await fleet.until_said("draining expel")
        fleet.process.send_signal(signal.SIGINT)
        await fleet.finish()
        assert time.monotonic() - began < 300
    assert "stopping at once" in fleet.err
    assert not living(pids)


async def test_port_in_use(desk: Desk) -> None:
    """Broken: two fleets share a port, and each gets half of the events."""
    desk.write_pipes()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", desk.ingest_port))
        taken.listen()
        command = await desk.run("up", "--listen", f"127.0.0.1:{desk.ingest_port}", "--allow-networks", "127.0.0.0/8")
    assert command.process.returncode == 1
    assert f"error: ingest cannot listen on 127.0.0.1:{desk.ingest_port}: Address already in use" in command.err
    assert "Try: stop the program that listens there, or --listen" in command.err


async def test_second_fleet_on_one_folder(desk: Desk) -> None:
    """Broken: two supervisors fight over one log and one checkpoint; or a second start names only a port."""
    desk.write_pipes()
    async with desk.up() as fleet:
        command = await desk.run("up", "--listen", f"127.0.0.1:{desk.ingest_port}", "--allow-networks", "127.0.0.0/8")
        assert command.process.returncode == 1
        assert f"another fleet (process {fleet.process.pid}) runs on the data folder" in command.err


async def test_mistakes_before_anything_starts(desk: Desk) -> None:
    """Broken: a mistake shows itself after minutes, or half a fleet is left running."""
    desk.write_pipes("    transfrom: {sql: SELECT 1}\n")
    command = await desk.run("up")
    assert command.process.returncode == 2
    first, second = command.err.splitlines()
    assert first == "error: pipes.yaml:6: pipes.p.transfrom: unknown key; did you mean transform?"
    assert second.startswith("error: pipes.yaml:10: pipes.p.destinations[d].webhook.url: 127.0.0.1 is loopback")
    desk.write_pipes()
    command = await desk.run("up")
    assert command.process.returncode == 2
    assert "error: pipes.yaml:9: pipes.p.destinations[d].webhook.url: 127.0.0.1 is loopback" in command.err
    assert not desk.data.exists()


async def test_a_supervisor_that_is_killed_takes_its_services_along(desk: Desk) -> None:
    """Broken: orphans hold the port and the log, and the next start fails."""
    desk.write_pipes()
    async with desk.up() as fleet:
        pids = family(fleet.process.pid)
        assert len(pids) >= 3
        fleet.process.kill()
        await until(lambda: not living(pids), "everything gone")
    async with desk.up() as fleet:
        assert await fleet.interrupt() == 0


@pytest.mark.kafka
async def test_a_kafka_of_its_own(desk: Desk) -> None:
    """Broken: --broker kafka does not start, does not come back after a crash, or is left running."""
    desk.write_pipes()
    events = desk.write_events(2000)
    async with desk.receive(), desk.up("--broker", "kafka") as fleet:
        sending = asyncio.ensure_future(desk.send(events, "--rate", "200", "--json"))
        await until(lambda: desk.ids, "the first deliveries")
        [kafka] = [pid for pid in family(fleet.process.pid) if "java" in psutil.Process(pid).name()]
        os.kill(kafka, signal.SIGKILL)
        assert json.loads((await sending).out)["accepted"] == 2000
        await until(lambda: len(desk.ids) == 2000, "all delivered")
        pids = family(fleet.process.pid)
        assert await fleet.interrupt() == 0
    assert "Kafka died and is restarted" in fleet.err
    assert not living(pids)


@pytest.mark.spark
async def test_transform_survives_kill_9(desk: Desk) -> None:
    """Broken: a crash of Spark loses events, or makes duplicates with other ids."""
    desk.write_pipes("    transform: {sql: 'SELECT event, id, key, n * 2 AS twice FROM events'}\n")
    events = desk.write_events(2000)
    async with desk.receive(), desk.up() as fleet:
        sending = asyncio.ensure_future(desk.send(events, "--rate", "400", "--json"))
        await until(lambda: desk.ids, "the first deliveries")
        [transform] = [one for one in (await desk.state()).processes if one.service == "transform"]
        assert transform.pid is not None
        os.kill(transform.pid, signal.SIGKILL)
        assert json.loads((await sending).out)["accepted"] == 2000
        await until(lambda: len(desk.ids) == 2000, "all delivered")
        assert await fleet.interrupt() == 0
