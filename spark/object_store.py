"""Checkpoints and tables in S3, or in another store with its API: the settings of Hadoop's client for it.

Its jars are fetched when some of them are there. Credentials come from where AWS's own tools find them (variables, profile, web
identity, container, instance), in the driver and in each executor; no setting of ours has any.
"""

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEME = "s3a"


def parse_checkpoints(text: str) -> str:
    """A folder, or the URI of a place in a bucket. Raises ValueError for a store that is not known to create a file only once."""
    parts = urlsplit(text)
    if parts.scheme and (parts.scheme != SCHEME or not parts.netloc or parts.query or "@" in parts.netloc):
        raise ValueError(
            "checkpoints are in a folder or in S3. Try: /var/lib/penstock/checkpoints or s3a://bucket/checkpoints"
        )
    return text


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """endpoint: a URL; empty: AWS. region: empty: as AWS's tools find it. path_style: the bucket is in the path of requests."""

    endpoint: str = ""
    region: str = ""
    path_style: bool = False


def store_settings(store: ObjectStore) -> dict[str, str]:
    """Settings of Spark. A reason for each; the others have Hadoop's defaults."""
    hadoop = {
        "aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",  # the usual chain
        "performance.flags": "create,delete,mkdir,open",  # no requests for parent folders: nothing is a folder there
        "input.stream.type": "classic",  # the default reads ahead, with a library of its own
        "change.detection.mode": "none",  # a sign of life may change between two requests of one look
        "audit.enabled": "false",  # the same library
        "attempts.maximum": "5",  # in 10 s, not in minutes: the query is started again by its job
        "connection.request.timeout": "30s",
        "buffer.dir": "${java.io.tmpdir}/s3a",  # the scratch folder: elsewhere a container's disk may be read-only
        "path.style.access": str(store.path_style).lower(),
    }
    if store.endpoint:
        hadoop["endpoint"] = store.endpoint
    if region := store.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", ""):
        hadoop["endpoint.region"] = region
    return {f"spark.hadoop.fs.{SCHEME}.{name}": value for name, value in hadoop.items()}
