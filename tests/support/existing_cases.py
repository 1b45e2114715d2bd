"""Values in records of topics of others, and what becomes of them: one table for Python and for Spark."""

DAY = 1_767_312_000_000
"""2026-01-02, in ms."""

TIMES: dict[str, int | None] = {
    "2026-01-02T03:04:05.678Z": DAY + 11_045_678,
    "2026-01-02t03:04:05z": DAY + 11_045_000,
    "2026-01-02 03:04:05Z": DAY + 11_045_000,
    "2026-01-02T03:04:05.1Z": DAY + 11_045_100,
    "2026-01-02T03:04:05.123456789Z": DAY + 11_045_123,
    "2026-01-02T04:04:05+01:00": DAY + 11_045_000,
    "2026-01-02T04:04:05+0100": DAY + 11_045_000,
    "2026-01-02T03:04:05-00:00": DAY + 11_045_000,
    "2026-01-02T21:04:05+18:00": DAY + 11_045_000,
    "2026-01-02T22:04:05+19:00": None,
    "2026-01-02T03:04:05+01:75": None,
    "2026-01-02T03:04:05+01": None,
    "2026-01-02T03:04:05": None,
    "2026-01-02T03:04Z": None,
    "2026-01-02T03:04:05Z\n": None,
    " 2026-01-02T03:04:05Z": None,
    "2026-01-02T03:04:60Z": None,
    "2026-01-02T03:60:05Z": None,
    "2026-01-02T24:00:00Z": None,
    "2026-02-30T03:04:05Z": None,
    "2026-01-02T03:04:05.Z": None,
    "2026-01-02T03:04:05,5Z": None,
    "2026-01-02T03:04:05.1234567890Z": None,
    "2026-W01-5T03:04:05Z": None,
    "2026W015T030405Z": None,
    "20260102T030405Z": None,
    "2026-002T03:04:05Z": None,
    "2026-01-02": None,
    "0000-01-01T00:00:00Z": None,
    "0001-01-01T00:00:00+18:00": None,
    "٢٠٢٦-01-02T03:04:05Z": None,
    "T03:04:05Z": None,
    "yesterday": None,
    "now": None,
    "epoch": None,
}
"""Texts as a time: ms, or None for a fault. Both in the payload and in a header."""

NUMBERS: dict[str, int | None] = {
    "1767323045": DAY + 11_045_000,
    "1767323045678": DAY + 11_045_678,
    "1767323045.5": DAY + 11_045_500,
    "1767323045.0005": DAY + 11_045_000,
    "1767323045.0015": DAY + 11_045_002,
    "0": 0,
    "99999999999": None,
    "1234567890123456": None,
}
"""Numbers as a time, in the payload and in a header."""

ONLY_HEADERS: dict[str, int | None] = {
    "123\n": None,
    "\n123": None,
    "+123": None,
    "-1": None,
    "1e9": None,
    "0x10": None,
    "123 ": None,
    "1_0": None,
    "NaN": None,
    "1.": None,
    "007": 7_000,
}
"""As a time in a header."""

PAYLOADS: dict[bytes, bytes | None] = {
    b'{"id": "a"}': b"a",
    b' {"id": "a"} \n': b"a",
    b'{"id": 12}': b"12",
    b'{"id": -12}': b"-12",
    b'{"id": 9223372036854775807}': b"9223372036854775807",
    b'{"id": 9223372036854775808}': None,
    b'{"id": 18446744073709551616}': None,
    b'{"id": 1.0}': None,
    b'{"id": 1e2}': None,
    b'{"id": "a", "id": "b"}': b"b",
    b'{"id": "a", "x": 1, "x": {"id": 2}}': b"a",
    b'{"id": "a", "id": null}': b"",
    b'{"id": "a", "ID": "b"}': b"a",
    b'{"ID": "b"}': b"",
    b'{"id": "\\u00e9\\ud83d\\ude00"}': "é😀".encode(),
    b'{"id": null}': b"",
    b'{"x": {"id": 1}}': b"",
    b'[{"id": 1}]': b"",
    b'"id"': b"",
    b"null": b"",
    b'{"id": "a",}': None,
    b"{'id': 'a'}": None,
    b'{id: "a"}': None,
    b'{"id": 012}': None,
    b'{"id": +1}': None,
    b'{"id": "a", "x": NaN}': None,
    b'{"id": "a", "x": Infinity}': None,
    b'{"id": "a", "x": "\x01"}': None,
    b'{"id": "a", "x": "\\x"}': None,
    b'{"id": "a" /* c */}': None,
    b'{"id": "\xff"}': None,
    b'{"id": "a", "x": "\xff"}': None,
    b'{"id": "a", "\xff": 1}': None,
    b'{"id": "a", "x": 1e400}': b"a",
    b'{"id": "a", "x": ' + b"9" * 400 + b"}": b"a",
    b'{"id": "a", "x": "\\ud800"}': None,
    b"\xef\xbb\xbf" + b'{"id": "a"}': None,
    b'{"id": "\\ud800"}': None,
    b"{": None,
    b" ": None,
    b"": None,
}
"""Payloads with the rule `id: id`: the id, b"" for the default one, or None for a fault."""

PARSED_HERE: dict[bytes, bytes | None] = {
    b'{"id": "a"} x': None,
    b'{"id": "a"}{"id": "b"}': None,
    b'{"id": 1e400}': None,
}
"""The same, where Spark differs: it reads a document and not what is behind it, and has other words for the last fault."""
