"""From the checked pipe file to what each lane is: its sender, its shape, its bounds."""

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.destination_check import check_destinations
from services.core.ledger.report import TELEMETRY
from services.core.ledger.reporter import new_instance
from services.core.pauses import Pauses
from services.core.pipes import (
    CONTROL,
    RETRY_IN,
    Destination,
    Pipe,
    Removed,
    Webhook,
    dead_letter_topic,
    delivery_topics,
    is_retried,
    lane_name,
    parked_topic,
    pipe_version,
    read_pipes,
    retry_topic,
)
from services.core.signing_keys import SecretWatch, SigningKeys
from services.core.signing_secret import read_signing_keys
from services.core.yaml_source import BadConfiguration, Problem
from services.expel.cloudevent import make_format
from services.expel.dispatch import Dispatcher
from services.expel.disposition import RetryLimits
from services.expel.dns import Lookups
from services.expel.forward import MAX_BYTES, MAX_EVENTS, StreamSender
from services.expel.gate import Gate
from services.expel.http_client import HttpClient
from services.expel.lane import Lane
from services.expel.lane_bounds import LaneShape
from services.expel.lane_ledger import LaneLedger
from services.expel.meter import LaneMeter
from services.expel.pending import CutLimits
from services.expel.sender import Sender
from services.expel.settings import ExpelSettings
from services.expel.standing import Standing
from services.expel.webhook import WebhookSender

