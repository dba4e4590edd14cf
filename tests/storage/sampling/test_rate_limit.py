"""Compare a rate limit with plain arithmetic, with processes that are killed and stopped.

``TALLYROLL_KILLS`` sets the number of killed drawing processes, 5 by default.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage import MemmapStorage, RateLimit, ZarrStorage, open_storage
from tallyroll.storage.errors import RateStalled, StateMismatch
from tallyroll.storage.ext.sampling.rate_limit import RateCounts, _packed
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.stores.rewinds import rewind_to

from killed_storages_kit import forked, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "5"))
AT_ONCE = 1e-6
"""A timeout too short for any wait."""


def add(storage: MemmapStorage, rows: int) -> None:
    storage.extend(trajectory_rows(storage.head, rows, steps=5), ids="fresh")


def exhaust(wait: Callable[[int], object]) -> None:
    while True:
        wait(8)


def passes(wait: Callable[[int], None], rows: int) -> bool:
    try:
        wait(rows)
    except RateStalled:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from((0.25, 1.0, 3.0, 8.0)),
    min_rows=st.integers(1, 12),
    before=st.integers(0, 6),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=25),
)
def test_waits_are_those_of_plain_arithmetic(
    ratio: float,
    min_rows: int,
    before: int,
    steps: list[tuple[bool, int]],
) -> None:
    with MemmapStorage(max_size=64) as storage:
        if before:
            add(storage, before)
        limit = RateLimit(storage, ratio, min_rows=min_rows, timeout=AT_ONCE)
        written = drawn = most_written = most_drawn = 0
        for draws, rows in steps:
            if not storage.head:  # there is no file yet: all rows may be written, none drawn
                assert passes(limit.wait_to_insert, rows)
                assert not passes(limit.wait_to_sample, rows)
                add(storage, rows)
                written += rows
                continue
            most_drawn = max(most_drawn, rows * draws)
            most_written = max(most_written, rows * (not draws))
            slack, early = max(ratio * most_written, most_drawn), written < min_rows
            due = ratio * (written - min_rows)
            if draws:
                right = not early and drawn + rows - due <= slack
                assert passes(limit.wait_to_sample, rows) == right
                drawn += rows * right
            else:
                right = early or due + ratio * rows - drawn <= slack
                assert passes(limit.wait_to_insert, rows) == right
                if right:
                    add(storage, rows)
                    written += rows
            assert (limit.written, limit.drawn) == (written, drawn)
        limit.close()


def test_neither_side_is_ahead_of_the_other_by_more_than_the_slack(tmp_path: Path) -> None:
    path, ratio = tmp_path / "rows", 4
    with MemmapStorage(path) as storage:
        add(storage, 10)

        def learn() -> None:
            with open_storage(path) as rows:
                limit = RateLimit(rows, ratio, min_rows=20, slack=200, timeout=20)
                for _ in range(120):
                    limit.wait_to_sample(10)
                    time.sleep(0.0002)

        limit = RateLimit(storage, ratio, min_rows=20, slack=200, timeout=20)
        others, thread = [forked(learn), forked(learn)], threading.Thread(target=learn)
        thread.start()
        ahead = []
        while limit.written < 920:  # 900 of these are to be drawn four times each
            limit.wait_to_insert(9)
            add(storage, 9)
            ahead.append(ratio * (limit.written - 20) - limit.drawn)
        thread.join(30)
        assert [os.waitpid(each, 0)[1] for each in others] == [0, 0]
        assert limit.drawn == 3 * 120 * 10  # three processes draw concurrently: no count is lost
        assert max(ahead[20:]) <= 200
        assert min(ahead[20:]) >= -200 - ratio * 9


def test_a_killed_collector_does_not_block_its_learner(tmp_path: Path) -> None:
    path = tmp_path / "rows"

    def collect() -> None:
        with MemmapStorage(path) as storage:
            limit = RateLimit(storage, 1.0, timeout=60)
            while True:
                add(storage, 8)
                limit.wait_to_insert(8)

    collector = forked(collect)
    wait_until(lambda: (path / "manifest.json").exists())
    wait_until(lambda: len(open_storage(path)) > 0)
    with open_storage(path) as rows:
        limit = RateLimit(rows, 1.0, timeout=2.0)  # on a busy machine, the other one is late
        for _ in range(5):
            limit.wait_to_sample(8)
        killed(collector)
        began = time.monotonic()
        with pytest.raises(
            RateStalled, match=r"No row was written meanwhile\. No process has the storage open"
        ):
            exhaust(limit.wait_to_sample)
        assert time.monotonic() - began < 10
        drawn = limit.drawn
    with MemmapStorage(path, mode="append") as storage:  # a restart continues the counts
        limit = RateLimit(storage, 1.0, timeout=0.1)
        assert limit.drawn == drawn
        with pytest.raises(RateStalled, match=r"No row was drawn meanwhile\. Is the learner"):
            exhaust(lambda rows: (limit.wait_to_insert(rows), add(storage, rows)))


def test_killed_learners_leave_whole_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        add(storage, 10)
        limit = RateLimit(storage, 1e6, timeout=5)
        limit.wait_to_insert(1)  # creates the file
        add(storage, 10)
        for _ in range(KILLS):

            def learn() -> None:
                with open_storage(path) as rows:
                    own = RateLimit(rows, 1e6)
                    while True:
                        own.wait_to_sample(1)

            before = limit.drawn
            learner = forked(learn)
            wait_until(lambda was=before: limit.drawn > was + 3)
            killed(learner)
            assert limit.drawn > before  # no warning: the file is intact


def test_a_stopped_holder_of_the_counts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        add(storage, 10)
        limit = RateLimit(storage, 1.0, timeout=0.2)
        limit.wait_to_insert(1)

        def hold() -> None:
            with open_storage(path) as rows:
                own = RateLimit(rows, 1.0)
                own._try(lambda counts: (held.touch(), time.sleep(60), counts)[-1])

        held = tmp_path / "held"
        holder = forked(hold)
        try:
            wait_until(held.exists)
            os.kill(holder, signal.SIGSTOP)
            with pytest.raises(RateStalled, match="holds the lock on the counts"):
                limit.wait_to_insert(1)
            with pytest.raises(RateStalled, match="holds the lock on the counts"):
                _ = limit.drawn
        finally:
            killed(holder)
        limit.wait_to_insert(1)


def test_a_forked_child_does_not_share_the_lock(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        add(storage, 10)
        limit = RateLimit(storage, 100.0, slack=1e6)
        limit.wait_to_insert(1)
        add(storage, 1)

        def draw() -> None:
            for _ in range(200):
                limit.wait_to_sample(1)

        with open_storage(tmp_path / "rows") as rows:  # a forked child may only read
            limit.storage = rows
            children = [forked(draw), forked(draw)]
            draw()
            for child in children:
                assert os.waitpid(child, 0)[1] == 0
            assert limit.drawn == 600


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"x", r"got 1\."),
        (b"tallyroll drawn 2\n".ljust(132, b"\0"), "another version"),
        (None, "its checksum does not match"),
        ("other", "it belongs to another storage"),
        ((0, 2**64 - 1, 2**64 - 1, 0), "its counts are out of range"),
        ((2**63, 0, 0, 0), "its counts are out of range"),
    ],
)
def test_a_file_that_cannot_be_used_is_begun_anew(
    tmp_path: Path, content: object, why: str
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage, MemmapStorage(tmp_path / "other") as other:
        for each in (storage, other):
            add(each, 10)
            limit = RateLimit(each, 1.0)
            limit.wait_to_insert(1)
            limit.close()
        path = storage.writer.files.drawn_path
        if content is None:
            content = bytearray(path.read_bytes())
            content[100] ^= 1
        elif content == "other":
            content = other.writer.files.drawn_path.read_bytes()
        elif isinstance(content, tuple):
            content = _packed(str(storage.reader.id), RateCounts(*content))
        path.write_bytes(content)  # type: ignore[arg-type]
        limit = RateLimit(storage, 1.0)
        with pytest.warns(UserWarning, match=why):
            limit.wait_to_insert(1)
        limit.wait_to_insert(1)  # the file is used from then on
        assert limit.drawn == 0


@pytest.mark.parametrize("kind", ["link", "hard link", "folder"])
def test_another_place_is_never_written(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    with MemmapStorage(tmp_path / "rows") as storage:
        add(storage, 10)
        path = storage.writer.files.drawn_path
        if kind == "folder":
            path.mkdir()
        else:
            outside.write_bytes(b"mine")
            (path.symlink_to if kind == "link" else path.hardlink_to)(outside)
        with pytest.raises(Exception, match=r"samples\.drawn"):
            RateLimit(storage, 1.0).wait_to_insert(1)
    assert kind == "folder" or outside.read_bytes() == b"mine"


def test_wrong_arguments() -> None:
    with MemmapStorage() as storage:
        add(storage, 10)
        for wrong in ({"samples_per_insert": 0}, {"samples_per_insert": float("nan")}):
            with pytest.raises(ValueError, match="samples_per_insert: expected a number above 0"):
                RateLimit(storage, **wrong)
        for name, value in (("slack", -1), ("timeout", float("inf")), ("min_rows", 0)):
            with pytest.raises(ValueError, match=name):
                RateLimit(storage, 1.0, **{name: value})
        with pytest.raises(TypeError, match=r"expected a storage of tallyroll\.storage"):
            RateLimit([], 1.0)
        limit = RateLimit(storage, 2.0, slack=10, timeout=AT_ONCE)
        for wrong_count in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match="a number of rows of at least 1"):
                limit.wait_to_sample(wrong_count)  # type: ignore[arg-type]
        limit.wait_to_insert(4)
        with pytest.raises(
            ValueError,
            match=r"expected at least 11, got 10\. With 14 rows per draw, 4 rows per insert",
        ):
            limit.wait_to_sample(14)


def test_a_checkpoint_has_the_counts_and_a_rewind_keeps_the_file(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        limit = RateLimit(storage, 1.0, slack=100, timeout=AT_ONCE)
        add(storage, 10)
        limit.wait_to_sample(7)
        state = limit.state_dict()
        add(storage, 10)
        limit.wait_to_sample(9)
        assert (limit.written, limit.drawn) == (20, 16)
        rewind_to(storage.writer, 10, None)
        assert limit.drawn == 16
        limit.load_state_dict(state)
        assert (limit.written, limit.drawn) == (10, 7)
        for wrong in ({}, {"first_row": 0, "drawn": -1}, {"first_row": 11, "drawn": 1}):
            with pytest.raises(StateMismatch):
                limit.load_state_dict(wrong)
    with pytest.raises(Exception, match="was closed"):
        limit.wait_to_sample(1)


def test_other_formats_and_readers(tmp_path: Path) -> None:
    with ZarrStorage(tmp_path / "rows.zarr") as storage:
        add(storage, 10)
        limit = RateLimit(storage, 1.0, timeout=AT_ONCE)
        limit.wait_to_insert(1)
        storage.overlay("value", torch.float32)
        assert RateLimit(storage.with_overlays("value"), 1.0).drawn == 0


def test_all_count_from_the_first_of_them_in_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        first = RateLimit(storage, 1.0)  # before any row or file exists
        add(storage, 10)
        with open_storage(path) as rows:
            late = RateLimit(rows, 1.0)
            assert late.written == 0
            assert first.written == 10
            assert late.written == 10
            storage.writer.files.drawn_path.unlink()  # as if other rows were loaded
            first.wait_to_sample(4)
            assert (late.written, late.drawn) == (10, 4)
            assert RateLimit(rows, 1.0).drawn == 4
