"""From the checked pipe file to the lanes of this instance, each with its sender, limits and retry policy."""

import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.core import metrics
from services.core.broker.connect import BadBrokerUrl
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.rights import Right
from services.core.control.key_marks import KeyMarker
from services.core.control.pauses import Pauses
from services.core.fleet_broker import open_fleet_broker
from services.core.http.client import MAX_RESPONSE, HttpClient
from services.core.http.resolver import Resolver
from services.core.ledger.report import TELEMETRY
from services.core.ledger.reporter import new_instance
from services.core.pipe_file.destination_check import check_destinations
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import Destination, Pipe, PipeFile, Removed, is_retried, pipe_version, read_pipes
from services.core.pipe_file.topic_names import (
    CONTROL,
    RETRY_IN,
    dead_letter_topic,
    delivery_topics,
    lane_name,
    parked_topic,
    removed_lanes,
    removed_pipes,
    renames_of,
    retry_topic,
)
from services.core.pipe_file.webhook import Webhook
from services.core.process.expected import show_expected
from services.core.security.authorization import Authorization, Credential, NoAuthorization, SecretHeader
from services.core.security.credentials import (
    Credentials,
    LiveValue,
    find_secret,
    read_credentials,
    read_value,
    watch_credentials,
)
from services.core.security.expiry import show_secret
from services.core.security.file_watch import FileWatch
from services.core.security.oauth import GRANTED, MAX_TOKEN_RESPONSE, OAuthClient
from services.core.security.service_rights import rights_of
from services.core.security.signing import KEY, SigningKeys, watch_secret
from services.core.undelivered.waiting import take_over_positions
from services.core.yaml_source import BadConfiguration, Problem
from services.expel.dispatcher import Dispatcher, LaneConfig, Sender
from services.expel.lane import Lane
from services.expel.metrics import LaneLedger, LaneMetrics, WordCounter
from services.expel.output_filter import OutputFilter
from services.expel.pause import PauseState
from services.expel.retry_policy import RetryLimits
from services.expel.send_queue import RequestLimits
from services.expel.settings import ExpelSettings
from services.expel.stream_sender import MAX_BYTES, MAX_EVENTS, StreamSender, TopicSender
from services.expel.throttle import SendThrottle
from services.expel.webhook.body import make_format
from services.expel.webhook.sender import WebhookSender

