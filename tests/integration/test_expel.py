"""Expel as a process, from a stream to receivers: nothing lost, nothing committed too early, nobody held up by others."""

import asyncio
import base64
import itertools
import signal
from pathlib import Path

import pytest
from aiohttp import web

from services.core.broker.contract import TopicSpec
from services.core.broker.record import Record
from services.core.undelivered import dead_letter
from tests.integration.expel_process import DEAD, Expel, hook, ids, kill_at_end, make_record, open_expel
from tests.unit.expel import receiver as bad
from tests.unit.expel.receiver import DEADLINE, Received, Receiver, open_receiver, open_socket_server, wait_until

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


def answer(status: int, **headers: str) -> web.Response:
    return web.Response(status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_signed_batches_arrive_and_offsets_are_committed(tmp_path: Path) -> None:
    """Broken: the main job: an event in a stream does not reach its receiver, unsigned, or is delivered for ever."""
    async with open_receiver(secret=SECRET) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url, secret={"env": "HOOK_SECRET"}))
        expel.environ["HOOK_SECRET"] = SECRET
        await expel.send(ids(2500))
        await expel.start()
        await receiver.wait_for_ids(ids(2500))
        await expel.wait_no_lag("hook")
        assert len(receiver.accepted) == 2500
        assert len(receiver.requests) < 100
        await expel.wait_metric(2500, "penstock_expel_events_delivered_total", destination="hook")
        assert await expel.metric("penstock_e2e_lag_seconds_count", pipe="late") == 2500
        assert await expel.metric("penstock_expel_lane_up", destination="hook") == 1
        assert await expel.stop() == 0
        assert SECRET not in expel.log


async def test_kill_9_redelivers_what_was_not_committed(tmp_path: Path) -> None:
    """Broken: a crash loses the events that were taken and not delivered."""
    held: asyncio.Event = asyncio.Event()

    async def hold(_received: Received) -> web.Response:
        await held.wait()
        return answer(200)

    async with open_receiver() as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url))
        await expel.start()
        await expel.send(ids(300))
        await receiver.wait_for_ids(ids(300))
        await expel.wait_no_lag("hook")
        receiver.answer = hold
        await expel.send(ids(500, start=300))
        await receiver.wait_for(lambda r: r.under_way > 0)
        await expel.stop(signal.SIGKILL)
        receiver.answer = bad.accept
        held.set()
        receiver.accepted.clear()
        await expel.start()
        await receiver.wait_for_ids(ids(500, start=300))
        await expel.wait_no_lag("hook")
        assert not set(receiver.accepted) & set(ids(300))


async def test_message_ids_survive_a_crash(tmp_path: Path) -> None:
    """Broken: receivers that know requests by webhook-id cannot tell a rerun from something new."""
    async with open_receiver(lambda _received: answer(503)) as receiver, open_expel(tmp_path, partitions=1) as expel:
        expel.destinations.append(
            hook("hook", receiver.url, concurrency=1, retry={"attempts": 20, "max_wait": "100ms"})
        )
        await expel.send(ids(100))
        await expel.start()
        await receiver.wait_for(lambda r: len(r.requests) >= 2)
        await expel.stop(signal.SIGKILL)
        count = len(receiver.requests)
        await expel.start()
        await receiver.wait_for(lambda r: len(r.requests) > count)
        assert len({request.message_id for request in receiver.requests}) == 1


async def test_retries_until_it_works(tmp_path: Path) -> None:
    """Broken: a short outage of the receiver loses events or kills the lane."""
    calls = itertools.count()

    async with (
        open_receiver(lambda _r: answer(503 if next(calls) % 2 else 204)) as receiver,
        open_expel(tmp_path) as expel,
    ):
        expel.destinations.append(
            hook("hook", receiver.url, retry={"attempts": 20, "base": "10ms", "max_wait": "50ms"})
        )
        await expel.send(ids(1000))
        await expel.start()
        await receiver.wait_for_ids(ids(1000))
        await expel.wait_no_lag("hook")
        assert len(receiver.accepted) == 1000
        assert await expel.metric("penstock_expel_events_retried_total", reason="http_503") > 0


