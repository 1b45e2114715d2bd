"""What a seed chooses: the fleet, its traffic, and which kinds of faults and operators its history has.

Half of the histories are wide: each kind has the same chance. The others have a theme: a few kinds, often, and everything else
seldom.
"""

import random
from dataclasses import dataclass
from typing import Any

from tests.simulation import kafka_nodes, kinesis_puts
from tests.simulation import receivers as receivers_module
from tests.simulation import weather as weather_module
from tests.simulation.cluster import KINDS, Kind

STREAM = "orders"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a seed chooses."""

    kind: Kind
    broker_faults: tuple[str, ...]
    node_faults: tuple[str, ...]
    """Of Kafka's nodes, or of Kinesis' shards."""
    receiver_faults: tuple[str, ...]
    process_faults: tuple[str, ...]
    operators: tuple[str, ...]
    observed: bool
    has_keys: bool
    """Whether ingest's clients need a key."""
    counts: dict[str, int]
    pipes: dict[str, Any]
    chunk_bytes: int
    seconds: float
    clients: int
    pace: float
    batch: int
    weights: dict[str, int]
    """How often what happens, by kind."""
    theme: "Theme"
    is_dated: bool
    """Whether some events say that they are days old."""

    @property
    def words(self) -> frozenset[str]:
        """What it has that a fault may need."""
        destinations = self.pipes["pipes"]["p"]["destinations"]
        words = {
            *self.operators,
            *self.process_faults,
            *self.broker_faults,
            *self.node_faults,
            *self.receiver_faults,
            self.kind.name,
        }
        words |= {"observed"} if self.observed else set()
        words |= {"keys"} if self.has_keys else set()
        words |= {"signed"} if any("secret" in one["webhook"] for one in destinations) else set()
        words |= {"writers"} if self.theme is OF_WRITERS else set()
        words |= {"dated"} if self.is_dated else set()
        words |= {"several"} if len(destinations) > 1 else set()
        return frozenset(words | {f"order: {one['webhook']['order']}" for one in destinations})


_NODE_FAULTS = {"kafka": kafka_nodes.FAULTS, "kinesis": kinesis_puts.FAULTS}
PROCESS_FAULTS = ("kill", "freeze", "expire", "terminate", "clock")
OPERATORS = (
    "pause",
    "redrive",
    "remake",
    "remake_inner",
    "restart",
    "schedule_off",
    "remove",
    "rewind",
    "repair",
    "retention",
    "outrun",
    "damage",
    "rotate_keys",
    "rotate_secret",
)


@dataclass(frozen=True, slots=True)
class Theme:
    """Kinds that a history has in any case, often. observed, in_order: whether it must be so; else the dice say.

    share: of the themes. longer: by how many seconds more clients send. brokers: the kinds of brokers; none: any.
    longest_window: seconds for which a broker's fault lasts at most. gives_up: how often a client does not send again what it
    does not know to be stored.
    """

    share: int = 1
    operators: tuple[str, ...] = ()
    receiver_faults: tuple[str, ...] = ()
    broker_faults: tuple[str, ...] = ()
    brokers: tuple[str, ...] = ()
    longest_window: float = 5.0
    gives_up: float = 0.1
    observed: bool = False
    in_order: bool = False
    longer: float = 0.0


NO_THEME = Theme()
THEMES = (
    Theme(4, ("pause",), ("500", "503", "hang", "reset"), in_order=True, longer=4.0),
    Theme(1, ("pause", "remake_inner"), ("500",), observed=True),
    Theme(2, ("redrive", "remake_inner"), ("400",)),
    Theme(2, ("remake", "pause")),
)
"""Kinds that act on the same events. Faults were found where they meet, and seldom in a history that has many other kinds."""
OF_WRITERS = Theme(
    broker_faults=("answer_lost", "partial", "refused", "throttled"),
    brokers=("kafka", "kinesis"),
    longer=20.0,
    longest_window=25.0,
    gives_up=0.5,
)
"""Appends are in doubt, and then refused until nobody tries them any more; then others follow them. Every tenth seed has it."""
DATED = 5
"""The rest of seeds by eight in whose histories some events say that they are days old."""
WIDE, PAIR = 0.5, 0.2
"""Shares of the histories without a theme, and of those whose theme is any two kinds of operators."""


