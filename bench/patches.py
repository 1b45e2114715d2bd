"""The patches that a refusal of a schema offers: for how many pairs there is one, and whether each makes the schema compatible.

python -m bench.patches [--first SEED] [--pairs N]

The pairs are generated, as those whose verdict is compared with Avro's (`tests/support/avro/pairs.py`). Each patch is applied to
the JSON of the new schema. The result is read as a text from a client, and compared. A patch that fails ends the run with its
seed. 100,000 pairs take four minutes of two cores.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from services.core.avro.compatibility import Level, check, compatible
from services.core.avro.json_document import SchemaError, to_text
from services.core.avro.parsing import parse_schema
from services.core.avro.patch import apply_patch
from services.core.avro.repair import repair
from services.core.avro.resolution import TooComplex
from tests.support.avro.pairs import pair

LEVELS = (Level.BACKWARD, Level.FORWARD, Level.FULL)
PIECE = 500


def judge(first: int, pairs: int) -> Counter[str]:
    """Counts of the pairs of these seeds: `read`, and by level `refused` and `patched`. Raises AssertionError for a bad patch."""
    counts = Counter[str]()
    for seed in range(first, first + pairs):
        try:
            old, new = (parse_schema(json.dumps(one)) for one in pair(seed))
        except SchemaError:
            continue
        counts["read"] += 1
        for level in LEVELS:
            try:
                if not check(level, new, [old]):
                    continue
            except TooComplex:
                counts["too complex"] += 1
                continue
            counts[f"{level} refused"] += 1
            if (patch := repair(level, new, [old])) is None:
                continue
            counts[f"{level} patched"] += 1
            assert new.origin is not None
            changed = parse_schema(to_text(apply_patch(new.origin.document, patch)))
            assert compatible(level, changed, [old]), f"seed {seed}, {level}: the patch does not help"
    return counts


def _pieces(first: int, pairs: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, first + pairs, PIECE):
        yield begin, min(PIECE, first + pairs - begin)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=100_000)
    args = parser.parse_args()
    counts = Counter[str]()
    pieces = list(_pieces(args.first, args.pairs))
    with ProcessPoolExecutor(2) as pool:
        for done, found in enumerate(pool.map(_judge_piece, pieces), 1):
            counts += found
            if done % 20 == 0 or done == len(pieces):
                print(f"{done * PIECE} seeds: {_describe(counts)}", flush=True)


def _judge_piece(piece: tuple[int, int]) -> Counter[str]:
    return judge(*piece)


def _describe(counts: Counter[str]) -> str:
    rates = [
        f"{level} {counts[f'{level} patched']} of {counts[f'{level} refused']} "
        f"({counts[f'{level} patched'] / max(1, counts[f'{level} refused']):.1%})"
        for level in LEVELS
    ]
    return f"{counts['read']} pairs, {counts['too complex']} comparisons too complex; {', '.join(rates)}"


if __name__ == "__main__":
    main()