async def test_what_cannot_be_delivered_is_a_dead_letter(tmp_path: Path) -> None:
    """Broken: an undeliverable event vanishes, or blocks its lane for ever; the letter does not say why and where from."""

    def judge(received: Received) -> web.Response:
        return answer(404) if "e7" in received.ids else answer(500 if "e8" in received.ids else 204)

    async with open_receiver(judge) as receiver, open_expel(tmp_path, partitions=1) as expel:
        expel.destinations.append(hook("hook", receiver.url, batch={"max_events": 1}))
        await expel.send_records([make_record(event_id, key="k") for event_id in ids(20)])
        await expel.start()
        await expel.wait_no_lag("hook")
        letters = {record.header("ce_id"): record for record in await expel.read_all(DEAD, 2)}
        assert set(receiver.accepted) == set(ids(20)) - {"e7", "e8"}
        letter = letters[b"e7"]
        assert (letter.key, letter.value) == (b"k", b'{"n":1}')
        assert letter.header(dead_letter.REASON) == b"http_404"
        assert letter.header(dead_letter.SOURCE) == b"flights:0:7"
        assert letter.header(dead_letter.NODE) == b"expel"
        assert letter.header(dead_letter.DESTINATION) == b"hook"
        assert letter.header(dead_letter.ATTEMPTS) == b"1"
        assert letters[b"e8"].header(dead_letter.ATTEMPTS) == b"4"
        assert dead_letter.strip(letter) == make_record("e7", key="k")
        assert await expel.metric("penstock_expel_events_dead_total", reason="http_404") == 1


async def test_bad_records_do_not_stop_the_lane(tmp_path: Path) -> None:
    """Broken: one record that somebody else wrote blocks all that come behind it, or spoils its neighbours' request."""
    records = [
        make_record("e0"),
        make_record("null", value=None),
        Record(None, b"{}", 0, ()),
        make_record("text", value=b"not json"),
        make_record("two", value=b'1},{"id":"forged"'),
        make_record("utf8", value=b'"\xff"'),
        make_record("large", value=b'"' + b"x" * 600_000 + b'"'),
        make_record("e1"),
    ]
    async with open_receiver() as receiver, open_expel(tmp_path, partitions=1) as expel:
        expel.destinations.append(hook("hook", receiver.url, batch={"max_bytes": "500KB"}))
        await expel.send_records(records)
        await expel.start()
        await receiver.wait_for_ids(["e0", "e1"])
        await expel.wait_no_lag("hook")
        assert receiver.accepted == ["e0", "e1"]
        letters = await expel.read_all(DEAD, 6)
        assert sorted(letter.header(dead_letter.REASON) or b"" for letter in letters) == [b"bad_record"] * 5 + [
            b"oversize"
        ]
        assert await expel.metric("penstock_expel_events_dead_total", reason="bad_record") == 5


async def test_partial_answers_retry_only_what_failed(tmp_path: Path) -> None:
    """Broken: a receiver that took half of a batch gets all of it again, or never gets the other half."""
    refused: set[str] = set()

    def judge(received: Received) -> web.Response:
        bad_ones = [event_id for event_id in received.ids if int(event_id[1:]) % 10 == 0 and event_id not in refused]
        refused.update(bad_ones)
        never = [{"id": "e5", "status": 422, "reason": "too late"}] if "e5" in received.ids else []
        return web.json_response({"failed": [{"id": event_id} for event_id in bad_ones] + never})

    async with open_receiver(judge) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url))
        await expel.send(ids(500))
        await expel.start()
        await receiver.wait_for_ids([event_id for event_id in ids(500) if event_id != "e5"])
        await expel.wait_no_lag("hook")
        assert len(receiver.accepted) == 499
        (letter,) = await expel.read_all(DEAD, 1)
        assert letter.header(dead_letter.REASON) == b"http_422"
        assert b"too late" in (letter.header(dead_letter.DETAIL) or b"")


async def test_retry_after_is_honoured(tmp_path: Path) -> None:
    """Broken: a receiver that asks for a pause is called again at once, by this request or others."""
    async with open_receiver(lambda _r: answer(429, Retry_After="2")) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url, concurrency=1, batch={"max_events": 10}))
        await expel.send(ids(100))
        await expel.start()
        await receiver.wait_for(lambda r: len(r.requests) == 1)
        receiver.answer = bad.accept
        await receiver.wait_for_ids(ids(100))
        assert receiver.requests[1].at - receiver.requests[0].at >= 1.9


