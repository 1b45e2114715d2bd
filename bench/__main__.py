"""`make bench`: every figure beside its floor, on a real Kafka that is started here.

python -m bench [--json] [--events N] [--brokers 1|3]
"""

import argparse
import tempfile
from pathlib import Path

import orjson

from bench.delivery import delivery_figures
from bench.figures import print_figures
from bench.main_path import Setup, ingest_figures
from services.core.jvm.kafka_server import KafkaCluster


def main() -> None:
    """Measure and print; exit status 0 whatever the figures are: they are figures, not tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with a JSON array on stdout")
    parser.add_argument("--events", type=int, default=400_000, help="events per figure in requests of 100")
    parser.add_argument("--brokers", type=int, default=1, choices=(1, 3))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        cluster = KafkaCluster(folder / "kafka", brokers=args.brokers, heap_mb=512, java_options=("-XX:+UseG1GC",))
        with cluster:
            setup = Setup(folder, cluster.bootstrap, args.events)
            figures = [*ingest_figures(setup), *delivery_figures(setup)]
    if args.json:
        print(orjson.dumps([figure.as_json() for figure in figures]).decode())
    else:
        print_figures(figures)


if __name__ == "__main__":
    main()
