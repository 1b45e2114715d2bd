"""The paths, bodies and error codes of Confluent's schema registry, so that existing clients work without a change.

Differences that clients can see: nothing is deleted (405), so `deleted` changes nothing and `deletedOnly` finds nothing;
only Avro; one id means one schema by our fingerprint, whatever its white space and documentation; a deprecated version is not
`latest`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from services.core.version import VERSION
from services.registry import problems
from services.registry.catalog import Catalog, Schema, Subject, Version
from services.registry.entries import Reference
from services.registry.http import caller, confluent_answer, covers, is_true, knows_schema, read_body, require_manage
from services.registry.problems import Refused
from services.registry.registrar import Compatibility, Registrar, check_subject, latest_version
from services.registry.schema_reader import Candidate, no_such_reference
from services.registry.views import confluent_schema, confluent_version

_LATEST = ("latest", "-1")
_OTHER_TYPES = ("JSON", "PROTOBUF")
_MAX_VERSION = 2**31 - 1
_PAGE = 10_000


class ConfluentApi:
    """Answers from the catalogue. What never changes is answered without a look at the store."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    @property
    def _catalog(self) -> Catalog:
        return self._registrar.catalog

    def routes(self) -> list[web.RouteDef]:
        subject, version = "/subjects/{subject}", "/subjects/{subject}/versions/{version}"
        return [
            web.get("/subjects", self.subjects),
            web.get(f"{subject}/versions", self.versions),
            web.post(f"{subject}/versions", self.register),
            web.post(subject, self.lookup),
            web.get(version, self.version),
            web.get(f"{version}/schema", self.version_schema),
            web.get(f"{version}/referencedby", self.referenced_by),
            web.get("/schemas", self.all_schemas),
            web.get("/schemas/types", self.types),
            web.get("/schemas/ids/{id}", self.by_id),
            web.get("/schemas/ids/{id}/schema", self.schema_by_id),
            web.get("/schemas/ids/{id}/subjects", self.subjects_by_id),
            web.get("/schemas/ids/{id}/versions", self.versions_by_id),
            web.get("/schemas/guids/{guid}", self.by_guid),
            web.post("/compatibility" + version, self.compatible_with_version),
            web.post(f"/compatibility{subject}/versions", self.compatible),
            web.get("/config", self.level),
            web.put("/config", self.set_level),
            web.get("/config/{subject}", self.level),
            web.put("/config/{subject}", self.set_level),
            web.delete("/config/{subject}", self.reset_level),
            web.get("/mode", self.mode),
            web.put("/mode", self.set_mode),
            web.get("/mode/{subject}", self.mode),
            web.put("/mode/{subject}", self.set_mode),
            web.delete("/mode/{subject}", self.reset_mode),
            web.get("/contexts", self.contexts),
            web.get("/v1/metadata/id", self.server_id),
            web.get("/v1/metadata/version", self.server_version),
        ]

    # Schemas by their identity. They never change, so nothing is refreshed when one is found.

    async def by_id(self, request: web.Request) -> web.Response:
        schema = await self._schema(request)
        body = confluent_schema(schema)
        if is_true(request, "fetchMaxId"):
            body["maxId"] = self._catalog.next_id - 1
        return confluent_answer({**body, "guid": schema.guid})

    async def schema_by_id(self, request: web.Request) -> web.Response:
        return web.Response(text=(await self._schema(request)).stored.schema, content_type="application/json")

    async def subjects_by_id(self, request: web.Request) -> web.Response:
        schema = await self._schema(request)
        await self._registrar.log.refresh()
        return confluent_answer(sorted({name for name, _ in schema.uses if covers(request, name)}))

    async def versions_by_id(self, request: web.Request) -> web.Response:
        schema = await self._schema(request)
        await self._registrar.log.refresh()
        uses = [{"subject": name, "version": number} for name, number in schema.uses if covers(request, name)]
        return confluent_answer(uses)

    async def by_guid(self, request: web.Request) -> web.Response:
        schema = await self._find(request, lambda: self._catalog.by_guid.get(request.match_info["guid"].lower()))
        return confluent_answer({"id": schema.id, "guid": schema.guid, **confluent_schema(schema)})

    async def types(self, _request: web.Request) -> web.Response:
        return confluent_answer(["AVRO"])

    async def all_schemas(self, request: web.Request) -> web.Response:
        await self._registrar.log.refresh()
        prefix, latest = request.query.get("subjectPrefix", "").removeprefix(":.:"), is_true(request, "latestOnly")
        found = []
        for subject in self._catalog.has_versions():
            if subject.name.startswith(prefix) and covers(request, subject.name):
                newest = latest_version(subject)
                versions = [newest] if latest and newest is not None else subject.versions
                found += [confluent_version(subject.name, version) for version in versions]
        return confluent_answer(_page(request, found))

    async def _schema(self, request: web.Request) -> Schema:
        text = request.match_info["id"]
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
        return await self._find(request, lambda: self._catalog.by_id.get(number))

    async def _find(self, request: web.Request, find: Callable[[], Schema | None]) -> Schema:
        """Raises Refused, also for a schema of which the key covers no subject."""
        schema = find()
        if schema is None:
            await self._registrar.log.refresh()
            schema = find()
        if schema is not None and knows_schema(request, schema):
            return schema
        raise Refused(problems.SCHEMA_NOT_FOUND, "GET /subjects lists the subjects, whose versions have ids.")

    # Subjects.

    async def subjects(self, request: web.Request) -> web.Response:
        await self._registrar.log.refresh()
        prefix = request.query.get("subjectPrefix", "").removeprefix(":.:").removeprefix(":*:")
        found = [one.name for one in self._catalog.has_versions() if one.name.startswith(prefix)]
        if is_true(request, "deletedOnly"):
            return confluent_answer([])
        return confluent_answer(_page(request, [name for name in found if covers(request, name)]))

    async def versions(self, request: web.Request) -> web.Response:
        subject = await self._subject(request)
        found = [] if is_true(request, "deletedOnly") else [version.number for version in subject.versions]
        return confluent_answer(_page(request, found))

    async def version(self, request: web.Request) -> web.Response:
        subject, version = await self._version(request)
        return confluent_answer(confluent_version(subject.name, version))

    async def version_schema(self, request: web.Request) -> web.Response:
        _, version = await self._version(request)
        return web.Response(text=version.schema.stored.schema, content_type="application/json")

    async def referenced_by(self, request: web.Request) -> web.Response:
        subject, version = await self._version(request)
        wanted = (subject.name, version.number)
        schemas = [one for one in self._catalog.by_id.values() if knows_schema(request, one)]
        return confluent_answer(
            [one.id for one in schemas if wanted in {(each.subject, each.version) for each in one.stored.references}]
        )

    async def register(self, request: web.Request) -> web.Response:
        name = check_subject(request.match_info["subject"])
        require_manage(request, name)
        body = await read_body(request)
        _refuse_import(body)
        candidate = await self._candidate(request, body)
        version = await self._registrar.register(name, candidate, caller(request))
        schema = version.schema
        head = {"id": schema.id, "version": version.number, "guid": schema.guid}
        return confluent_answer({**head, **confluent_schema(schema)})

    async def lookup(self, request: web.Request) -> web.Response:
        """Whether a subject has this schema."""
        candidate = await self._candidate(request, await read_body(request))
        subject = await self._subject(request)
        schema = await self._registrar.find(candidate)
        version = None if schema is None else subject.find(schema.id)
        if version is None:
            raise Refused(problems.SCHEMA_NOT_FOUND, f"{subject.name} has no version with this schema.")
        return confluent_answer(confluent_version(subject.name, version))

    async def _subject(self, request: web.Request) -> Subject:
        name = check_subject(request.match_info["subject"])
        await self._registrar.log.refresh()
        subject = self._catalog.subjects.get(name)
        if subject is None or not subject.versions or not covers(request, name):
            raise Refused(problems.SUBJECT_NOT_FOUND, "GET /subjects lists the subjects.")
        return subject

    async def _version(self, request: web.Request) -> tuple[Subject, Version]:
        number = _version_number(request.match_info["version"])
        subject = await self._subject(request)
        return subject, find_version(subject, number)

    async def _candidate(self, request: web.Request, body: Mapping[str, Any]) -> Candidate:
        return await read_candidate(request, self._registrar, body, normalize=is_true(request, "normalize"))

    # Compatibility.

    async def compatible_with_version(self, request: web.Request) -> web.Response:
        name = check_subject(request.match_info["subject"])
        number = _version_number(request.match_info["version"])
        candidate = await self._candidate(request, await read_body(request))
        await self._registrar.log.refresh()
        subject = self._catalog.subjects.get(name)
        if subject is None or not subject.versions or not covers(request, name):
            if number is None:
                return confluent_answer({"is_compatible": True, "messages": []})
            raise Refused(problems.SUBJECT_NOT_FOUND, "GET /subjects lists the subjects.")
        level = self._catalog.level_of(name).removesuffix("_TRANSITIVE")
        compatibility = await self._registrar.compare(candidate, [find_version(subject, number)], level)
        return _verdict(request, compatibility)

    async def compatible(self, request: web.Request) -> web.Response:
        """Against the versions that the subject's level asks for."""
        name = check_subject(request.match_info["subject"])
        candidate = await self._candidate(request, await read_body(request))
        await self._registrar.log.refresh()
        compatibility = await self._registrar.check_compatibility(name, candidate) if covers(request, name) else None
        if compatibility is None:
            raise Refused(problems.SUBJECT_NOT_FOUND, "GET /subjects lists the subjects.")
        return _verdict(request, compatibility)

    # Levels and modes.

    async def level(self, request: web.Request) -> web.Response:
        return confluent_answer({"compatibilityLevel": await self._setting(request, "level")})

    async def set_level(self, request: web.Request) -> web.Response:
        subject = _named(request)
        require_manage(request, subject)
        body = await read_body(request)
        level = body.get("compatibility")
        if not isinstance(level, str):
            raise Refused(problems.BAD_LEVEL, 'Send {"compatibility": "BACKWARD"}.')
        await self._registrar.set_level(subject, level.upper(), caller(request))
        return confluent_answer({"compatibility": level.upper()})

    async def reset_level(self, request: web.Request) -> web.Response:
        """This deletes no data: the default applies again."""
        return confluent_answer({"compatibilityLevel": await self._reset(request, "level")})

    async def mode(self, request: web.Request) -> web.Response:
        return confluent_answer({"mode": await self._setting(request, "mode")})

    async def set_mode(self, request: web.Request) -> web.Response:
        subject = _named(request)
        require_manage(request, subject)
        mode = (await read_body(request)).get("mode")
        if not isinstance(mode, str):
            raise Refused(problems.BAD_MODE, 'Send {"mode": "READWRITE"}.')
        await self._registrar.set_mode(subject, mode.upper(), caller(request))
        return confluent_answer({"mode": mode.upper()})

    async def reset_mode(self, request: web.Request) -> web.Response:
        return confluent_answer({"mode": await self._reset(request, "mode")})

    async def _setting(self, request: web.Request, what: str) -> str:
        subject = _named(request)
        await self._registrar.log.refresh()
        own = self._registrar.own(subject, what) if subject is None or covers(request, subject) else None
        if own is not None:
            return own
        assert subject is not None
        if is_true(request, "defaultToGlobal"):
            return str(getattr(self._catalog, what))
        kind = problems.LEVEL_NOT_SET if what == "level" else problems.MODE_NOT_SET
        raise Refused(
            kind, "The subject has none, so the default applies. Ask with defaultToGlobal=true, or without the subject."
        )

    async def _reset(self, request: web.Request, what: str) -> str:
        subject = _named(request)
        require_manage(request, subject)
        before = await self._setting(request, what)
        change = self._registrar.set_level if what == "level" else self._registrar.set_mode
        await change(subject, None, caller(request))
        return before

    async def contexts(self, _request: web.Request) -> web.Response:
        return confluent_answer(["."])

    async def server_id(self, _request: web.Request) -> web.Response:
        return confluent_answer({"scope": {"path": [], "clusters": {"schema-registry-cluster": "penstock"}}, "id": ""})

    async def server_version(self, _request: web.Request) -> web.Response:
        return confluent_answer({"version": VERSION, "commitId": ""})


