"""Web server of the viewer, on 127.0.0.1 only.

Every request must carry the ``Host`` of this server, and a cookie that the browser gets when it
opens the printed address. Requests that change something also need the header ``X-Tallyroll``,
which other sites cannot send. Addresses refer to storages by their number.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.viewer.dataset import Dataset
from tallyroll.collector.ext.viewer.values import encoded
from tallyroll.storage.errors import StorageError, UnknownTrajectory
from tallyroll.storage.package.versions import versions

Scope: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[[Scope, Any, Any], Awaitable[None]]

_OWN: Final = Path(__file__).parent
_REPORT: Final = _OWN.parent / "report"
FILES: Final[Mapping[str, tuple[Path, str]]] = {
    "": (_OWN / "viewer.html", "text/html"),
    "viewer.js": (_OWN / "viewer.js", "text/javascript"),
    "viewer.css": (_OWN / "viewer.css", "text/css"),
    "page.css": (_REPORT / "page.css", "text/css"),
    "uPlot.css": (_REPORT / "uplot/uPlot.min.css", "text/css"),
    "uPlot.js": (_REPORT / "uplot/uPlot.iife.min.js", "text/javascript"),
}
"""The files of the page, which are all that the server reads besides storages."""
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MOST_BODY: Final = 2**16
_USER: Final = "pages of `tallyroll view`"
_GRACE_SECONDS: Final = 1


def require_server() -> None:
    """Raise `MissingExtra` unless Starlette and uvicorn are installed."""
    for module in ("starlette", "uvicorn"):
        needs(module, "view", _USER)


class Viewer:
    """Server of the page. It has a port from the beginning, and answers while `serve` runs.

    Args:
        datasets: the storages, which the caller closes.
        port: the port; 0: any free one.

    Raises:
        MissingExtra: Starlette or uvicorn is not installed.
        ArgumentError: the port is in use.
    """

    def __init__(self, datasets: Sequence[Dataset], port: int = 0) -> None:
        uvicorn = needs("uvicorn", "view", _USER)
        app = _application(datasets)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen()  # now, so that a browser may come before `serve`
        except OSError as error:
            self._socket.close()
            raise ArgumentError(
                f"--port {port}: expected a free port, got an error: {error.strerror}. Give "
                "another port, or 0."
            ) from None
        self.port: int = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{self.port}/?token={token}"
        """The address to open, with the token that lets a browser in."""
        config = uvicorn.Config(
            _Guard(app, token, self.port),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Answer requests until `stop` or a signal."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.close()

    def close(self) -> None:
        """Release the port, if `serve` did not."""
        self._socket.close()

    def stop(self) -> None:
        """Let `serve` return soon. Any thread may call this."""
        self._server.should_exit = True


class _Guard:
    """Refuses requests that do not come from the page or from the person with the address.

    Args:
        app: the application behind it.
        token: the token in the address.
        port: the port of the server.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._secret = secrets.token_urlsafe(32)  # not the token, so that it is in no history
        self._cookie = f"tallyroll-{port}"  # cookies of a host are sent to all of its ports
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = list[tuple[bytes, bytes]](scope["headers"])
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            answer = _json({"error": "Host: expected this server."}, 421)
        elif (given := _token_in(scope)) is not None and scope["path"] == "/":
            answer = self._exchange(given)
        elif not self._has_cookie(headers):
            answer = _forbidden()
        elif scope["method"] not in ("GET", "HEAD") and (b"x-tallyroll", b"1") not in headers:
            answer = _json({"error": "expected the header X-Tallyroll: 1."}, 403)
        else:
            await self._app(scope, receive, _with_headers(send))
            return
        await answer(scope, receive, _with_headers(send))

    def _exchange(self, given: str) -> Any:
        """Set the cookie and remove the token from the address."""
        if not _equal(given, self._token):
            return _forbidden()
        responses = needs("starlette.responses", "view", _USER)
        answer = responses.RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._secret, httponly=True, samesite="strict")
        return answer

    def _has_cookie(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        parts = [
            part.strip().partition("=")
            for name, value in headers
            if name == b"cookie"
            for part in value.decode("latin-1").split(";")
        ]
        return any(name == self._cookie and _equal(said, self._secret) for name, _, said in parts)


def _equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


def _token_in(scope: Scope) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
    return found[0] if found else None


def _json(value: Any, status: int = 200) -> Any:
    """Return a response in ASCII, since paths may have characters that UTF-8 cannot encode."""
    text = json.dumps(value, allow_nan=False)
    return needs("starlette.responses", "view", _USER).Response(
        text, status, None, "application/json"
    )


def _forbidden() -> Any:
    return _json(
        {"error": "open the address that `tallyroll view` printed: it lets this browser in."}, 403
    )


def _with_headers(send: Any) -> Any:
    """Wrap ``send`` so that every answer has `HEADERS`."""

    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending


def _application(datasets: Sequence[Dataset]) -> App:
    """Return the application that answers for the datasets, without any check of who asks."""
    applications = needs("starlette.applications", "view", _USER)
    exceptions = needs("starlette.exceptions", "view", _USER)
    route = needs("starlette.routing", "view", _USER).Route

    def start(request: Any) -> Any:
        names = [each.name for each in datasets]
        return _json({"datasets": names, "version": versions()["tallyroll"]})

    def answering(answer: Callable[[Dataset, Any], Any]) -> Callable[[Any], Any]:
        def answered(request: Any) -> Any:
            number = request.path_params["number"]
            if number >= len(datasets):
                raise exceptions.HTTPException(404, "there is no such storage.")
            found = answer(datasets[number], request)
            return found if hasattr(found, "status_code") else _json(found)

        return answered

    async def flag(request: Any) -> Any:
        text = await _body_of(request)
        id = request.path_params["id"]
        call = answering(lambda dataset, _: dataset.set_flag(id, text))
        threads = needs("starlette.concurrency", "view", _USER)
        return await threads.run_in_threadpool(call, request)

    answers: dict[str, Callable[[Dataset, Any], Any]] = {
        "summary": lambda dataset, _: dataset.summary(),
        "trends": lambda dataset, _: dataset.trends(),
        "histograms": lambda dataset, _: dataset.histograms(),
        "episodes": _episodes,
        "episode/first": lambda dataset, _: dataset.episode(None),
        "episode/{id:int}": lambda dataset, request: dataset.episode(request.path_params["id"]),
        "frames/{id:int}": _frames,
        "verify": lambda dataset, _: dataset.verification(),
    }
    api = "/api/{number:int}/"
    verify = answering(lambda dataset, _: dataset.start_verification())
    routes = [
        route("/", _file),
        route("/api", start),
        *(route(api + path, answering(answer)) for path, answer in answers.items()),
        route(f"{api}verify", verify, methods=["POST"]),
        route(f"{api}flag/{{id:int}}", flag, methods=["POST"]),
        route("/{name}", _file),
    ]
    handled = (StorageError, OSError, ValueError, exceptions.HTTPException)
    app: App = applications.Starlette(
        routes=routes, exception_handlers=dict.fromkeys(handled, _failed)
    )
    return app


def _file(request: Any) -> Any:
    response = needs("starlette.responses", "view", _USER).Response
    name = request.path_params.get("name", "")
    if name == "favicon.ico":  # browsers ask for it, and report an error
        return response(status_code=204)
    if name not in FILES:
        raise needs("starlette.exceptions", "view", _USER).HTTPException(404, "no such page.")
    path, kind = FILES[name]
    return response(path.read_bytes(), media_type=kind)


def _episodes(dataset: Dataset, request: Any) -> Any:
    asked = request.query_params
    descending, page = (_number(asked, name) for name in ("descending", "page"))
    where, sort = asked.get("where", ""), asked.get("sort", "first_row")
    return dataset.episodes(where, sort, bool(descending), page)


def _frames(dataset: Dataset, request: Any) -> Any:
    column, start = (_number(request.query_params, name) for name in ("column", "start"))
    parts = dataset.frames(request.path_params["id"], column, start, encoded)
    encoding = parts[0][0] if parts else "raw"
    response = needs("starlette.responses", "view", _USER).Response
    content = b"".join(part for _, part in parts)
    return response(content, 200, {"x-encoding": encoding}, "application/octet-stream")


async def _body_of(request: Any) -> str:
    """Return the body of a request as text, unless it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            exceptions = needs("starlette.exceptions", "view", _USER)
            raise exceptions.HTTPException(413, "the flag is too long.")
    return body.decode()


async def _failed(request: Any, error: Any) -> Any:
    """Return an error as JSON, with its message."""
    if hasattr(error, "status_code"):  # Starlette's own
        return _json({"error": error.detail}, error.status_code)
    status = 404 if isinstance(error, UnknownTrajectory) else 409
    status = 400 if isinstance(error, ValueError) else status
    return _json({"error": str(error)}, status)


def _number(asked: Mapping[str, str], name: str) -> int:
    """Return a whole number of a query; 0 if it is absent."""
    text = asked.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{name}: expected a whole number of at least 0, got {text[:40]!r}.")
    return int(text)
