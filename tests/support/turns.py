"""Long tests that take turns: of each group `make test` runs one on a day, and `make test TURNS=all` runs all.

Each of them takes a quarter of a minute or more. The tests of a group show the same promise in several ways: on several brokers,
by several faults. Without turns the suite would take far longer than the 20 minutes that it aims at on two cores. A test that is
named on a command line without `-n` runs on any day. `make release` wants all of them.

Random searches take turns with themselves: `cases_of_the_day`.
"""

import os
import time

import pytest

VARIABLE = "PENSTOCK_TEST_TURNS"
"""`all`, or the number of the day: workers that begin before midnight and after it must run the same tests."""
DAYS = 3
"""In so many days a random search does all of its cases."""
_SERVICE, _KAFKA = "tests/spark/test_service.py::", "tests/spark/test_kafka.py::"
_MOVES = "tests/kafka/test_migrate.py::test_a_stream_moves_there_and_back"
_KILLED = (
    ("tests/unit/fleet/test_migrate.py", range(4, 24)),
    ("tests/integration/test_kinesis_migrate.py", range(3, 13)),
)
_DEMO, _PROCESSES = "tests/integration/test_demo.py::", "tests/faults/test_processes.py::"
GROUPS: tuple[tuple[str, ...], ...] = (
    *(
        tuple(f"{file}::test_killed_at_any_step_in_many_histories[{seed}]" for seed in seeds[first : first + 5])
        for file, seeds in _KILLED
        for first in range(0, len(seeds), 5)
    ),
    (f"{_MOVES}[log-kafka-11]", f"{_MOVES}[kafka-log-12]", f"{_MOVES}[kafka-kafka-13]"),
    (
        "tests/faults/test_migration.py::test_to_kafka[log]",
        "tests/faults/test_migration.py::test_to_kafka[kafka]",
        "tests/faults/test_migration.py::test_to_kinesis",
    ),
    (
        f"{_KAFKA}test_a_checkpoint_changes_its_mode[False]",
        f"{_KAFKA}test_a_checkpoint_changes_its_mode[True]",
        "tests/spark/test_cluster.py::test_real_time_mode_on_executors",
    ),
    (
        f"{_KAFKA}test_one_event_of_four_million_rows",
        "tests/spark/test_too_much.py::test_one_event_of_four_million_rows",
    ),
    (
        "tests/spark/test_cluster.py::test_workers_master_broker_and_driver_come_and_go",
        "tests/spark/test_kinesis_cluster.py::test_executors_and_drivers_die",
        "tests/spark/test_executor_group.py::test_executors_are_a_group",
    ),
    (
        f"{_SERVICE}test_an_event_that_takes_all_memory",
        f"{_KAFKA}test_real_time_event_that_takes_all_memory",
        "tests/spark/test_cluster.py::test_one_event_ends_its_executor_each_time",
    ),
    (
        f"{_SERVICE}test_killed_in_the_middle",
        f"{_KAFKA}test_killed_in_the_middle",
        f"{_DEMO}test_kill_9_in_the_middle_loses_nothing",
    ),
    (f"{_DEMO}test_demo_delivers_every_event[kafka]", f"{_DEMO}test_demo_delivers_every_event[kinesis]"),
    (
        "tests/spark/test_fence.py::test_two_drivers_frozen_in_turns",
        "tests/spark/test_fence.py::test_a_pipe_goes_on_in_an_object_store",
    ),
    (
        f"{_PROCESSES}test_kill_9_at_random_moments[kafka]",
        f"{_PROCESSES}test_sigterm_under_load[kafka]",
        f"{_PROCESSES}test_freeze_for_longer_than_the_lease[kafka]",
        f"{_PROCESSES}test_workers_come_and_go[kafka]",
    ),
    (
        "tests/integration/test_autoscaler.py::test_shards_follow_a_load_that_rises_fourfold",
        "tests/integration/test_kinesis_load.py::test_four_times_the_load_is_taken_after_splits_and_merges",
    ),
    (
        "tests/kafka/test_backend_sending.py::test_everything_goes_on_after_a_total_outage",
        "tests/contract/test_failures.py::test_everything_survives_a_restart[kafka]",
        "tests/contract/test_groups.py::test_commit_survives_a_restart[kafka]",
        "tests/contract/test_append.py::test_what_was_acked_survives_kill_9_at_once[kafka]",
    ),
    (
        "tests/spark/test_cluster.py::test_pipe_on_two_workers",
        "tests/integration/test_docs_transforms.py::test_the_page_of_clusters_works",
    ),
    (
        "tests/kafka/test_migrate.py::test_a_stream_moves_between_kafka_and_kinesis",
        "tests/integration/test_kinesis_migrate.py::test_answers_that_are_lost",
    ),
    tuple(
        f"tests/integration/test_rate.py::test_rates_and_sets_the_target[{service}]" for service in ("expel", "ingest")
    ),
    (
        "tests/integration/test_global_retrier.py::test_killed_every_second_on_the_log",
        "tests/integration/test_global_retrier.py::test_killed_again_and_again_on_kafka",
    ),
    (
        "tests/integration/test_ingest_kafka.py::test_two_of_three_brokers_die_and_come_back",
        "tests/faults/test_kafka_nodes.py::test_two_of_three_killed",
    ),
    ("tests/faults/test_limits.py::test_full_disk", "tests/faults/test_limits.py::test_full_disk_of_kafka"),
    *(
        tuple(f"tests/faults/{test}{broker}]" for broker in ("log", "kafka"))
        for test in (
            "test_limits.py::test_ten_times_the_load[",
            "test_outage.py::test_destination_down_while_retrier_and_expel_are_killed[",
            "test_processes.py::test_frozen_while_another_came_and_went[",
        )
    ),
    tuple(
        f"tests/faults/test_loss.py::test_exactly_what_a_node_loses_is_missing_there_and_named[{broker}-expel]"
        for broker in ("log", "kafka")
    ),
)


def begin() -> None:
    """Once, in the process that starts the workers: they inherit the day."""
    os.environ.setdefault(VARIABLE, str(int(time.time() // 86400)))


def waiting() -> list[str]:
    """The tests that have their turn on another day."""
    day = os.environ.get(VARIABLE, "all")
    if day == "all":
        return []
    return [test for group in GROUPS for number, test in enumerate(group) if number != int(day) % len(group)]


def cases_of_the_day(cases: range) -> list[int]:
    """Of a random search, what a run by workers does: a third, and all in three days; any other run does all.

    On each day they begin with another one: a search that ends early for want of time leaves out others each day.
    """
    day = os.environ.get(VARIABLE, "all")
    number, chosen = int(time.time() // 86400) if day == "all" else int(day), list(cases)
    if day != "all" and "PYTEST_XDIST_WORKER" in os.environ and len(cases) >= DAYS:
        first, end = (len(cases) * (number % DAYS + after) // DAYS for after in (0, 1))
        chosen = chosen[first:end]
    begin_at = number * 61 % len(chosen)
    return chosen[begin_at:] + chosen[:begin_at]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of `pytest -n`."""
    if not hasattr(config, "workerinput"):
        return
    others = set(waiting())
    if left := [item for item in items if item.nodeid in others]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which were left out, of a run by workers."""
    others = waiting()
    if others and terminalreporter.config.getoption("numprocesses", None):
        terminalreporter.section("long tests that have their turn on another day; make test TURNS=all runs them")
        for test in others:
            terminalreporter.write_line(test)
