"""Java trusts whom $SSL_CERT_FILE names."""

import base64
import hashlib
import struct
from pathlib import Path

import pytest

from services.core.jvm.java import jks, trust_options


def read_jks(data: bytes) -> list[bytes]:
    """The certificates of a key store, read as the format's description has it."""
    body, digest = data[:-20], data[-20:]
    assert hashlib.sha1(b"\0c\0h\0a\0n\0g\0e\0i\0t" + b"Mighty Aphrodite" + body).digest() == digest
    magic, version, count = struct.unpack_from(">IIi", body)
    assert (magic, version) == (0xFEEDFEED, 2)
    at, found = 12, []
    for _ in range(count):
        (kind, alias_length) = struct.unpack_from(">iH", body, at)
        assert kind == 2
        at += 6 + alias_length + 8
        (type_length,) = struct.unpack_from(">H", body, at)
        assert body[at + 2 : at + 2 + type_length] == b"X.509"
        at += 2 + type_length
        (length,) = struct.unpack_from(">i", body, at)
        found.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    assert at == len(body)
    return found


def test_each_certificate_of_the_bundle_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, `make setup` cannot fetch jars behind a proxy with a certificate authority of its own."""
    certificates = [b"first certificate", b"\0\1\2"]
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(
        "# a comment\n"
        + "".join(
            f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(der).decode()}\n-----END CERTIFICATE-----\n"
            for der in certificates
        )
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    store, password = trust_options(tmp_path)
    assert password == "-Djavax.net.ssl.trustStorePassword=changeit"
    assert read_jks(Path(store.partition("=")[2]).read_bytes()) == certificates


@pytest.mark.parametrize("bundle", ["", "/nowhere/bundle.pem"])
def test_without_a_bundle_java_trusts_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: str) -> None:
    """If this fails, Java trusts nobody at all."""
    monkeypatch.setenv("SSL_CERT_FILE", bundle)
    assert trust_options(tmp_path) == []


def test_aliases_differ() -> None:
    """If this fails, Java keeps only the last certificate of many."""
    assert b"ca0" in jks([b"a", b"b"])
    assert b"ca1" in jks([b"a", b"b"])
