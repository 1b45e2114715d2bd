"""The search for the events on which a transform fails, without Spark."""

import random
from collections.abc import Sequence

import pytest

from spark.brokers.contract import TooMuch
from spark.jobs.culprits import MAX_CULPRITS, SAMPLE, TransformBroken, find_culprits
from spark.records import RecordOffset, offset_text


class Trials:
    """A transform that fails on these events. Counts its trials."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.count = bad, 0

    def __call__(self, records: Sequence[RecordOffset]) -> str | None:
        self.count += 1
        return next((f"bad {record.offset}" for record in records if int(record.offset) in self.bad), None)


def batch(size: int) -> list[RecordOffset]:
    return [RecordOffset("s", 0, offset_text(number)) for number in range(size)]


@pytest.mark.parametrize("seed", range(50))
def test_every_culprit_is_found_and_no_other(seed: int) -> None:
    """If this fails, an event on which the transform raises stops its pipe, or takes others with it into the dead letters."""
    dice = random.Random(seed)
    size = dice.choice([1, 2, SAMPLE, SAMPLE + 1, 400, 5000])
    bad = set(dice.sample(range(size), dice.randrange(min(size // 2 + 1, 20))))
    trials = Trials(bad)
    found = find_culprits(batch(size), trials)
    assert found == {record: f"bad {record.offset}" for record in batch(size) if int(record.offset) in bad}
    assert trials.count <= 1 + SAMPLE + 2 * len(bad) * size.bit_length()


@pytest.mark.parametrize("bad", [set(range(400)), set(range(150, 400)), set(range(0, 4000, 31))])
def test_a_transform_that_fails_on_most_is_broken(bad: set[int]) -> None:
    """If this fails, a broken transform moves a stream into the dead letters."""
    assert len(bad) > MAX_CULPRITS
    with pytest.raises(TransformBroken):
        find_culprits(batch(400 if max(bad) < 400 else 4000), Trials(bad))


def test_what_fails_only_together_has_no_culprit() -> None:
    """If this fails, an event is rejected that the transform passes."""
    with pytest.raises(TransformBroken, match="on none of its 20 events alone"):
        find_culprits(batch(20), lambda records: "too many" if len(records) > 15 else None)


def test_what_fails_only_together_is_broken_although_more_is_too_much() -> None:
    """If this fails, a transform that fails on parts of a batch is started again for ever, as if the broker had failed."""

    def trial(records: Sequence[RecordOffset]) -> str | None:
        if len(records) > 15:
            raise TooMuch("too many")
        return "fails together" if len(records) > 3 else None

    with pytest.raises(TransformBroken, match="on none of its 40 events alone: fails together"):
        find_culprits(batch(40), trial)


@pytest.mark.parametrize("large", [set(), {5}])
@pytest.mark.parametrize("bad", [set(), {17}])
def test_what_is_too_much_for_a_trial_is_tried_in_parts(large: set[int], bad: set[int]) -> None:
    """If this fails, on Kafka a batch with more rows than a trial may have stops its pipe, or its events are rejected; or one
    event with too many rows is passed over in the search, and ends Java."""
    trials = Trials(bad)

    def trial(records: Sequence[RecordOffset]) -> str | None:
        if len(records) > 15 or large & {int(record.offset) for record in records}:
            raise TooMuch("too many")
        return trials(records)

    found = find_culprits(batch(40), trial)
    assert {int(record.offset): text for record, text in found.items()} == (
        dict.fromkeys(large, "too many") | {number: f"bad {offset_text(number)}" for number in bad}
    )