async def read_candidate(
    request: web.Request, registrar: Registrar, body: Mapping[str, Any], *, normalize: bool = False
) -> Candidate:
    """The schema of a body. Raises Refused."""
    kind = body.get("schemaType") or "AVRO"
    if kind != "AVRO":
        named = f"{kind} is not supported: only" if kind in _OTHER_TYPES else "Only"
        raise Refused(problems.BAD_SCHEMA, f"{named} schemas of the type AVRO can be registered here.")
    text = body.get("schema")
    if not isinstance(text, str):
        raise Refused(problems.BAD_SCHEMA, 'The member schema is missing, or no string: {"schema": "{\\"type\\": …}"}.')
    references = read_references(body.get("references") or [])
    for one in references:
        if not covers(request, one.subject):
            raise no_such_reference(one)
    return await registrar.read(text, references, normalize=normalize)


def read_references(items: object) -> list[Reference]:
    """The references of a body. Raises Refused."""
    found = []
    for one in items if isinstance(items, list) else [items]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not isinstance(one.get("version"), int):
            raise Refused(problems.BAD_REFERENCE, "A reference has the members name, subject and version (a number).")
        found.append(Reference(one["name"], check_subject(str(one.get("subject"))), one["version"]))
    return found


def find_version(subject: Subject, number: int | None) -> Version:
    """number: None: the latest. Raises Refused."""
    if number is None:
        found = latest_version(subject)
        assert found is not None, subject.name
        return found
    if number > len(subject.versions):
        raise Refused(problems.VERSION_NOT_FOUND, f"{subject.name} has the versions 1 to {len(subject.versions)}.")
    return subject.versions[number - 1]


