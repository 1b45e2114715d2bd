"""Print the CloudFormation template of a pipe file's Kinesis streams, and of the policies of the services that use them.

    python infra/aws/streams.py pipes.yaml > streams.json
    python infra/aws/streams.py pipes.yaml acme. > streams.json

The second one is for a fleet with the prefix `acme.` in its broker's URL: all names begin with it.

The streams are those that `penstock apply` would make. A stream of the pipe file has no dot, and is in the policies by its name.
The streams that Penstock makes for each pipe are there as `*.dead` and the like. The services make DynamoDB's tables: the leases
of a group are in `penstock-<group>`, with the prefix in front of it.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from services.core.broker.contract import TopicSpec
from services.core.broker.kinesis.admin import retention_hours
from services.core.broker.kinesis.streams import PARTITIONS_TAG
from services.core.broker.prefix import check_prefix
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.topic_names import CONTROL
from services.core.provision import wanted_topics
from services.core.yaml_source import BadConfiguration

Json = dict[str, Any]

_SHARDS = ["kinesis:ListShards", "kinesis:ListTagsForStream"]
_WRITE = ["kinesis:PutRecords", *_SHARDS]
_READ = [*_SHARDS, "kinesis:DescribeStreamSummary", "kinesis:GetShardIterator", "kinesis:GetRecords"]
_READ_LEASES = ["dynamodb:DescribeTable", "dynamodb:Scan", "dynamodb:GetItem"]
_HOLD_LEASES = [
    *_READ_LEASES,
    "dynamodb:CreateTable",
    "dynamodb:PutItem",
    "dynamodb:UpdateItem",
    "dynamodb:DeleteItem",
]
_RESHARD = ["kinesis:SplitShard", "kinesis:MergeShards", "kinesis:UpdateShardCount", "kinesis:AddTagsToStream"]


def make_template(pipes: PipeFile, prefix: str = "") -> Json:
    rights = _rights(sorted(pipes.streams), prefix)
    policies = {f"{name}Policy": _policy(name, statements) for name, statements in rights.items()}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "The streams of a Penstock fleet, and who may do what with them. Written by infra/aws/streams.py.",
        "Resources": {_logical(spec.name): _stream(spec, prefix) for spec in wanted_topics(pipes)} | policies,
        "Outputs": {name: {"Value": {"Ref": name}} for name in policies},
    }


def _stream(spec: TopicSpec, prefix: str) -> Json:
    """As the Kinesis backend makes it. Deleting the stack leaves the events."""
    return {
        "Type": "AWS::Kinesis::Stream",
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "Name": prefix + spec.name,
            "ShardCount": spec.first_shards,
            "RetentionPeriodHours": retention_hours(spec.retention_ms),
            "StreamModeDetails": {"StreamMode": "PROVISIONED"},
            "StreamEncryption": {"EncryptionType": "KMS", "KeyId": "alias/aws/kinesis"},
            "Tags": [{"Key": PARTITIONS_TAG, "Value": str(spec.partitions)}],
        },
    }


def _rights(people: list[str], prefix: str) -> dict[str, list[Json]]:
    """What each service may do. people: the streams that people name."""
    on_streams, on_tables = partial(_on_streams, prefix), partial(_on_tables, prefix)
    return {
        # Before its first event, ingest finds the ends of its streams, for the ledger. It marks streams that get keys.
        "Ingest": [on_streams(_WRITE, *people, TELEMETRY, CONTROL), on_streams(_READ, *people, CONTROL)],
        # Its checkpoints are in the bucket: infra/aws/service.yaml.
        "Transform": [
            on_streams(_READ, *people, "*.out", CONTROL),
            on_streams(_WRITE, "*.out", "*.dead", CONTROL, TELEMETRY),
        ],
        "Expel": [
            on_streams(_READ, *people, "*.out", "*.retry", "*.parked", "penstock.retry-in", "penstock.control"),
            on_streams(_WRITE, *people, "*.dead", "*.parked", "penstock.retry-in", "penstock.control", TELEMETRY),
            # What waits for a destination under a former name, or for one that is gone, goes where the pipe file says.
            on_streams(_WRITE, "*.retry", "penstock.audit"),
            on_tables(_HOLD_LEASES, "penstock-*"),
            _allow(["kinesis:ListStreams"], ["*"]),
            on_streams(_SHARDS, "*"),
        ],
        "GlobalRetrier": [
            on_streams(_READ, "penstock.retry-in", "penstock.delay-*", "*.retry"),
            on_streams(_WRITE, "penstock.delay-*", "*.retry", "penstock.dead", TELEMETRY),
            on_tables(_HOLD_LEASES, "penstock-penstock.retrier"),
            # To find pipes that are gone, it lists every stream of the account, with its shards and tags only.
            _allow(["kinesis:ListStreams"], ["*"]),
            on_streams(_SHARDS, "*"),
        ],
        "Observer": [
            on_streams(_READ, *people, "*.out", "*.retry", "*.parked", "*.dead", "penstock.*"),
            on_streams(_WRITE, SNAPSHOTS, TELEMETRY, "penstock.audit"),
            on_tables(_READ_LEASES, "penstock-*"),
            on_tables(_HOLD_LEASES, "penstock-penstock.observer"),
            # The story of an event covers pipes that the pipe file no longer has: it finds their streams, as the retrier does.
            _allow(["kinesis:ListStreams"], ["*"]),
            on_streams(_SHARDS, "*"),
        ],
        "Autoscaler": [
            on_streams([*_SHARDS, "kinesis:DescribeStreamSummary", *_RESHARD], *people, "*.out"),
            # The groups that a person has frozen; and the key that fills a hot partition, among the next records of its group.
            on_streams(_READ, CONTROL, *people, "*.out"),
            on_tables(_READ_LEASES, "penstock-*"),
            _allow(["kinesis:DescribeLimits"], ["*"]),
        ],
    }


def _policy(name: str, statements: list[Json]) -> Json:
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "Description": f"What Penstock's {name} may do on the broker",
            "PolicyDocument": {"Version": "2012-10-17", "Statement": statements},
        },
    }


def _on_streams(prefix: str, actions: list[str], *names: str) -> Json:
    arn = "arn:${AWS::Partition}:kinesis:${AWS::Region}:${AWS::AccountId}:stream/" + prefix
    return _allow(actions, [{"Fn::Sub": arn + name} for name in names])


def _on_tables(prefix: str, actions: list[str], name: str) -> Json:
    arn = "arn:${AWS::Partition}:dynamodb:${AWS::Region}:${AWS::AccountId}:table/" + prefix
    return _allow(actions, [{"Fn::Sub": arn + name}])


def _allow(actions: list[str], resources: list[Any]) -> Json:
    return {"Effect": "Allow", "Action": actions, "Resource": resources}


def _logical(name: str) -> str:
    """CloudFormation's name of a stream's resource: letters and digits only, and no two streams the same."""
    return "Stream" + "".join(char if char.isascii() and char.isalnum() else f"X{ord(char):x}" for char in name)


def main() -> None:
    """`streams.py PIPES [PREFIX]`. Ends with 2 when the pipe file or the prefix has a mistake."""
    try:
        pipes, prefix = load_pipes(Path(sys.argv[1])), check_prefix("".join(sys.argv[2:3]))
    except BadConfiguration as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(json.dumps(make_template(pipes, prefix), indent=2))


if __name__ == "__main__":
    main()