async def test_one_dead_destination_is_felt_by_no_other(tmp_path: Path) -> None:
    """Broken: somebody else's outage delays my events: a shared pool, offset, thread or buffer."""
    async with (
        open_receiver() as healthy,
        open_socket_server(bad.hang) as hang,
        open_socket_server(bad.drip) as drip,
        open_socket_server(bad.reset) as reset,
        open_socket_server(bad.answer_endlessly(500)) as endless,
        open_receiver(lambda _r: answer(503)) as failing,
        open_expel(tmp_path) as expel,
    ):
        for name, url in {
            "hang": hang,
            "drip": drip,
            "reset": reset,
            "endless": endless,
            "failing": failing.url,
        }.items():
            expel.destinations.append(
                hook(name, url, timeout="60s", retry={"attempts": 20, "base": "60s", "max_wait": "60s"})
            )
        expel.destinations.append(
            hook("nowhere", "http://penstock-test.invalid/", retry={"attempts": 20, "base": "60s"})
        )
        expel.destinations.append(hook("healthy", healthy.url))
        await expel.start()
        for round_number in range(10):
            await expel.send(ids(500, start=500 * round_number))
            await asyncio.sleep(0.05)
        await healthy.wait_for_ids(ids(5000))
        await expel.wait_no_lag("healthy")
        assert len(healthy.accepted) == 5000
        for name in ("hang", "drip", "reset", "endless", "failing", "nowhere"):
            assert sum(lag.records for lag in (await expel.lag(name)).values()) == 5000
            assert await expel.metric("penstock_expel_events_dead_total", destination=name) == 0


async def test_order_by_key_holds_under_failures(tmp_path: Path) -> None:
    """Broken: a receiver ends with an old state of a key, because a retry overtook or was overtaken."""
    calls = itertools.count()
    seen: dict[str, list[int]] = {}

    async def judge(received: Received) -> web.Response:
        await asyncio.sleep(0.005)
        if next(calls) % 4 == 0:
            return answer(503)
        refused = {event_id for event_id in received.ids if next(calls) % 50 == 0}
        for event_id in received.ids:
            if event_id not in refused:
                key, number = event_id.split("-")
                seen.setdefault(key, []).append(int(number))
        return web.json_response({"failed": [{"id": event_id} for event_id in refused]})

    async with open_receiver(judge) as receiver, open_expel(tmp_path) as expel:
        retry = {"attempts": 20, "base": "10ms", "max_wait": "40ms"}
        expel.destinations.append(hook("hook", receiver.url, order="key", retry=retry, batch={"max_events": 20}))
        records = [make_record(f"k{key}-{number}", key=f"k{key}") for number in range(60) for key in range(30)]
        await expel.send_records(records)
        await expel.start()
        await expel.wait_no_lag("hook")
        assert receiver.most_under_way > 1
        for key in range(30):
            taken = seen[f"k{key}"]
            assert set(taken) == set(range(60))
            # what was taken beside a refused earlier one came again after it: the last arrivals are in order
            last = [max(place for place, number in enumerate(taken) if number == n) for n in range(60)]
            assert last == sorted(last)


async def test_unavailable_dead_letters_drop_nothing(tmp_path: Path) -> None:
    """Broken: an event that can go nowhere is committed and lost, or a restart is needed afterwards."""
    async with open_receiver(lambda _r: answer(404)) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url))
        await expel.broker.admin.delete_topic(DEAD)
        await expel.send(ids(50))
        await expel.start()
        await wait_until(lambda: "outbox_unavailable" in expel.log)
        assert sum(lag.records for lag in (await expel.lag("hook")).values()) == 50
        await expel.broker.admin.create_topic(TopicSpec(DEAD, 1))
        letters = await expel.read_all(DEAD, 50)
        assert {letter.header("ce_id") for letter in letters} == {event_id.encode() for event_id in ids(50)}
        await expel.wait_no_lag("hook")


async def test_stream_destination_carries_everything_on(tmp_path: Path) -> None:
    """Broken: a forwarded record loses its key, order or headers."""
    async with open_expel(tmp_path) as expel:
        expel.destinations.append({"name": "copy", "stream": "copy"})
        records = [make_record(f"{key}-{number}", key=f"k{key}") for number in range(300) for key in range(10)]
        await expel.send_records(records)
        await expel.start()
        await expel.wait_no_lag("copy")
        found = await expel.read_all("copy", 3000)
        assert sorted(map(repr, found)) == sorted(map(repr, records))
        for key in range(10):
            assert [r for r in found if r.key == b"k%d" % key] == [r for r in records if r.key == b"k%d" % key]


async def send_until_it_delivers(expel: Expel, second: Expel, receiver: Receiver, sent: int) -> int:
    """Keep 1,000 to 3,000 events under way until the second instance has delivered some. Returns how many were sent in all.

    A fixed number may be delivered by the first instance before the second has joined.
    """
    async with asyncio.timeout(DEADLINE):
        while await second.metric("penstock_expel_events_delivered_total") < 50:
            if sent - len(set(receiver.accepted)) < 1000:
                await expel.send(ids(2000, start=sent))
                sent += 2000
            await asyncio.sleep(0.05)
    return sent


