"""The viewer's server: access control, answers, and files that it must not serve."""

from __future__ import annotations

import http.client
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.viewer.flags import Flags
from tallyroll.collector.ext.viewer.server import FILES, HEADERS, Viewer
from tallyroll.storage import MemmapStorage, open_storage

from viewer_kit import Browser, coded, served, straight

HOSTILE = "<script>alert(1)<!--\"'&\u202e\n"


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A client for tests that change nothing."""
    path = tmp_path_factory.mktemp("viewer") / "rows"
    coded(path)
    with served(path) as found:
        yield found


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    coded(tmp_path / "rows")
    with served(tmp_path / "rows", flags=Flags(str(tmp_path / "flags"), [])) as found:
        yield found


def test_the_answers_are_those_of_the_storage(browser: Browser, tmp_path: Path) -> None:
    assert browser.get("/api")["datasets"] == [str(tmp_path / "rows")]
    facts = browser.get("/api/0/summary")
    with open_storage(tmp_path / "rows") as storage:
        mine = storage.trajectories
        assert (facts["rows"], facts["id"]) == (len(storage), storage.reader.id)
        where = "length > 4"
        asked = f"where={quote(where)}&sort=return&descending=1&page=0"
        lines = browser.get(f"/api/0/episodes?{asked}")["lines"]
        chosen = mine.matching(where)
        assert [each["return"] for each in lines] == sorted(chosen["return"], reverse=True)
        for id in mine.ids.tolist():
            found = browser.get(f"/api/0/episode/{id}")
            code = next(each for each in found["columns"] if each["name"] == "observation")
            assert np.array_equal(np.array(code["values"]).T, mine[id]["observation"].numpy())
        assert browser.get("/api/0/episode/first")["id"] == str(mine.ids[0])
        assert browser.get("/api/0/trends")["episodes"] > 0
        assert browser.get("/api/0/histograms") == []
        assert browser.get("/api/0/verify") == {"state": "none"}


def test_frames_are_bytes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (100, 12, 10, 3), np.uint8)
    with MemmapStorage(tmp_path / "rows", mode="create") as storage:
        storage.extend(straight(100, pixels))
    with served(tmp_path / "rows") as browser:
        answer, content = browser.ask("/api/0/frames/7?column=0&start=64")
        assert (answer.getheader("x-encoding"), content) == ("raw", pixels[64:].tobytes())
        answer, content = browser.ask("/api/0/frames/7?column=0&start=0")
        assert content == pixels[:64].tobytes()
        assert browser.get("/api/0/frames/7?column=1", 400)["error"].startswith("column: expected")
        assert browser.get("/api/0/frames/8", 404)["error"].endswith("table of episodes.")


def test_the_token_is_exchanged_for_a_cookie(visitor: Browser) -> None:
    place = urlsplit(visitor.viewer.url)
    assert place.hostname == "127.0.0.1"
    answer, _ = visitor.ask(f"/?{place.query}", Cookie=None)
    token = place.query.removeprefix("token=")
    assert (answer.status, answer.getheader("location")) == (303, "/")
    said = str(answer.getheader("set-cookie")).lower()
    assert "httponly" in said
    assert "samesite=strict" in said
    assert token.lower() not in said
    for query in ("token=", "token=x", f"token={token}x", f"token={token[:-1]}", "token=%ff"):
        answer, content = visitor.ask(f"/?{query}", Cookie=None)
        assert (answer.status, answer.getheader("set-cookie")) == (403, None)
        assert b"printed" in content


@pytest.mark.parametrize("path", ["/", "/api", "/viewer.js", "/api/0/summary", "/api/0/frames/0"])
def test_nothing_is_answered_without_the_cookie(visitor: Browser, path: str) -> None:
    name, _, secret = visitor.cookie.partition("=")
    for cookie in (None, "", f"{name}=", f"{name}={secret[:-1]}", f"x{name}={secret}", "=;\xff"):
        answer, content = visitor.ask(path, Cookie=cookie)
        assert answer.status == 403
        assert b"printed" in content
    assert visitor.ask(path, Cookie=f"a=b; {visitor.cookie}")[0].status in (200, 400, 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", None, "localhost.evil"]
)
def test_other_hosts_are_refused(visitor: Browser, host: str | None) -> None:
    for path in ("/", f"/?{urlsplit(visitor.viewer.url).query}"):
        answer, content = visitor.ask(path, Host=host)
        assert answer.status in (400, 421)
        assert b"<html" not in content
    assert visitor.ask("/", Host=f"localhost:{visitor.viewer.port}")[0].status == 200


def test_changes_need_the_header(browser: Browser, tmp_path: Path) -> None:
    id = browser.get("/api/0/episode/first")["id"]
    for path in (f"/api/0/flag/{id}", "/api/0/verify"):
        for headers in ({}, {"X_Tallyroll": "0"}, {"Content_Type": "text/plain"}):
            assert browser.ask(path, "POST", "bad", **headers)[0].status == 403
        assert browser.ask(path, "POST", "bad", X_Tallyroll="1", Cookie=None)[0].status == 403
    assert not (tmp_path / "flags").exists()
    assert browser.get("/api/0/verify") == {"state": "none"}
    answer, _ = browser.ask(f"/api/0/flag/{id}", "POST", HOSTILE, X_Tallyroll="1")
    assert answer.status == 200
    assert browser.get(f"/api/0/episode/{id}")["flag"] == HOSTILE
    for body, status in (("x" * 2000, 400), ("x" * 100_000, 413)):
        answer, _ = browser.ask(f"/api/0/flag/{id}", "POST", body, X_Tallyroll="1")
        assert answer.status == status
    assert browser.ask("/api/0/flag/99999", "POST", "x", X_Tallyroll="1")[0].status == 404
    for method in ("PUT", "DELETE", "PATCH"):
        answer, _ = browser.ask(f"/api/0/flag/{id}", method, "x", X_Tallyroll="1")
        assert answer.status == 405


PATHS = (
    "/server.py",
    "/../server.py",
    "/..%2fserver.py",
    "/%2e%2e/%2e%2e/page.html",
    "/etc/passwd",
    "//etc/passwd",
    "/viewer.html",
    "/api/1/summary",
    "/api/-1/summary",
    "/api/rows/summary",
    "/api/..%2f/summary",
    f"/api/{10**30}/summary",
    "/api/0/episode/..%2f..%2fmanifest.json",
    "/api/0/episode/-1",
    "/api/0/episode/0x1",
    f"/api/0/episode/{10**40}",
    "/api/0/frames/x",
    "/api/0/none",
    "/api/0",
)


@pytest.mark.parametrize("path", PATHS)
def test_addresses_are_numbers_never_paths(visitor: Browser, path: str) -> None:
    answer, content = visitor.ask(path)
    assert answer.status == 404
    assert answer.getheader("content-type") == "application/json"
    assert b"root:" not in content


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sort=x", "sort: expected one of"),
        ("page=-1", "page: expected a whole number"),
        ("page=1e9", "page: expected a whole number"),
        ("descending=yes", "descending: expected a whole number"),
        ("where=return%20%3E", "this is not a condition"),
        ("where=__import__('os')", "expected"),
        ("where=nothing%20%3E%201", "nothing"),
        ("where=1", "expected a condition"),
    ],
)
def test_bad_questions_are_told(visitor: Browser, query: str, message: str) -> None:
    assert message in visitor.get(f"/api/0/episodes?{query}", 400)["error"]


def test_every_answer_has_the_policy(visitor: Browser) -> None:
    for path in ("/", "/none", "/api", "/api/0/none", *(f"/{name}" for name in FILES)):
        answer, _ = visitor.ask(path)
        for name, value in HEADERS.items():
            assert answer.getheader(name) == value
    assert HEADERS["cache-control"] == "no-store"
    assert HEADERS["referrer-policy"] == "no-referrer"  # the address has the token
    assert HEADERS["x-content-type-options"] == "nosniff"
    assert HEADERS["cross-origin-resource-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in HEADERS["content-security-policy"]
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert HEADERS["content-security-policy"].startswith("default-src 'none'; ")
    page = visitor.ask("/")[1].decode()
    assert "<style" not in page
    assert page.count("<script ") == page.count("<script src=") == page.count("<script") == 2
    for name, (file, kind) in FILES.items():
        answer, content = visitor.ask(f"/{name}")
        assert str(answer.getheader("content-type")).startswith(kind)
        assert content == file.read_bytes()


def test_the_page_makes_no_markup_from_values() -> None:
    script = FILES["viewer.js"][0].read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in script


def test_hostile_names_and_values_are_json(tmp_path: Path) -> None:
    folder = tmp_path / f"{HOSTILE}\udcff"
    values = np.array([np.nan, np.inf, -np.inf, 1.0] * 5)
    model = coded(folder, 20, more={HOSTILE: values, ("next", "reward"): values[:, None]})
    with served(folder) as browser:
        assert browser.get("/api")["datasets"] == [str(folder)]
        facts = browser.get("/api/0/summary")
        assert HOSTILE in [each["name"] for each in facts["columns"]]
        lines = browser.get("/api/0/episodes")["lines"]
        with np.errstate(all="ignore"):
            sums = {str(id): values[rows].sum() for id, rows in model.trajectories().items()}
        assert {each["id"]: float(each["return"]) for each in lines} == pytest.approx(
            sums, nan_ok=True
        )
        browser.get("/api/0/trends")
        for id, rows in model.trajectories().items():
            found = browser.get(f"/api/0/episode/{id}")
            (told,) = (each for each in found["columns"] if each["name"] == HOSTILE)
            expected = [float(v) if np.isfinite(v) else None for v in values[rows]]
            assert told["values"] == [expected]
            assert told["not_finite"] == expected.count(None)


def test_a_storage_that_is_deleted_while_viewed_is_told(browser: Browser, tmp_path: Path) -> None:
    assert browser.get("/api/0/summary")["rows"] == 300
    shutil.rmtree(tmp_path / "rows")
    for path in ("summary", "episodes", "trends", "episode/first", "histograms"):
        said = browser.get(f"/api/0/{path}", 409)["error"]
        assert "does not exist" in said
        assert "Traceback" not in said
    coded(tmp_path / "rows", 30)
    assert browser.get("/api/0/summary")["rows"] == 30


def test_only_this_machine_can_connect(visitor: Browser) -> None:
    for name in {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)}:
        if not str(name).startswith("127."):
            with pytest.raises(OSError, match=r"refused|unreachable|assign|timed out"):
                socket.create_connection((name, visitor.viewer.port), timeout=2)


def test_a_port_in_use_is_refused(visitor: Browser) -> None:
    with pytest.raises(ArgumentError, match=rf"--port {visitor.viewer.port}: expected a free port"):
        Viewer([], visitor.viewer.port)


def test_nonsense_leaves_the_server_running(visitor: Browser) -> None:
    for nonsense in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%ff%00?%ff=%zz HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", visitor.viewer.port), timeout=5) as link:
            link.sendall(nonsense)
            link.recv(1000)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        visitor.ask("/", X="a" * 10**7)
    assert visitor.get("/api/0/summary")["rows"] == 300
