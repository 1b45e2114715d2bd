"""`python -m services.ingest.sample`: makes records of a sample of events, as ingest would store them. `penstock try` runs it.

stdin: a list of `SampleEvent`, each as the only event of a request. stdout: a `Sample`. Both are msgpack. Nothing is stored.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.stream import Stream
from services.core.process.lifecycle import report_bad_configuration
from services.core.process.settings import load_settings
from services.core.sample import AbsentField, RefusedEvent, Sample, SampleEvent, SampleRecord, find_absent
from services.core.yaml_source import BadConfiguration
from services.ingest.intake import Intake
from services.ingest.json_events import Limits, read_json
from services.ingest.problems import Refused
from services.ingest.settings import IngestSettings


def make_sample(events: Sequence[SampleEvent], pipes: PipeFile, limits: Limits, arrival: int) -> Sample:
    """The records of these events, with offsets from 0 in each partition. arrival: ms. Events without a key go to partition 0."""
    streams = {name: _as_own(stream) for name, stream in pipes.streams.items()}
    intakes = {name: Intake(name, stream, lambda _topic, _partitions: 0) for name, stream in streams.items()}
    offsets: Counter[tuple[str, int]] = Counter()
    sample, accepted = Sample([], []), dict[str, list[Any]]()
    for event in events:
        intake = intakes[event.stream]
        intake.partitions = pipes.streams[event.stream].partitions
        try:
            prepared = intake.prepare(read_json(event.payload, limits), arrival, None)
        except Refused as refused:
            sample.refused.append(RefusedEvent(event.place, refused.kind.name, refused.detail))
            continue
        sample.refused.extend(RefusedEvent(event.place, one.kind.name, one.detail) for one in prepared.refused)
        if prepared.parts:
            accepted.setdefault(event.stream, []).append(msgspec.json.decode(event.payload))
        for partition, records in prepared.parts.items():
            for record in records:
                offset = offsets[event.stream, partition]
                offsets[event.stream, partition] += 1
                sample.records.append(SampleRecord(event.place, event.stream, partition, str(offset), record))
    for name, payloads in accepted.items():
        sample.absent.extend(find_absent(name, streams[name], payloads))
        if streams[name].time is None:
            sample.absent.append(AbsentField(name, "time", None, len(payloads), len(payloads)))
    return sample


def _as_own(stream: Stream) -> Stream:
    """A topic of others as a stream of ours: an event of a sample has no headers, so rules about them do not count."""
    if stream.topic is None:
        return stream
    places = {name: getattr(stream, name) for name in ("id", "key", "time", "columns")}
    return Stream(**{name: place for name, place in places.items() if isinstance(place, str)})


def main() -> int:
    """Exit status: 0 done, 2 bad configuration."""
    try:
        settings = load_settings(IngestSettings, sys.argv[1:], os.environ)
        pipes = load_pipes(settings.pipes)
    except BadConfiguration as error:
        return report_bad_configuration(error)
    events = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[SampleEvent])
    sample = make_sample(events, pipes, settings.limits, time.time_ns() // 1_000_000)
    sys.stdout.buffer.write(msgspec.msgpack.encode(sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
