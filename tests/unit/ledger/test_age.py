"""How old what is left can be at most, without a look at any record."""

import random

from services.core.ledger.age import Age

S = ("s", 0)
START = {("s", 0): 0, ("s", 1): 0}


def test_age_never_promises_too_much() -> None:
    """If this fails, a minute is final before a reader has done its events, and they count as lost."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    age, stored, done, known = Age(), [[0.0] * 5, [0.0] * 5], [0, 5], []
    for now in range(1, 800):
        for partition in (0, 1):
            stored[partition] += [now - chance.random()] * chance.choice([0, 0, 3])
            done[partition] = min(len(stored[partition]), done[partition] + chance.choice([0, 1, 2, 3]))
        ends = {("s", partition): len(stored[partition]) for partition in (0, 1)}
        answer = age.done_up_to(now, START, ends, {("s", partition): done[partition] for partition in (0, 1)})
        left = [at for partition in (0, 1) for at in stored[partition][done[partition] :]]
        assert answer is None or all(at > answer - 1 for at in left), f"seed {seed}"
        known.append(answer)
    ends = {("s", partition): len(stored[partition]) for partition in (0, 1)}
    assert age.done_up_to(800, START, ends, ends) == 800
    assert sum(answer is not None for answer in known) > 200, f"seed {seed}"


def test_age_is_not_known_before_the_first_look() -> None:
    """If this fails, a restart with a backlog looks as if nothing were left to do."""
    age = Age()
    assert age.done_up_to(10, START, {S: 100}, {}) is None
    assert age.done_up_to(20, START, {S: 110}, {S: 99}) is None
    assert age.done_up_to(30, START, {S: 120}, {S: 105}) == 10
    assert age.done_up_to(40, START, {S: 120}, {S: 120}) == 40
    for at in range(50, 1500):
        assert age.done_up_to(at, START, {S: 120 + at}, {S: 120}) == 40
    assert len(age._measured) < 1100


def test_what_is_gone_is_done() -> None:
    """Broken: a reader of a partition that retention emptied is behind for ever."""
    age = Age()
    assert age.done_up_to(10, {S: 0}, {S: 100}, {}) is None
    assert age.done_up_to(20, {S: 100}, {S: 100}, {}) == 20
