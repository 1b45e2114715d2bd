"""What clients see of schemas, versions and protocols, as JSON objects."""

from typing import Any

from services.core.times import format_time
from services.registry.catalog import Protocol, Schema, Version, guid_of
from services.registry.entries import Reference
from services.registry.schema_reader import Candidate


def references_view(references: tuple[Reference, ...]) -> list[dict[str, Any]]:
    return [{"name": one.name, "subject": one.subject, "version": one.version} for one in references]


def confluent_schema(schema: Schema) -> dict[str, Any]:
    """A schema, in Confluent's form."""
    body: dict[str, Any] = {"schemaType": "AVRO", "schema": schema.stored.schema}
    if schema.stored.references:
        body["references"] = references_view(schema.stored.references)
    return body


def confluent_version(subject: str, version: Version) -> dict[str, Any]:
    """A version of a subject, in Confluent's form."""
    schema = version.schema
    head = {"subject": subject, "version": version.number, "id": schema.id, "ts": version.time, "guid": schema.guid}
    return {**head, **confluent_schema(schema)}


def identity_view(candidate: Candidate) -> dict[str, Any]:
    """What a schema that a client sent is."""
    parsed = candidate.parsed
    return {
        "fingerprint": parsed.fingerprint,
        "guid": guid_of(parsed.fingerprint),
        "sha256": parsed.parsing_sha256,
        "crc64": f"{parsed.crc64:016x}",
        "name": parsed.full_name,
    }


def schema_view(schema: Schema) -> dict[str, Any]:
    """A registered schema. Nothing in it ever changes."""
    stored = schema.stored
    return {
        "fingerprint": stored.fingerprint,
        "id": stored.id,
        "guid": schema.guid,
        "sha256": stored.sha256,
        "crc64": stored.crc64,
        "name": stored.name,
        "schema": stored.schema,
        "references": references_view(stored.references),
    }


def version_view(version: Version) -> dict[str, Any]:
    stored = version.schema.stored
    return {
        "version": version.number,
        "id": stored.id,
        "fingerprint": stored.fingerprint,
        "name": stored.name,
        "schema": stored.schema,
        "registered": format_time(version.time),
        "by": version.by,
        "protocol": version.protocol,
        "deprecated": version.deprecated,
        "note": version.note,
    }


def protocol_view(protocol: Protocol) -> dict[str, Any]:
    """A version of a protocol, without its text."""
    stored = protocol.stored
    return {
        "protocol": stored.name,
        "version": stored.version,
        "language": stored.language,
        "sha256": stored.sha256,
        "registered": format_time(protocol.time),
        "types": [{"subject": name, "version": number} for name, number in stored.types],
    }
