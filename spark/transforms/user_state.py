"""State that a transform's own code keeps over events: Spark's `transformWithState`.

Spark runs the code of such a transform in the first batch, and finds its mistakes there. Here they are found before the start.
And a trial on a sample (`penstock try`) shows the results of timers: in a batch without a watermark, Spark calls none.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import StructType

from services.core.pipe_file.transform import Transform
from spark.java import analyzed_plan, state_processor
from spark.transforms.output import BadTransform
from spark.transforms.plan_tree import items, walk

NODE = "TransformWithStateInPySpark"
"""Its name in Spark's plans, for rows and for pandas."""
Apply = Callable[[SparkSession, Mapping[str, DataFrame]], DataFrame]
_METHODS = ("transformWithState", "transformWithStateInPandas")
_WATERMARK = "spark.watermarkDelayMs"
"""Spark's mark of a column with a watermark."""
_BY_CLOCK, _BY_EVENT_TIME = "ProcessingTime", "EventTime"


class UserState(NamedTuple):
    """A use of `transformWithState`. time_mode, output_mode: as in Spark. processor: a copy; None: too large to look at."""

    processor: StatefulProcessor | None
    time_mode: str
    output_mode: str
    has_initial_state: bool

    @property
    def has_timers(self) -> bool:
        """Whether it may do something when a timer expires."""
        return self.processor is None or (
            type(self.processor).handleExpiredTimer is not StatefulProcessor.handleExpiredTimer
        )

    @property
    def needs_idle_batches(self) -> bool:
        """Whether it has work when there are no new events. With timeMode ProcessingTime, Spark would always run such a batch."""
        return self.time_mode == _BY_EVENT_TIME or (self.time_mode == _BY_CLOCK and self.has_timers)


def user_states(result: DataFrame) -> list[UserState]:
    """All uses in the plan of this result."""
    return [_read(node) for node in walk(analyzed_plan(result)) if node.nodeName() == NODE]


def _read(node: Any) -> UserState:
    time_mode = str(node.timeMode().toString()).removesuffix("TimeMode").removesuffix("$")
    return UserState(state_processor(node), time_mode, str(node.outputMode().toString()), bool(node.hasInitialState()))


def check_user_states(found: Sequence[UserState], transform: Transform) -> None:
    """Raise BadTransform, or the error of the transform's own code, for what Spark would refuse in the first batch."""
    for state in found:
        if state.output_mode != "Append":
            raise BadTransform(
                f"transformWithState has outputMode {state.output_mode!r}, and a result is written once. Try: outputMode='Append'"
            )
        if state.has_initial_state:
            raise BadTransform(
                "transformWithState has an initialState, which only the first batch reads. Try: a join with a table before it"
            )
        if state.time_mode == _BY_EVENT_TIME and transform.watermark is None:
            raise BadTransform(
                "transformWithState with timeMode 'EventTime' needs a watermark. Try: watermark: 10m in the pipe file"
            )
        if state.time_mode == _BY_CLOCK and state.has_timers and "interval" not in transform.model_fields_set:
            raise BadTransform(
                "transformWithState has timers by the clock (timeMode 'ProcessingTime'), so Spark runs a batch at each interval, "
                "with or without events. Try: interval: 5s in the pipe file, or timeMode='EventTime'"
            )
        if state.processor is not None:
            state.processor.init(_Declarations(state.time_mode))
            state.processor.close()


def would_take_late_events(result: DataFrame) -> bool:
    """Whether a use by event time gets frames without the column of the watermark. Then Spark drops no late event before it."""
    by_event_time = (
        each
        for each in walk(analyzed_plan(result))
        if each.nodeName() == NODE and _read(each).time_mode == _BY_EVENT_TIME
    )
    return any(
        not any(column.metadata().contains(_WATERMARK) for column in items(node.child().output()))
        for node in by_event_time
    )


class _Declarations(StatefulProcessorHandle):
    """Takes the declarations of `init`, and keeps no state."""

    def __init__(self, time_mode: str) -> None:
        self._time_mode, self._names = time_mode, set[str]()

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        self._declare(stateName, ttlDurationMs, schema)
        return ValueState(None, stateName)  # type: ignore[arg-type]  # nothing may be read in `init`

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        self._declare(stateName, ttlDurationMs, schema)
        return ListState(None, stateName)  # type: ignore[arg-type]

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        self._declare(stateName, ttlDurationMs, userKeySchema, valueSchema)
        return MapState(None, stateName)  # type: ignore[arg-type]

    def deleteIfExists(self, stateName: str) -> None:
        """A state of a former version of the processor."""

    def _declare(self, name: str, ttl_ms: int | None, *schemas: StructType | str) -> None:
        if name in self._names:
            raise BadTransform(f"its `init` declares the state {name!r} twice")
        self._names.add(name)
        if ttl_ms is not None and self._time_mode != _BY_CLOCK:
            raise BadTransform(
                f"the state {name!r} has ttlDurationMs, which is by the clock, and timeMode is {self._time_mode!r}. "
                "Try: timeMode='ProcessingTime', or a timer that clears the state"
            )
        for schema in schemas:
            if isinstance(schema, str):
                StructType.fromDDL(schema)


def with_timers_at_end(apply: Apply) -> Apply:
    """The same transform of a batch, with all timers of a key called after its rows, as if the watermark had passed them."""

    def applied(session: SparkSession, views: Mapping[str, DataFrame]) -> DataFrame:
        with _wrapped_processors():
            return apply(session, views)

    return applied


@contextmanager
def _wrapped_processors() -> Iterator[None]:
    """Within the block, `transformWithState` of every frame in this process runs wrapped processors."""
    former = {name: getattr(GroupedData, name) for name in _METHODS}
    for name, method in former.items():
        setattr(GroupedData, name, _wrapping(method))
    try:
        yield
    finally:
        for name, method in former.items():
            setattr(GroupedData, name, method)


def _wrapping(method: Callable[..., DataFrame]) -> Callable[..., DataFrame]:
    signature = inspect.signature(method)

    @wraps(method)
    def transform(*args: Any, **kwargs: Any) -> DataFrame:
        call = signature.bind(*args, **kwargs)
        if call.arguments["timeMode"].lower() != "none":
            call.arguments["statefulProcessor"] = _TimersAtEnd(call.arguments["statefulProcessor"])
        return method(*call.args, **call.kwargs)

    return transform


class _TimersAtEnd(StatefulProcessor):
    """Calls a key's timers right after its rows. Not those that a timer sets after the last one: it may do so for ever."""

    def __init__(self, inner: StatefulProcessor) -> None:
        self._inner = inner

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._inner.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        yield from self._inner.handleInputRows(key, rows, timerValues)
        timers = sorted(self._handle.listTimers())
        last = max(timers, default=0)
        while timers and timers[0] <= last:
            now = TimerValues(timerValues.getCurrentProcessingTimeInMs(), timers[0])
            yield from self._inner.handleExpiredTimer(key, now, ExpiredTimerInfo(timers[0]))
            self._handle.deleteTimer(timers[0])
            timers = sorted(self._handle.listTimers())

    def close(self) -> None:
        self._inner.close()
