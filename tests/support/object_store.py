"""S3 on this machine: moto's server behind a proxy that counts requests, and loses or refuses some where a test says so.

S3 creates an object under a condition in one step. moto looks first and stores then, so two creators at the same moment both
succeed. The proxy sends it one PUT at a time.
"""

import http.client
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from services.core.aws_emulator import CREDENTIALS, REGION
from services.core.jvm.child import start_child, stop_child
from tests.support.ports import free_port

BUCKET = "checkpoints"
_READY_S = 600.0


class _Proxy(ThreadingHTTPServer):
    """Says nothing about clients that were killed."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class ObjectStoreServer:
    """A context manager. url: of the proxy. requests: by method, since the last `clear`. lose: whether to lose this answer, or
    the status to answer instead. refuse: the status of a request that is not executed; 0: it is."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._log = folder / "moto.log"
        self.requests: Counter[str] = Counter()
        self.lose: Callable[[str, str], int] = lambda _method, _path: False
        self.refuse: Callable[[str, str], int] = lambda _method, _path: 0
        self._puts = threading.Lock()
        self._proxy = _Proxy(("127.0.0.1", 0), self._handler())
        self._proxy.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._proxy.server_address[1]}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self._port)]
        self._moto = start_child(command, log=self._log)
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        end = time.monotonic() + _READY_S
        while not self._answers():
            assert time.monotonic() < end, self._log.read_text()[-2000:]
            time.sleep(0.1)
        client = self.client()
        client.create_bucket(Bucket=BUCKET)
        client.put_bucket_versioning(
            Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"}
        )  # as the documents advise
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        stop_child(self._moto, grace_s=0)

    def options(self, place: str) -> list[str]:
        """Of a transform whose checkpoints are at this place of the bucket. It needs CREDENTIALS, too."""
        checkpoints = ["--checkpoints", f"s3a://{BUCKET}/{place}"]
        return [*checkpoints, "--s3-endpoint", self.url, "--s3-path-style", "--s3-region", REGION]

    def client(self) -> Any:
        """Of boto3."""
        keys = {name.lower(): CREDENTIALS[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key")}
        return boto3.client("s3", endpoint_url=self.url, region_name=REGION, **keys)

    def keys(self, prefix: str = "") -> list[str]:
        """The names of the objects, without markers of folders."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        found = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [name for name in found if not name.endswith("/")]

    def _answers(self) -> bool:
        try:
            self.client().list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # an answer is two writes; the second one would wait 40 ms for the client

            def forward(self) -> None:
                server.requests[self.command] += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if refused := server.refuse(self.command, self.path):
                    self.send_empty(refused)
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", server._port, timeout=60)
                try:
                    headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                    with server._puts if self.command == "PUT" else nullcontext():
                        upstream.request(self.command, self.path, body, headers)
                        answer = upstream.getresponse()
                        content = answer.read()
                except OSError:
                    self.close_connection = True
                    return
                finally:
                    upstream.close()
                lost = server.lose(self.command, self.path)
                if lost is True:
                    self.close_connection = True
                    return
                if lost:
                    self.send_empty(lost)
                    return
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)

            def send_empty(self, status: int) -> None:
                self.send_response_only(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815  the names that the base class calls

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        return Handler
