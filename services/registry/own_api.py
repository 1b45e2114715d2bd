"""Our own paths: schemas by fingerprint, differences with patches, protocols, and what the page and the command line show."""

import hashlib
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from services.core.avro.compatibility import Level
from services.core.avro.idl import parse_idl
from services.core.avro.json_document import SchemaError
from services.core.avro.protocol import Protocol as AvroProtocol
from services.core.avro.protocol import parse_protocol
from services.core.avro.schema import Schema as AvroSchema
from services.core.pipe_file.pipes import PipeFile
from services.registry import problems
from services.registry.catalog import Catalog, Schema, Subject
from services.registry.confluent_api import find_version, read_candidate
from services.registry.entries import AddProtocol, Deprecate
from services.registry.http import FOR_EVER, caller, covers, json_answer, knows_schema, read_body, require_manage
from services.registry.problems import Refused
from services.registry.registrar import Registrar, check_subject, latest_version
from services.registry.schema_reader import compute, read_types
from services.registry.views import identity_view, protocol_view, schema_view, version_view

_LANGUAGES = ("avpr", "avdl")
_SUFFIXES = ("-value", "-key")


class OwnApi:
    """pipes: says which streams and pipes use a subject."""

    def __init__(self, registrar: Registrar, pipes: PipeFile, openapi: bytes) -> None:
        self._registrar, self._pipes, self._openapi = registrar, pipes, openapi

    @property
    def _catalog(self) -> Catalog:
        return self._registrar.catalog

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/openapi.json", self.openapi),
            web.get("/v1/schemas", self.find),
            web.post("/v1/schemas", self.register),
            web.get("/v1/schemas/{fingerprint}", self.schema),
            web.post("/v1/check", self.check),
            web.post("/v1/diff", self.diff),
            web.get("/v1/subjects", self.subjects),
            web.get("/v1/subjects/{subject}", self.subject),
            web.patch("/v1/subjects/{subject}/versions/{version}", self.deprecate),
            web.get("/v1/protocols", self.protocols),
            web.post("/v1/protocols", self.add_protocol),
            web.get("/v1/protocols/{name}", self.protocol),
        ]

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    # Schemas.

    async def schema(self, request: web.Request) -> web.Response:
        """By the fingerprint, the only look-up that is cached for ever."""
        fingerprint = request.match_info["fingerprint"].lower()
        schema = self._catalog.by_fingerprint.get(fingerprint)
        if schema is None:
            await self._registrar.log.refresh()
            schema = self._catalog.by_fingerprint.get(fingerprint)
        if schema is None or not knows_schema(request, schema):
            raise Refused(problems.SCHEMA_NOT_FOUND, "No schema with this fingerprint was registered.")
        headers = {**FOR_EVER, "ETag": f'"{fingerprint}"'}
        return json_answer(schema_view(schema), headers=headers)

    async def find(self, request: web.Request) -> web.Response:
        """By crc64 or sha256 of Avro's parsing form, or by the name of the type."""
        query = dict(request.query)
        if len(query) != 1 or not query.keys() <= {"crc64", "sha256", "name"}:
            raise Refused(
                problems.BAD_PARAMETER, "Send one of crc64, sha256 (of Avro's parsing form, in hex) and name."
            )
        await self._registrar.log.refresh()
        (kind, text), catalog = query.popitem(), self._catalog
        match kind:
            case "crc64":
                found = catalog.by_crc64.get(text.lower(), [])
            case "sha256":
                found = catalog.by_sha256.get(text.lower(), [])
            case _:
                found = [schema for schema in catalog.by_id.values() if schema.stored.name == text]
        return json_answer({"schemas": [schema_view(one) for one in found if knows_schema(request, one)]})

    async def register(self, request: web.Request) -> web.Response:
        """With a subject it registers; without one it says what the schema's identity would be."""
        body = await read_body(request)
        candidate = await read_candidate(request, self._registrar, body)
        if "subject" not in body:
            known = await self._registrar.find(candidate)
            shown = None if known is None or not knows_schema(request, known) else known.id
            return json_answer({**identity_view(candidate), "id": shown})
        name = _subject_name(body)
        require_manage(request, name)
        known = await self._registrar.find(candidate)
        is_new = known is None or name not in {subject for subject, _ in known.uses}
        version = await self._registrar.register(name, candidate, caller(request))
        answer = {**identity_view(candidate), "id": version.schema.id, "subject": name, "version": version.number}
        return json_answer({**answer, "new": is_new}, status=201 if is_new else 200)

    async def check(self, request: web.Request) -> web.Response:
        """What registering would do; nothing is stored."""
        body = await read_body(request)
        name = _subject_name(body)
        if not covers(request, name):
            raise Refused(problems.SUBJECT_NOT_FOUND, "GET /v1/subjects lists the subjects.")
        candidate = await read_candidate(request, self._registrar, body)
        await self._registrar.log.refresh()
        level = self._catalog.level_of(name)
        compatibility = await self._registrar.check_compatibility(name, candidate, level)
        return json_answer(
            {
                "subject": name,
                "level": level,
                "compatible": compatibility.compatible,
                "differences": compatibility.as_json(),
                "repair": compatibility.repair,
                **identity_view(candidate),
            }
        )

    async def diff(self, request: web.Request) -> web.Response:
        """Everything that differs between two schemas, and which levels allow the change."""
        body = await read_body(request)
        old, new = await self._side(request, body, "from"), await self._side(request, body, "to")
        if (level := body.get("level", Level.FULL.value)) not in (Level.BACKWARD, Level.FORWARD, Level.FULL):
            raise Refused(problems.BAD_REQUEST, "The level is none of BACKWARD, FORWARD and FULL.")
        found = await self._registrar.diff(old, new, Level(level))
        broken = {one.breaks for one in found.differences} - {""}
        levels = {
            Level.BACKWARD.value: not broken & {"BACKWARD", "FULL"},
            Level.FORWARD.value: not broken & {"FORWARD", "FULL"},
            Level.FULL.value: not broken,
        }
        return json_answer(
            {
                "same": old.fingerprint == new.fingerprint,
                "levels": levels,
                "differences": [one.to_json() for one in found.differences],
                "repair": found.repair,
            }
        )

    async def _side(self, request: web.Request, body: Mapping[str, Any], name: str) -> AvroSchema:
        side = body.get(name)
        if not isinstance(side, dict):
            raise Refused(
                problems.BAD_REQUEST,
                'Send {"from": …, "to": …}, each with schema, fingerprint, id, or subject and version.',
            )
        if "schema" in side:
            return (await read_candidate(request, self._registrar, side)).parsed
        await self._registrar.log.refresh()
        schema: Schema | None
        if "subject" in side:
            schema = find_version(
                self._known_subject(request, _subject_name(side)), _number(side.get("version"))
            ).schema
        elif "fingerprint" in side:
            schema = self._catalog.by_fingerprint.get(str(side["fingerprint"]).lower())
        else:
            schema = self._catalog.by_id.get(_number(side.get("id")) or 0)
        if schema is None or not knows_schema(request, schema):
            raise Refused(problems.SCHEMA_NOT_FOUND, f"The member {name} names no registered schema.")
        return await self._registrar.parsed(schema)

    # Subjects.

    async def subjects(self, request: web.Request) -> web.Response:
        await self._registrar.log.refresh()
        found = [one for one in self._catalog.has_versions() if covers(request, one.name)]
        return json_answer({"level": self._catalog.level, "subjects": [self._subject_body(one) for one in found]})

    async def subject(self, request: web.Request) -> web.Response:
        name = check_subject(request.match_info["subject"])
        await self._registrar.log.refresh()
        subject = self._known_subject(request, name)
        return json_answer(
            {**self._subject_body(subject), "versions": [version_view(version) for version in subject.versions]}
        )

    async def deprecate(self, request: web.Request) -> web.Response:
        name = check_subject(request.match_info["subject"])
        require_manage(request, name)
        body = await read_body(request)
        note = body.get("note", "")
        if not isinstance(body.get("deprecated"), bool) or not isinstance(note, str) or len(note) > 1000:
            raise Refused(problems.BAD_REQUEST, 'Send {"deprecated": true, "note": "why, and what to use instead"}.')
        text = request.match_info["version"]
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
            raise Refused(problems.BAD_VERSION, "A version is a number from 1.")
        await self._registrar.log.refresh()
        version = find_version(self._known_subject(request, name), int(text))
        await self._registrar.deprecate(Deprecate(name, version.number, body["deprecated"], note), caller(request))
        return json_answer(version_view(version))

    def _known_subject(self, request: web.Request, name: str) -> Subject:
        subject = self._catalog.subjects.get(name)
        if subject is None or not subject.versions or not covers(request, name):
            raise Refused(problems.SUBJECT_NOT_FOUND, "GET /v1/subjects lists the subjects.")
        return subject

    def _subject_body(self, subject: Subject) -> dict[str, Any]:
        latest = latest_version(subject)
        assert latest is not None, subject.name
        return {
            "subject": subject.name,
            "level": self._catalog.level_of(subject.name),
            "own_level": subject.level is not None,
            "mode": self._catalog.mode_of(subject.name),
            "latest": version_view(latest),
            "count": len(subject.versions),
            **self._users(subject.name),
        }

    def _users(self, subject: str) -> dict[str, list[str]]:
        """The streams whose records a subject describes, by Confluent's names of subjects, and the pipes that use them."""
        topics = {subject, *(subject.removesuffix(suffix) for suffix in _SUFFIXES)}
        streams = sorted(topics & self._pipes.streams.keys())
        pipes = [
            name
            for name, pipe in self._pipes.pipes.items()
            if topics & {*pipe.sources, f"{name}.out"} or topics & {one.stream for one in pipe.destinations}
        ]
        return {"streams": streams, "pipes": sorted(pipes)}

    # Protocols.

    async def protocols(self, request: web.Request) -> web.Response:
        await self._registrar.log.refresh()
        found = [protocol_view(versions[-1]) for _, versions in sorted(self._catalog.protocols.items())]
        return json_answer({"protocols": [one for one in found if _covers_protocol(request, one)]})

    async def protocol(self, request: web.Request) -> web.Response:
        await self._registrar.log.refresh()
        found = self._catalog.protocols.get(request.match_info["name"])
        body = None if found is None else protocol_view(found[-1])
        if found is None or body is None or not _covers_protocol(request, body):
            raise Refused(problems.PROTOCOL_NOT_FOUND, "GET /v1/protocols lists the protocols.")
        return json_answer({**body, "text": found[-1].stored.text, "versions": len(found)})

    async def add_protocol(self, request: web.Request) -> web.Response:
        """Every named type of a protocol becomes a version of the subject with its full name: all or nothing. `check`: nothing
        is stored."""
        body = await read_body(request)
        text, language, imports = body.get("text"), body.get("language", "avpr"), body.get("imports", {})
        only_check = body.get("check", False)
        is_known = language in _LANGUAGES and isinstance(only_check, bool) and _is_texts(imports)
        if not isinstance(text, str) or not is_known:
            raise Refused(
                problems.BAD_REQUEST,
                'Send {"text": "…", "language": "avpr" or "avdl", "imports": {"other.avdl": "…"}, "check": true or false}.',
            )
        protocol = await compute(lambda: _read_protocol(text, language, imports))
        names = [check_subject(one.full_name) for one in protocol.types]
        for name in names:
            if not only_check:
                require_manage(request, name)
            elif not covers(request, name):
                raise Refused(problems.SUBJECT_NOT_FOUND, "GET /v1/subjects lists the subjects.")
        types = list(zip(names, await compute(lambda: read_types(protocol.types)), strict=True))
        if not types:
            raise Refused(problems.BAD_SCHEMA, "The protocol has no named type.")
        full_name = protocol.name or types[-1][0]
        added = AddProtocol(full_name, 0, language, hashlib.sha256(text.encode()).hexdigest(), text)
        versions = await self._registrar.register_protocol(
            added,
            types,
            caller(request),
            lambda known: _covers_protocol(request, protocol_view(known)),
            store=not only_check,
        )
        warnings = [str(one) for one in protocol.warnings]
        if only_check:
            found = {"compatible": True, "differences": []}
            return json_answer({"protocol": full_name, **found, "subjects": names, "warnings": warnings})
        registered = [
            {"subject": name, "version": version.number, "id": version.schema.id}
            for (name, _), version in zip(types, versions, strict=True)
        ]
        return json_answer({"protocol": full_name, "types": registered, "warnings": warnings}, status=201)


def _read_protocol(text: str, language: str, imports: Mapping[str, str]) -> AvroProtocol:
    try:
        return parse_protocol(text) if language == "avpr" else parse_idl(text, load=imports.__getitem__)
    except SchemaError as error:
        place = {"path": error.path, "line": error.line, "column": error.column, "file": error.file}
        raise Refused(problems.BAD_SCHEMA, str(error), **place) from error


def _is_texts(imports: object) -> bool:
    return isinstance(imports, dict) and all(isinstance(text, str) for text in imports.values())


def _subject_name(body: Mapping[str, Any]) -> str:
    name = body.get("subject")
    if not isinstance(name, str):
        raise Refused(problems.BAD_REQUEST, "The member subject is missing, or no string.")
    return check_subject(name)


def _number(value: object) -> int | None:
    """A version, or None for the latest. Raises Refused."""
    if value in (None, "latest"):
        return None
    if not isinstance(value, int) or not 1 <= value < 2**31:
        raise Refused(problems.BAD_VERSION, "A version or id is a number from 1.")
    return value


def _covers_protocol(request: web.Request, body: Mapping[str, Any]) -> bool:
    return all(covers(request, one["subject"]) for one in body["types"])