def _choose_theme(seed: int, rng: random.Random) -> Theme:
    drawn = rng.random()
    if seed % 10 == 0:
        return OF_WRITERS
    if drawn < WIDE:
        return NO_THEME
    if drawn < WIDE + PAIR:
        return Theme(operators=tuple(rng.sample(OPERATORS, 2)))
    return rng.choices(THEMES, [theme.share for theme in THEMES])[0]


def choose(seed: int) -> Choice:
    """The same for the same seed."""
    rng = random.Random(seed)
    theme = _choose_theme(seed, rng)
    is_wide = theme is NO_THEME

    def some(names: tuple[str, ...], chance: float, sure: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Of a family of kinds: those that are sure, and in some histories others."""
        chance *= rng.random() < (0.8 if is_wide else 0.4)
        return tuple(name for name in names if rng.random() < chance or name in sure)

    observed = rng.random() < 0.05 or theme.observed
    keyed = rng.random() < (0.6 if observed else 0.4) or theme.in_order
    names = ("a", "b")[: 2 if observed else rng.randint(1, 2)]
    destinations = [_destination(rng, name, in_order=keyed and name == "a") for name in names]
    transform = {"transform": {"sql": "SELECT * FROM orders"}} if rng.random() < 0.25 else {}
    broker_faults = some(weather_module.KINDS, 0.4, theme.broker_faults)
    receiver_faults = some(receivers_module.KINDS, 0.35, theme.receiver_faults)
    process_faults = some(PROCESS_FAULTS, 0.5)
    operators = some(OPERATORS, 0.3 if is_wide else 0.1, theme.operators)
    kind = rng.choice([kind for kind in KINDS if not theme.brokers or kind.name in theme.brokers])
    node_faults = some(_NODE_FAULTS.get(kind.name, ()), 0.4)
    is_dated = seed % 8 == DATED
    kinds = [
        *["nodes"] * bool(node_faults),
        *["weather"] * bool(broker_faults),
        *["receiver"] * bool(receiver_faults),
        *process_faults,
        *operators,
    ]
    often = {
        *theme.operators,
        *["receiver"] * bool(theme.receiver_faults),
        *["weather"] * bool(theme.broker_faults),
    }
    weights = {each: 6 if each in often else rng.choice((1, 2, 6) if is_wide else (1, 2)) for each in kinds}
    return Choice(
        kind=kind,
        broker_faults=broker_faults,
        node_faults=node_faults,
        receiver_faults=receiver_faults,
        process_faults=process_faults,
        operators=operators,
        observed=observed,
        has_keys=rng.random() < 0.3,
        counts={"ingest": rng.randint(1, 2), "expel": rng.choice((1, 1, 2))},
        pipes={
            "streams": {
                STREAM: {"partitions": rng.randint(1, 3), "id": "id", "key": "key"}
                | ({"time": "time"} if is_dated else {})
            },
            "pipes": {"p": {"sources": [STREAM], "destinations": destinations} | transform},
        },
        chunk_bytes=rng.choice((400, 900_000)),
        seconds=rng.uniform(3, 9) + theme.longer,
        clients=(clients := rng.randint(1, 3)),
        pace=rng.choice((0.25, 0.5, 1.0)) * clients,
        batch=rng.choice((1, 4, 12)),
        weights=weights,
        theme=theme,
        is_dated=is_dated,
    )


def _destination(rng: random.Random, name: str, *, in_order: bool) -> dict[str, Any]:
    webhook = {
        "url": f"http://127.0.0.1:9/p/{name}",
        "body": rng.choice(("cloudevents", "json")),
        "batch": {"max_events": rng.choice((1, 3, 20)), "max_wait": rng.choice(("10ms", "200ms"))},
        "retry": {"attempts": rng.choice((1, 2, 3)), "base": "100ms", "max_wait": "1s"},
        "schedule": rng.choice(([], ["1s"], ["2s", "5s"], ["1s", "1s", "20s"])),
        "concurrency": rng.choice((1, 4)),
        "timeout": rng.choice(("1s", "5s")),
        "order": "key" if in_order else "none",
    }
    if in_order and rng.random() < 0.7:
        webhook["schedule"] = ["200s"]
    if rng.random() < 0.3:
        webhook["secret"] = {"file": f"{name}.secret"}
    return {"name": name, "webhook": webhook, "start": rng.choice(("earliest", "latest"))}
