"""A PostgreSQL of its own on a free port of this machine, in a temporary folder."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.ports import free_port

USER, PASSWORD = "reader", "not a s3cret'; but $pecial"
_START_S = 300.0


class Postgres:
    """Started by `start`, ended by `stop`. It refuses to run as root: then its processes belong to `nobody`."""

    def __init__(self, folder: Path, *settings: str) -> None:
        """folder: exists, and is empty. settings: of the server, as `wal_level=logical`."""
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        assert found, "PostgreSQL is needed. Try: infra/dev/test_tools.sh"
        self._programs, self._folder, self.port = found[-1], folder, free_port()
        self._settings = settings
        self._user = "nobody" if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Blocking. The user `USER` has the password `PASSWORD`, and may do everything."""
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            for path in (self._folder, password):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        self._run(
            "initdb", "--auth=scram-sha-256", f"--username={USER}", f"--pwfile={password}", "--no-sync", self._data
        )
        options = f"-p {self.port} -k '' -c listen_addresses=127.0.0.1 -c fsync=off"
        options += "".join(f" -c {setting}" for setting in self._settings)
        self._run(
            "pg_ctl", "-D", self._data, "-o", options, "-l", self._folder / "log", "-w", "-t", str(_START_S), "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def execute(self, *statements: str) -> None:
        """In one transaction."""
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", "postgres"]
        self._run("psql", *address, "-q", "-v", "ON_ERROR_STOP=1", "-1", "-c", "; ".join(statements))

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str | Path) -> None:
        command: Sequence[str | Path] = [self._programs / program, *arguments]
        # Output to a file: a server that runs on keeps it open.
        with (self._folder / "output").open("ab") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                user=self._user,
                group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
                extra_groups=None if self._user is None else [],
                env={"PATH": os.environ["PATH"], "PGPASSWORD": PASSWORD, "LC_ALL": "C"},
                timeout=_START_S * 2,
                check=False,
            )
        assert done.returncode == 0, (program, (self._folder / "output").read_text()[-2000:])