_MAX_LANE_BYTES = 64_000_000
_STREAM_RETRY = RetryLimits(attempts=None, base=0.2, max_wait=5.0)
_STREAM_WAIT = 0.02


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One destination of one pipe, with its signing keys and credentials.

    removed: names of destinations that the pipe no longer has. former: the lanes whose events and positions it gets, by
    `renamed_from` and `removed`. topics_of_others: the streams that it reads whose topics are others'. compacted: its stream is.
    """

    pipe_name: str
    pipe: Pipe
    destination: Destination
    keys: SigningKeys
    credentials: Credentials
    removed: frozenset[str] = frozenset()
    former: tuple[str, ...] = ()
    topics_of_others: frozenset[str] = frozenset()
    compacted: bool = False


@dataclass(frozen=True, slots=True)
class ExpelPlan:
    """lanes: of this instance. removed: the lanes of removed destinations; removed_pipes: the pipes whose lanes were all removed.
    Every instance shares these two. renames: the lane of each former name. rights: that this instance needs on the broker.
    pipes: the file."""

    lanes: list[LanePlan]
    removed: Mapping[str, Removed]
    removed_pipes: Mapping[str, Removed]
    renames: Mapping[str, str]
    rights: Sequence[Right] = ()
    pipes: PipeFile | None = None


def read_plan(settings: ExpelSettings, environ: Mapping[str, str]) -> ExpelPlan:
    """Read and check the pipe file. Blocking. Raises BadConfiguration with every problem."""
    document, pipes, problems = read_pipes(settings.pipes)
    problems += check_destinations(document, pipes, settings.policy, environ)
    problems += [
        Problem("--serve", name, f"is not a pipe of {settings.pipes}. Try one of: {', '.join(sorted(pipes.pipes))}")
        for name in settings.serve
        if name not in pipes.pipes
    ]
    existing = existing_topics(pipes)
    try:
        open_fleet_broker(settings.broker, pipes)
    except BadBrokerUrl as error:
        problems.append(Problem("--broker", "", str(error)))
    if problems:
        raise BadConfiguration(problems)
    show_expected(pipes, ledger=settings.ledger, registry=settings.schemas)
    folder, removed = settings.pipes.parent, removed_lanes(pipes)
    lanes = [
        LanePlan(
            name,
            pipe,
            destination,
            _read_keys(destination.webhook, folder, environ),
            _read_credentials(destination.webhook, folder, environ),
            frozenset(lane.partition("/")[2] for lane in removed if lane.startswith(f"{name}/")),
            tuple(old for old, choice in removed.items() if choice.deliver_to == lane_name(name, destination.name)),
            frozenset(delivery_topics(name, pipe)) & existing.names.keys(),
            destination.stream is not None and pipes.streams[destination.stream].compact,
        )
        for name, pipe in pipes.pipes.items()
        if not settings.serve or name in settings.serve
        for destination in pipe.destinations
    ]
    served = {plan.pipe_name: plan.pipe for plan in lanes}
    rights = rights_of("expel", pipes.model_copy(update={"pipes": served}))
    return ExpelPlan(lanes, removed, removed_pipes(pipes), renames_of(pipes), rights, pipes)


def _read_keys(webhook: Webhook | None, folder: Path, environ: Mapping[str, str]) -> SigningKeys:
    if webhook is None or webhook.secret is None:
        return SigningKeys()
    return SigningKeys.read(webhook.secret, folder, environ)


def _read_credentials(webhook: Webhook | None, folder: Path, environ: Mapping[str, str]) -> Credentials:
    if webhook is None:
        return Credentials()
    credentials, mistakes = read_credentials(webhook, folder, environ)
    if mistakes:  # a file changed after its check
        raise BadConfiguration([Problem(str(folder), ".".join(map(str, key)), reason) for key, reason in mistakes])
    return credentials


def watch_secrets(plans: Iterable[LanePlan], folder: Path) -> list[FileWatch[Any]]:
    """One for each signing secret and each credential in files. A secret in an environment variable cannot change."""
    watches: list[FileWatch[Any]] = []
    for plan in plans:
        webhook, name = plan.destination.webhook, lane_name(plan.pipe_name, plan.destination.name)
        if webhook is None:
            continue
        if webhook.secret is not None and webhook.secret.file is not None:
            watches.append(watch_secret(name, webhook.secret, folder, plan.keys))
        elif webhook.secret is not None:
            show_secret(name, KEY, plan.keys.until, None)
        watches += watch_credentials(name, webhook, folder, plan.credentials)
    return watches


def touched_topics(plans: Iterable[LanePlan]) -> set[str]:
    """The topics that these lanes read and write."""
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
    """Makes lanes. Their HTTP clients are closed by `stack`. marker: of the streams that lanes write to; load it first."""

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
        self.marker = KeyMarker(producer, broker.reader, "expel")
        self._resolver = Resolver()
        self._instance = new_instance()
        self._lane_bytes = min(_MAX_LANE_BYTES, settings.buffer // max(1, lanes))

    def build(self, plan: LanePlan) -> Lane:
        """A lane that does not run yet."""
        destination, config = plan.destination, self._configure(plan)
        metrics = LaneMetrics(plan.pipe_name, destination.name, ledger=self._open_ledger(plan))
        topics = delivery_topics(plan.pipe_name, plan.pipe)
        sender: Sender
        pause = None
        if destination.webhook is not None:
            sender = self._open_webhook(plan, destination.webhook)
            topics += [retry_topic(plan.pipe_name), parked_topic(plan.pipe_name)]
            pause = PauseState(
                self._pauses, self._broker, self._producer, plan.pipe_name, destination.name, keyed=config.keyed
            )
        elif destination.topic is not None:
            sender = TopicSender(self._producer, destination.topic, plan.pipe_name)
        else:
            assert destination.stream is not None
            sender = StreamSender(self._producer, self.marker, destination.stream, compact=plan.compacted)
        throttle = SendThrottle(plan.pipe_name, destination.name, config.rate, sheds=config.retry.uses_retry_topic)
        metrics.ledger.set_breaker(lambda: throttle.state)

        def make_dispatcher() -> Dispatcher:
            return Dispatcher(config, sender, self._broker, self._producer, metrics, throttle, pause)

        return Lane(
            self._broker,
            plan.pipe_name,
            destination.name,
            topics,
            destination.start,
            metrics,
            make_dispatcher,
            self._settings.commit_interval,
            pause,
            optional_topics=() if pause is not None else (retry_topic(plan.pipe_name), parked_topic(plan.pipe_name)),
            take_over=self._take_over(plan) if plan.former else None,
        )

    def _take_over(self, plan: LanePlan) -> Callable[[], Coroutine[Any, Any, None]]:
        topics = delivery_topics(plan.pipe_name, plan.pipe)
        lane = lane_name(plan.pipe_name, plan.destination.name)
        return partial(
            take_over_positions, self._broker, self._producer, lane, plan.former, topics, self._pauses.renames
        )

    def _open_webhook(self, plan: LanePlan, webhook: Webhook) -> WebhookSender:
        body = make_format(webhook.body, plan.pipe_name)
        headers = {**webhook.headers, "Content-Type": body.content_type}
        client = self._open_client(webhook.url, webhook.timeout, headers, plan.credentials.tls)
        authorization = self._authorize(plan, webhook)
        return WebhookSender(client, plan.pipe_name, body, plan.keys, webhook.batch.max_bytes, authorization)

    def _open_client(
        self,
        url: str,
        timeout: float,
        headers: Mapping[str, str],
        tls: LiveValue[ssl.SSLContext] | None,
        max_body: int = MAX_RESPONSE,
    ) -> HttpClient:
        client = HttpClient(
            url,
            policy=self._settings.policy,
            resolver=self._resolver,
            timeout=timeout,
            headers=headers,
            tls=None if tls is None else lambda: tls.current,
            max_body=max_body,
        )
        return self._stack.enter_context(client)

    def _authorize(self, plan: LanePlan, webhook: Webhook) -> Authorization:
        auth, value = webhook.auth, plan.credentials.value
        if auth is None:
            return NoAuthorization()
        assert value is not None
        if auth.oauth is not None:
            headers = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
            tls = plan.credentials.token_tls
            client = self._open_client(auth.oauth.token_url, webhook.timeout, headers, tls, MAX_TOKEN_RESPONSE)
            names = (plan.pipe_name, plan.destination.name)
            return OAuthClient(
                lane_name(*names),
                auth.oauth,
                value,
                client,
                WordCounter(metrics.EXPEL_TOKEN_REQUESTS, *names, usual=[GRANTED]).add,
            )
        found = find_secret(webhook)
        assert found is not None
        _, secret, token = found
        make = Credential.bearer if auth.header is None else partial(_make_header, auth.header.name)
        read = (
            partial(read_value, secret, self._settings.pipes.parent, {}, token=token)
            if secret.file is not None
            else None
        )
        return SecretHeader(value, make, read)

    def _configure(self, plan: LanePlan) -> LaneConfig:
        destination, webhook, settings = plan.destination, plan.destination.webhook, self._settings
        make = partial(
            LaneConfig,
            plan.pipe_name,
            destination.name,
            siblings=_find_siblings(plan),
            outputs=OutputFilter.of(plan.pipe, destination),
            topics_of_others=plan.topics_of_others,
            version=pipe_version(plan.pipe),
        )
        if webhook is None:
            return make(
                RequestLimits(MAX_EVENTS, MAX_BYTES),
                _STREAM_RETRY,
                concurrency=1,
                max_wait=_STREAM_WAIT,
                max_events=max(settings.lane_events, MAX_EVENTS),
                max_bytes=max(self._lane_bytes, MAX_BYTES),
                serial=True,
                takes_tombstones=plan.compacted,
            )
        batch = webhook.batch
        return make(
            RequestLimits(min(batch.max_events, webhook.rate or batch.max_events), batch.max_bytes),
            _limit_retries(destination, webhook),
            webhook.concurrency,
            batch.max_wait,
            max(settings.lane_events, batch.max_events),
            max(self._lane_bytes, batch.max_bytes),
            webhook.rate,
            keyed=webhook.order == "key",
            timeout=webhook.timeout,
            schedule=tuple(webhook.schedule) if is_retried(destination) else (),
        )

    def _open_ledger(self, plan: LanePlan) -> LaneLedger:
        if not self._settings.ledger:
            return LaneLedger()
        name, sources = plan.pipe_name, delivery_topics(plan.pipe_name, plan.pipe)
        returned = retry_topic(name) if is_retried(plan.destination) else None
        kept = [retry_topic(name), parked_topic(name)] if plan.destination.webhook is not None else []
        return LaneLedger.open(
            self._producer,
            self._broker,
            self._instance,
            name,
            plan.destination.name,
            sources,
            returned,
            kept,
            topics_of_others=plan.topics_of_others,
            late=plan.destination.start == "latest",
        )


def _make_header(name: str, value: str) -> Credential:
    return Credential(f"{name}: {value}\r\n".encode(), value)


def _find_siblings(plan: LanePlan) -> frozenset[str] | None:
    """Every destination of the pipe, for the first one only: one lane counts the events that no lane will deliver."""
    if plan.pipe.destinations[0].name != plan.destination.name:
        return None
    return frozenset(destination.name for destination in plan.pipe.destinations) | plan.removed


def _limit_retries(destination: Destination, webhook: Webhook) -> RetryLimits:
    """A few attempts in the lane, then the retry topic. With `order: key` the lane repeats events until the window is over."""
    retry = webhook.retry
    if webhook.order == "key" and webhook.schedule:
        return RetryLimits(None, retry.base, retry.max_wait, window=sum(webhook.schedule))
    return RetryLimits(retry.attempts, retry.base, retry.max_wait, uses_retry_topic=is_retried(destination))
