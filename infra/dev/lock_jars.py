"""Resolves the jars anew and rewrites services/core/jvm/jars.lock. Run it after changing a version below, by hand:

.venv/bin/python infra/dev/lock_jars.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from services.core.jvm.jars import (
    AVRO_IDL,
    DATABASES,
    KAFKA_SERVER,
    KAFKA_WRITERS,
    LOCK_FILE,
    SPARK_KAFKA,
    SPARK_S3,
    run_ivy,
    sha256_of,
)

SEPARATOR = "__"
SDK_MODULES = (
    "annotations apache-client arns auth aws-core aws-query-protocol aws-xml-protocol checksums checksums-spi "
    "crt-core endpoints-spi http-auth http-auth-aws http-auth-aws-eventstream http-auth-spi http-client-spi "
    "identity-spi json-utils metrics-spi profiles protocol-core regions retries retries-spi s3 s3-transfer-manager "
    "sdk-core sts third-party-jackson-core utils utils-lite "
)
"""What S3 needs, and STS for roles: what Ivy finds for these two, without the asynchronous client."""
DEBEZIUM_MODULES = "api common connector-postgres core openlineage-api"
# set → (coordinates, with what they depend on?)
ROOTS = {
    SPARK_KAFKA: [
        ("org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0", False),
        # 4.2.0 is not available everywhere; the connector calls the same few functions in this one.
        ("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0", False),
        ("org.apache.kafka:kafka-clients:3.9.2", False),
        ("org.apache.commons:commons-pool2:2.12.1", False),
    ],
    # Of the version of Hadoop in pyspark, and the AWS SDK that it was built with. The SDK's modules for S3 are 13 MB; its bundle,
    # which Hadoop names, has all services and 600 MB. Spark's own jars have Apache's HTTP client and netty.
    SPARK_S3: [
        ("org.apache.hadoop:hadoop-aws:3.5.0", False),
        *((f"software.amazon.awssdk:{module}:2.35.4", False) for module in SDK_MODULES.split()),
        ("software.amazon.eventstream:eventstream:1.0.1", False),
        ("org.reactivestreams:reactive-streams:1.0.4", False),
    ],
    # Of the version of Avro in pyspark, whose jars have all that it needs.
    AVRO_IDL: [("org.apache.avro:avro-idl:1.12.1", False)],
    # Of the version of the Kafka server, whose jars have the rest of what they need.
    KAFKA_WRITERS: [
        *((f"org.apache.kafka:{module}:4.1.2", False) for module in ("connect-api", "connect-json")),
        ("com.fasterxml.jackson.module:jackson-module-blackbird:2.19.4", False),
        ("com.fasterxml.jackson.datatype:jackson-datatype-jsr310:2.19.4", False),
        ("com.google.protobuf:protobuf-java:3.25.5", False),
        *((f"io.debezium:debezium-{module}:3.3.1.Final", False) for module in DEBEZIUM_MODULES.split()),
    ],
    DATABASES: [("org.postgresql:postgresql:42.7.13", False)],
    KAFKA_SERVER: [
        ("org.apache.kafka:kafka_2.13:4.1.2", True),
        # Kafka logs through slf4j 1.7, and its own dependencies have nothing that writes the lines.
        ("org.apache.logging.log4j:log4j-slf4j-impl:2.25.3", False),
    ],
}


def resolve(coordinates: str, *, transitive: bool, scratch: Path) -> set[tuple[str, str]]:
    """(group:artifact:version, sha256) of an artifact and, if asked, of all that it depends on."""
    target = scratch / coordinates.replace(":", SEPARATOR)
    pattern = SEPARATOR.join(["[organisation]", "[artifact]", "[revision].[ext]"])
    arguments = ["-cache", str(scratch / "cache"), "-confs", "default", "-dependency", *coordinates.split(":")]
    run_ivy([*arguments, *([] if transitive else ["-notransitive"]), "-retrieve", str(target / pattern)])
    return {(path.name.removesuffix(".jar").replace(SEPARATOR, ":"), sha256_of(path)) for path in target.glob("*.jar")}


def main() -> None:
    lines = ["# Written by infra/dev/lock_jars.py: every jar that is fetched, and its SHA-256."]
    with tempfile.TemporaryDirectory() as scratch:
        for name, roots in ROOTS.items():
            found: set[tuple[str, str]] = set()
            for coordinates, transitive in roots:
                found |= resolve(coordinates, transitive=transitive, scratch=Path(scratch))
            lines += ["", f"[{name}]", *(f"{coordinates} {sha256}" for coordinates, sha256 in sorted(found))]
    LOCK_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