def _verdict(request: web.Request, compatibility: Compatibility) -> web.Response:
    more: dict[str, Any] = {}
    if is_true(request, "verbose"):
        more = {
            "messages": compatibility.messages(),
            "differences": compatibility.as_json(),
            "repair": compatibility.repair,
        }
    return confluent_answer({"is_compatible": compatibility.compatible, **more})


def _version_number(text: str) -> int | None:
    if text in _LATEST:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else 0
    if not 1 <= number <= _MAX_VERSION:
        raise Refused(problems.BAD_VERSION, "A version is a number from 1, or latest.")
    return number


def _refuse_import(body: Mapping[str, Any]) -> None:
    """Clients that copy a registry send ids and versions of their own."""
    if any(body.get(name) not in (None, 0, -1) for name in ("id", "version")):
        raise Refused(problems.NOT_PERMITTED, "The registry itself gives ids and versions. Leave id and version out.")


def _named(request: web.Request) -> str | None:
    name = request.match_info.get("subject")
    return None if name is None else check_subject(name)


def _page(request: web.Request, found: list[Any]) -> list[Any]:
    offset, limit = (_number(request.query.get(name)) for name in ("offset", "limit"))
    rest = found[max(0, offset) :]
    return rest[: limit if limit > 0 else _PAGE]


def _number(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        raise Refused(problems.BAD_PARAMETER, "offset and limit are numbers.") from None
