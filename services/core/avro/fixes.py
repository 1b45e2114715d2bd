"""Changes of the new schema that may undo one finding, the best first. `repair.py` tries them, and offers the first one that
works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from services.core.avro.defaults import offered_default
from services.core.avro.differences import Finding
from services.core.avro.forms import to_json
from services.core.avro.json_document import Json
from services.core.avro.patch import Operation, PatchError, value_at
from services.core.avro.schema import NO_DEFAULT, Enum, Field, Fixed, Named, Record, Schema, Union

Patch = list[Operation]
ELSEWHERE = "\0"
"""In place of a namespace: none that a schema has, so that all names are written in full."""


def candidates(finding: Finding, document: Json, *, new_reads: bool, known: set[str]) -> Iterator[Patch]:
    """Patches of the new schema's document that may undo a finding. known: the names that the document defines or refers to, for
    each patch alone."""
    if not finding.owned:
        return
    new, old = (finding.reader, finding.writer) if new_reads else (finding.writer, finding.reader)
    context = _Context(document, known)
    if finding.field is not None:
        yield from _field(new, finding, finding.field, context, new_reads=new_reads)
        return
    if isinstance(new, Named) and isinstance(old, Named):
        yield from _named(new, old, finding, document, new_reads=new_reads)
    if finding.rule.startswith("UNION_"):
        yield from _union(finding, old, context, new_reads=new_reads)
    if finding.rule.startswith(("LOGICAL_", "DECIMAL_")) and not new_reads:
        yield from _remove_branch(finding, document)
    yield from context.put_back(old, finding.use)


def _field(new: Schema, finding: Finding, item: Field, context: _Context, *, new_reads: bool) -> Iterator[Patch]:
    if finding.rule == "FIELD_AMBIGUOUS":
        if new_reads:
            yield from _remove_aliases(item, finding.names)
    elif new_reads:
        yield from _add_default(item)
    else:
        yield from _put_field_back(new, item, context)


def _named(new: Named, old: Named, finding: Finding, document: Json, *, new_reads: bool) -> Iterator[Patch]:
    match finding.rule, new, old:
        case "NAME_CHANGED", _, _:
            yield from _name(new, old, document, new_reads=new_reads)
        case "FIXED_SIZE_CHANGED", _, Fixed():
            yield from _with_default(document, finding.site, [_replace(finding.site, old.size)])
        case "ENUM_SYMBOL_UNKNOWN", Enum(), _:
            yield from _symbols(new, finding.names, document, new_reads=new_reads)
        case _, Fixed(), Fixed() if new.logical != old.logical:
            yield _logical(new, old)


def _union(finding: Finding, old: Schema, context: _Context, *, new_reads: bool) -> Iterator[Patch]:
    if not new_reads:
        yield from _remove_branch(finding, context.document)
    elif finding.rule == "UNION_BRANCH_UNKNOWN":
        yield [_add(f"{finding.site}/-", context.render(old))]
    else:
        yield [_replace(finding.site, [value_at(context.document, finding.site), context.render(old)])]


def fields_put_back(findings: Iterable[Finding], known: set[str], most: int) -> Patch:
    """The lost fields of these findings in one patch, which defines each named type once. Stops at so many fields."""
    known, patch = set(known), Patch()
    for finding in findings:
        new, item = finding.writer, finding.field
        if finding.owned and item is not None and isinstance(new, Record) and len(patch) < most:
            patch.append(_put_back(new, item, to_json(item.type, known, ELSEWHERE)))
    return patch


class _Context:
    """The new schema's document. known: its names."""

    def __init__(self, document: Json, known: set[str]) -> None:
        self.document = document
        self._known = known

    def render(self, schema: Schema) -> Json:
        """A type of the old schema as JSON for the new one: what that one has already is a name."""
        return to_json(schema, set(self._known), ELSEWHERE)

    def put_back(self, old: Schema, site: str) -> Iterator[Patch]:
        """The old type in place of the new one. First as the new document names it, then written out."""
        if site == "" and type(old) is not Schema:
            return  # that would be the whole old schema
        for value in (self.render(old), to_json(old, set(), ELSEWHERE)):
            yield from _with_default(self.document, site, [_replace(site, value)])


def _add(path: str, value: Json) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _replace(path: str, value: Json) -> Operation:
    return {"op": "replace", "path": path, "value": value}


