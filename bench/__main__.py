"""`make bench`: every figure beside its floor, on a real Kafka that is started here. Ten to twenty minutes in all.

python -m bench [--only NAME ...] [--json] [--events N] [--rounds N] [--brokers 1|3]
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import orjson

from bench.cluster import cluster_figures
from bench.delivery import delivery_figures
from bench.existing_topics import existing_figures
from bench.figures import Figure, print_figures
from bench.isolation import isolation_figures
from bench.kinesis import kinesis_figures
from bench.kinesis_transform import kinesis_transform
from bench.latency import kafka_lag, log_lag
from bench.ledger import ledger_figures
from bench.ledger_transform import kafka_transform
from bench.local_retries import local_retries
from bench.main_path import ingest_figures
from bench.memory import kafka_memory, log_memory, long_backlog
from bench.registry import registry_figures
from bench.setup import SERVER_JAVA, Setup, tell
from bench.tls import tls_figures
from bench.transform import transform_figures
from services.core.jvm.kafka import KafkaCluster

GROUPS: dict[str, Callable[[Setup], list[Figure]]] = {
    "ingest": ingest_figures,
    "kinesis": kinesis_figures,
    "expel": delivery_figures,
    "existing": existing_figures,
    "ledger": ledger_figures,
    "ledger-kafka": kafka_transform,
    "cluster": cluster_figures,
    "transform": transform_figures,
    "transform-kinesis": kinesis_transform,
    "isolation": isolation_figures,
    "local-retries": local_retries,
    "lag-kafka": kafka_lag,
    "lag-log": log_lag,
    "memory-log": log_memory,
    "memory-kafka": kafka_memory,
    "memory-long": long_backlog,
    "registry": registry_figures,
    "tls": tls_figures,
}
WITHOUT_KAFKA = {"ledger", "lag-log", "memory-log", "local-retries", "registry", "tls"}


def main() -> None:
    """Measure and print; exit status 0 whatever the figures are: they are figures, not tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="these figures alone")
    parser.add_argument("--json", action="store_true", help="end with a JSON array on stdout")
    parser.add_argument("--events", type=int, default=200_000, help="events per round in requests of 100")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per figure, alternating with its floor")
    parser.add_argument("--brokers", type=int, default=1, choices=(1, 3))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, ExitStack() as stack:
        folder, bootstrap = Path(name), ""
        if not WITHOUT_KAFKA.issuperset(args.only):
            options = {"brokers": args.brokers, "heap_mb": 512, "java_options": SERVER_JAVA}
            bootstrap = stack.enter_context(KafkaCluster(folder / "kafka", **options)).bootstrap
        setup = Setup(folder, bootstrap, args.events, args.rounds)
        figures: list[Figure] = []
        for group in args.only:
            tell(group)
            figures += GROUPS[group](setup)
    if args.json:
        print(orjson.dumps([figure.as_json() for figure in figures]).decode())
    else:
        print_figures(figures)


if __name__ == "__main__":
    main()
