"""A certificate authority for tests, by the command `openssl`."""

import subprocess
from pathlib import Path

_NEW_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority of a company, and what it signs, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.ca, self._key = folder, folder / "ca.pem", folder / "ca.key"
        self._run(*_NEW_KEY, "-x509", "-subj", f"/CN=Company {folder.name}", "-keyout", self._key, "-out", self.ca)

    def sign(self, name: str, days: int = 2, place: str = "") -> Path:
        """A certificate for this host name, with its key in the same file. days: until it expires. place: of the host, as
        `IP:127.0.0.1`; "": its name."""
        path, request = self.folder / f"{name}.pem", self.folder / f"{name}.csr"
        named = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={place or f'DNS:{name}'}")
        self._run(*_NEW_KEY, *named, "-keyout", path, "-out", request)
        signed = ("-CA", self.ca, "-CAkey", self._key, "-copy_extensions", "copy", "-days", days)
        path.write_bytes(path.read_bytes() + self._run("x509", "-req", "-in", request, *signed))
        path.chmod(0o600)
        return path

    @staticmethod
    def _run(*arguments: object) -> bytes:
        return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True).stdout