def _remove(path: str) -> Operation:
    return {"op": "remove", "path": path}


def _with_default(document: Json, site: str, patch: Patch) -> Iterator[Patch]:
    """The patch, and the patch that also removes the default of the field around the site, which may not fit any more."""
    yield patch
    parts = site.split("/")
    while parts and parts[-1] != "type":
        parts.pop()
    default = "/".join([*parts[:-1], "default"])
    if parts and _exists(document, default):
        yield [*patch, _remove(default)]


def _exists(document: Json, path: str) -> bool:
    try:
        value_at(document, path)
    except PatchError:
        return False
    return True


def _add_default(item: Field) -> Iterator[Patch]:
    kind = item.type
    default = f"{item.pointer}/default"
    if isinstance(kind, Union) and any(branch.type == "null" for branch in kind.branches[1:]):
        # Older readers take the default from the first type of a union.
        index = next(index for index, branch in enumerate(kind.branches) if branch.type == "null")
        yield [_remove(f"{kind.pointer}/{index}"), _add(f"{kind.pointer}/0", "null"), _add(default, None)]
    offered = offered_default(kind)
    if offered is not NO_DEFAULT:
        yield [_add(default, cast(Json, offered))]


def _put_field_back(new: Schema, item: Field, context: _Context) -> Iterator[Patch]:
    if isinstance(new, Record):
        yield [_put_back(new, item, context.render(item.type))]
        yield [_put_back(new, item, to_json(item.type, set(), ELSEWHERE))]


def _put_back(new: Record, item: Field, type_: Json) -> Operation:
    written: dict[str, Json] = {"name": item.name, "type": type_}
    if item.doc is not None:
        written["doc"] = item.doc
    return _add(f"{new.pointer}/fields/-", written)


def _remove_aliases(item: Field, names: tuple[str, ...]) -> Iterator[Patch]:
    found = set(names)
    for kept in ("", *names) if item.name in found else names:
        dropped = [alias for alias in item.aliases if alias not in found or alias == kept]
        yield [_replace(f"{item.pointer}/aliases", cast(Json, dropped))]


def _name(new: Named, old: Named, document: Json, *, new_reads: bool) -> Iterator[Patch]:
    if new_reads:
        aliases = f"{new.pointer}/aliases"
        if _exists(document, aliases) and value_at(document, aliases) is not None:
            yield [_add(f"{aliases}/-", old.name)]
        else:
            yield [_add(aliases, [old.name])]
    full = f"{new.namespace}.{old.short_name}" if new.namespace else old.short_name
    written = value_at(document, f"{new.pointer}/name")
    name = full if isinstance(written, str) and "." in written else old.short_name
    yield [_replace(f"{new.pointer}/name", name), *(_replace(path, full) for path in new.references)]


def _symbols(new: Enum, names: tuple[str, ...], document: Json, *, new_reads: bool) -> Iterator[Patch]:
    path = f"{new.pointer}/symbols"
    if new_reads:
        yield [_add(f"{path}/-", name) for name in names]
        return
    gone = set(names)
    places = [place for place, name in enumerate(new.symbols) if name in gone][::-1]
    patch = [_remove(f"{path}/{place}") for place in places]
    yield patch
    if new.default in names:
        yield [_remove(f"{new.pointer}/default"), *patch]
    yield from list(_with_default(document, new.pointer, patch))[1:]


def _remove_branch(finding: Finding, document: Json) -> Iterator[Patch]:
    """The old reader does not know a type of the new writer."""
    parent, _, last = finding.site.rpartition("/")
    if not last.isdecimal() or not isinstance(value_at(document, parent), list):
        return
    union = value_at(document, parent)
    assert isinstance(union, list)
    rest = [item for index, item in enumerate(union) if str(index) != last]
    if not isinstance(finding.reader, Union) and len(rest) == 1:
        yield from _with_default(document, parent, [_replace(parent, rest[0])])
    yield from _with_default(document, parent, [_remove(finding.site)])


def _logical(new: Fixed, old: Fixed) -> Patch:
    wanted = {key: old.properties[key] for key in ("logicalType", "precision", "scale") if key in old.properties}
    patch: Patch = [_add(f"{new.pointer}/{key}", value) for key, value in wanted.items()]
    return patch + [
        _remove(f"{new.pointer}/{key}") for key in ("precision", "scale") if key in new.properties and key not in wanted
    ]