_MAX_LANE_BYTES = 64_000_000
_STREAM_RETRY = RetryLimits(attempts=None, base=0.2, max_wait=5.0)
_STREAM_WAIT = 0.02


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One destination of one pipe, with its signing keys. removed: names of those that the pipe no longer has."""

    pipe_name: str
    pipe: Pipe
    destination: Destination
    keys: SigningKeys
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ExpelPlan:
    """lanes: those of this instance. removed: of destinations that the file no longer has; every instance shares in these."""

    lanes: list[LanePlan]
    removed: Mapping[str, Removed]


def read_plan(settings: ExpelSettings, environ: Mapping[str, str]) -> ExpelPlan:
    """What this instance does. Blocking. Raises BadConfiguration with every problem."""
    document, pipes, problems = read_pipes(settings.pipes)
    problems += check_destinations(document, pipes, settings.policy, environ)
    problems += [
        Problem("--serve", name, f"is no pipe of {settings.pipes}. Try one of: {', '.join(sorted(pipes.pipes))}")
        for name in settings.serve
        if name not in pipes.pipes
    ]
    try:
        open_broker(settings.broker)
    except BadBrokerUrl as error:
        problems.append(Problem("--broker", "", str(error)))
    if problems:
        raise BadConfiguration(problems)
    folder = settings.pipes.parent
    lanes = [
        LanePlan(
            name,
            pipe,
            destination,
            _read_keys(destination.webhook, folder, environ),
            frozenset(lane.partition("/")[2] for lane in pipes.removed if lane.startswith(f"{name}/")),
        )
        for name, pipe in pipes.pipes.items()
        if not settings.serve or name in settings.serve
        for destination in pipe.destinations
    ]
    return ExpelPlan(lanes, pipes.removed)


def _read_keys(webhook: Webhook | None, folder: Path, environ: Mapping[str, str]) -> SigningKeys:
    if webhook is None or webhook.secret is None:
        return SigningKeys()
    return SigningKeys(read_signing_keys(webhook.secret, folder, environ))


def watch_secrets(plans: Iterable[LanePlan], folder: Path) -> list[SecretWatch]:
    """One for each webhook whose secret is a file. A variable is what it was when the process started."""
    return [
        SecretWatch(lane_name(plan.pipe_name, plan.destination.name), webhook.secret, folder, plan.keys)
        for plan in plans
        if (webhook := plan.destination.webhook) is not None
        and webhook.secret is not None
        and webhook.secret.file is not None
    ]


def touched_topics(plans: Iterable[LanePlan]) -> set[str]:
    """What these lanes read and write."""
    topics = {TELEMETRY}
    for plan in plans:
        topics.update(delivery_topics(plan.pipe_name, plan.pipe), (dead_letter_topic(plan.pipe_name),))
        if plan.destination.stream is not None:
            topics.add(plan.destination.stream)
        if plan.destination.webhook is not None:
            topics.update((retry_topic(plan.pipe_name), parked_topic(plan.pipe_name), CONTROL))
        if is_retried(plan.destination):
            topics.add(RETRY_IN)
    return topics


class LaneBuilder:
    """Makes lanes; what they need closed is closed by `stack`."""

    def __init__(
        self,
        settings: ExpelSettings,
        broker: Broker,
        producer: Producer,
        pauses: Pauses,
        stack: AsyncExitStack,
        lanes: int,
    ) -> None:
        self._pauses = pauses
        self._settings, self._broker, self._producer, self._stack = settings, broker, producer, stack
        self._lookups = Lookups()
        self._instance = new_instance()
        self._lane_bytes = min(_MAX_LANE_BYTES, settings.buffer // max(1, lanes))

    def build(self, plan: LanePlan) -> Lane:
        """One lane, not running yet."""
        destination = plan.destination
        meter = LaneMeter(plan.pipe_name, destination.name, ledger=self._open_ledger(plan))
        topics = delivery_topics(plan.pipe_name, plan.pipe)
        sender: Sender
        standing = None
        if destination.webhook is not None:
            sender = self._open_webhook(plan, destination.webhook)
            shape = self._shape_webhook(plan, destination.webhook)
            topics += [retry_topic(plan.pipe_name), parked_topic(plan.pipe_name)]
            standing = Standing(self._pauses, self._broker.admin, self._producer, shape)
        else:
            assert destination.stream is not None
            sender = StreamSender(self._producer, destination.stream)
            shape = self._shape_stream(plan)
        gate = Gate(shape)
        meter.ledger.watch(lambda: gate.state)

        def make_dispatcher() -> Dispatcher:
            return Dispatcher(shape, sender, self._producer, meter, gate)

        return Lane(
            self._broker,
            plan.pipe_name,
            destination.name,
            topics,
            destination.start,
            meter,
            make_dispatcher,
            self._settings.commit_interval,
            standing,
            where_kept=() if standing is not None else (retry_topic(plan.pipe_name), parked_topic(plan.pipe_name)),
        )

    def _open_webhook(self, plan: LanePlan, webhook: Webhook) -> WebhookSender:
        body = make_format(webhook.body, plan.pipe_name)
        client = HttpClient(
            webhook.url,
            policy=self._settings.policy,
            lookups=self._lookups,
            timeout=webhook.timeout,
            headers={**webhook.headers, "Content-Type": body.content_type},
        )
        self._stack.enter_context(client)
        return WebhookSender(client, plan.pipe_name, body, plan.keys, webhook.batch.max_bytes)

    def _shape_webhook(self, plan: LanePlan, webhook: Webhook) -> LaneShape:
        batch = webhook.batch
        return LaneShape(
            plan.pipe_name,
            plan.destination.name,
            CutLimits(min(batch.max_events, webhook.rate or batch.max_events), batch.max_bytes),
            _limit_retries(plan.destination, webhook),
            webhook.concurrency,
            batch.max_wait,
            max(self._settings.lane_events, batch.max_events),
            max(self._lane_bytes, batch.max_bytes),
            webhook.rate,
            keyed=webhook.order == "key",
            schedule=tuple(webhook.schedule) if is_retried(plan.destination) else (),
            siblings=_tells_of(plan),
            version=pipe_version(plan.pipe),
        )

    def _shape_stream(self, plan: LanePlan) -> LaneShape:
        return LaneShape(
            plan.pipe_name,
            plan.destination.name,
            CutLimits(MAX_EVENTS, MAX_BYTES),
            _STREAM_RETRY,
            concurrency=1,
            max_wait=_STREAM_WAIT,
            max_events=max(self._settings.lane_events, MAX_EVENTS),
            max_bytes=max(self._lane_bytes, MAX_BYTES),
            serial=True,
            version=pipe_version(plan.pipe),
            siblings=_tells_of(plan),
        )

    def _open_ledger(self, plan: LanePlan) -> LaneLedger:
        if not self._settings.ledger:
            return LaneLedger()
        name, sources = plan.pipe_name, delivery_topics(plan.pipe_name, plan.pipe)
        returned = retry_topic(name) if is_retried(plan.destination) else None
        held = [retry_topic(name), parked_topic(name)] if plan.destination.webhook is not None else []
        return LaneLedger.open(
            self._producer,
            self._broker.admin,
            self._instance,
            name,
            plan.destination.name,
            sources,
            returned,
            held,
            timed=not self._broker.features.contiguous_offsets,
        )


def _tells_of(plan: LanePlan) -> frozenset[str] | None:
    """Every destination of the pipe, for the first of them: one lane tells of events that none of them will deliver."""
    if plan.pipe.destinations[0].name != plan.destination.name:
        return None
    return frozenset(destination.name for destination in plan.pipe.destinations) | plan.removed


def _limit_retries(destination: Destination, webhook: Webhook) -> RetryLimits:
    """A few attempts here, then the global retrier. Where keys are in order, events are tried here until the window is over."""
    retry = webhook.retry
    if webhook.order == "key" and webhook.schedule:
        return RetryLimits(None, retry.base, retry.max_wait, window=sum(webhook.schedule))
    return RetryLimits(retry.attempts, retry.base, retry.max_wait, hands_over=is_retried(destination))