async def test_instances_come_and_go_under_load(tmp_path: Path) -> None:
    """Broken: at a rebalance an event is lost, because an offset was committed past one that was still under way."""

    async def slow(_received: Received) -> web.Response:
        await asyncio.sleep(0.02)
        return answer(503 if next(calls) % 10 == 0 else 204)

    calls = itertools.count()
    async with open_receiver(slow) as receiver, open_expel(tmp_path) as expel, kill_at_end(expel.second()) as second:
        retry = {"attempts": 20, "base": "10ms", "max_wait": "100ms"}
        expel.destinations.append(hook("hook", receiver.url, retry=retry, batch={"max_events": 5}, concurrency=4))
        await expel.start()
        await expel.send(ids(2000))
        await second.start()
        sent = await send_until_it_delivers(expel, second, receiver, 2000)
        assert await second.stop() == 0
        await second.start()
        sent = await send_until_it_delivers(expel, second, receiver, sent)
        assert await expel.stop() == 0
        await receiver.wait_for_ids(ids(sent))
        await expel.wait_no_lag("hook")
        assert len(receiver.accepted) <= sent + 2000  # handing over is orderly: little is delivered twice


async def test_sigterm_under_load_drains(tmp_path: Path) -> None:
    """Broken: a deployment loses events, hangs, or delivers what it had finished once more."""

    async def slow(_received: Received) -> web.Response:
        await asyncio.sleep(0.05)
        return answer(204)

    async with open_receiver(slow) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url, batch={"max_events": 10}))
        await expel.send(ids(5000))
        await expel.start()
        await receiver.wait_for(lambda r: len(r.accepted) > 200)
        assert await expel.stop() == 0
        assert receiver.under_way == 0
        delivered = len(receiver.accepted)
        lag = sum(lag.records for lag in (await expel.lag("hook")).values())
        assert delivered < 5000
        assert delivered + lag <= 5000 + 4 * 8 * 10  # partitions * requests * events: only gaps at the front come again
        receiver.answer = bad.accept
        await expel.start()
        await receiver.wait_for_ids(ids(5000))


async def test_sigterm_with_a_hanging_receiver_ends_in_time(tmp_path: Path) -> None:
    """Broken: one hanging receiver keeps the process from stopping, what it holds is committed, or the stop looks clean."""
    async with open_socket_server(bad.hang) as url, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", url, timeout="60s"))
        await expel.send(ids(100))
        await expel.start("--drain", "2s")
        await expel.wait_metric(100, "penstock_expel_lane_events", destination="hook")
        assert await expel.stop() == 1
        assert "not_drained" in expel.log
        assert "late/hook" in expel.log
        assert sum(lag.records for lag in (await expel.lag("hook")).values()) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "http://169.254.169.254/"}, ["pipes.late.destinations[hook].webhook.url", "link-local"]),
        ({"url": "file:///etc/passwd"}, ["pipes.late.destinations[hook].webhook.url"]),
        ({"url": "http://127.0.0.1:8080/v1/streams/flights/events"}, ["loop"]),
        ({"headers": {"webhook-id": "x"}}, ["headers.webhook-id"]),
        ({"secret": {"file": "open.secret"}}, ["webhook.secret", "chmod 600"]),
        ({"secret": {"env": "NOT_SET"}}, ["webhook.secret", "NOT_SET"]),
        ({"timeout": "10"}, ["timeout", "unit"]),
        ({"colour": "red"}, ["colour", "unknown key"]),
    ],
)
async def test_bad_configuration_ends_with_status_2(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    """Broken: expel starts with a mistake, or a person has to guess where it is."""
    (tmp_path / "open.secret").write_text(SECRET)
    (tmp_path / "open.secret").chmod(0o644)
    async with open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", **({"url": "https://example.com/hook"} | change)))
        await expel.start(wait_ready=False)
        assert expel.process is not None
        assert await expel.process.wait() == 2
        for word in (*words, "pipes.yaml:1"):
            assert word in expel.log
        assert SECRET not in expel.log


async def test_unknown_pipe_to_serve_is_named(tmp_path: Path) -> None:
    """Broken: an instance that serves nothing looks healthy."""
    async with open_expel(tmp_path, [hook("hook", "https://example.com/hook")]) as expel:
        await expel.start("--serve", "nothing", wait_ready=False)
        assert expel.process is not None
        assert await expel.process.wait() == 2
        assert "--serve: nothing" in expel.log
