"""Check which transitions replay buffers return, and measure their memory and time.

    pip install -c constraints.txt ".[bench,atari]"
    python benchmarks/truth.py

Every buffer gets the same stream: two lanes out of phase, with episodes of five transitions that
end by termination and by a time limit in turn. An observation is a stack of four frames, and each
frame has its own number. A buffer has space for 40 rows. When it is full, the script draws rows
after every add and compares each drawn row with the stream.

Then the script measures bytes a row, in a separate process for each buffer, and the CPU time of
`add` and `sample` in interleaved rounds. It uses stacks of 84 x 84 pixels: of Breakout if ale-py is
installed, otherwise of a drawn ball. It prints a Markdown table, which docs/truth.md explains.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Contender, Tally, interleave, prepare, print_setting, write_json
from truth_buffers import PEERS, STACK, Buffer, Step, chosen

LANES, PLACES, EPISODE = 2, 40, 5
SIDE = 16
"""Height and width of a numbered frame. Every four pixels hold its number in base 256."""
BASE = 256.0 ** np.arange(4)

PLACES_OF_ROWS = ("mid-episode", "seam", "time limit", "termination")
KINDS = {
    "right": "the transition of the stream",
    "unused": "a wrong next observation, but the row terminated, and no learner uses it",
    "missing": "the next observation is NaN or zeros",
    "itself": "the next observation is the observation of the same row",
    "other episode": "the next observation is of another episode of the lane",
    "other lane": "the next observation is of another lane",
    "other step": "the next observation is another one of the same episode",
    "frames": "the newest frame of the next observation is right, an older one is not",
    "unknown frame": "the newest frame of the next observation is not in the stream",
    "observation": "the newest frame of the observation is right, an older one is not",
    "no bootstrap": "the row did not terminate, but its flag stops bootstrapping",
    "bootstrap": "the row terminated, but its flag does not stop bootstrapping",
    "no such row": "observation, action and reward do not belong together",
}
"""Kinds of drawn rows, with their definitions."""


@dataclass(frozen=True)
class Row:
    """A transition of the stream. Observations are the numbers of their frames, oldest first."""

    observation: tuple[float, ...]
    next: tuple[float, ...]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    time: int
    """The number of the vector step that made the transition."""


class Stream:
    """Lanes out of phase, whose episodes end by termination and by a time limit in turn.

    The first stack of an episode consists of copies of its first frame. Without ``pixels``, a frame
    is filled with its own number, and ``rows`` and ``frames`` record the truth.

    Args:
        dtype: dtype of numbered frames.
        length: number of transitions of an episode.
        pixels: frames [lanes, time, height, width] to use in a cycle instead of numbers.
    """

    def __init__(
        self, dtype: Any = np.uint8, length: int = EPISODE, pixels: np.ndarray | None = None
    ) -> None:
        self.dtype, self.length, self.pixels = dtype, length, pixels
        self.time = 0
        self.rows: dict[float, Row] = {}
        """Transitions, by the number of the newest frame of the observation."""
        self.frames: dict[float, tuple[int, int]] = {}
        """The lane and the episode of each frame, by its number."""
        self._made = 0
        self._shown = [0] * LANES
        self._episode = list(range(LANES))
        self._at = [lane * (length // 2) for lane in range(LANES)]
        self._stack = [[self._frame(lane)] * STACK for lane in range(LANES)]

    def _frame(self, lane: int) -> np.ndarray:
        if self.pixels is not None:
            self._shown[lane] += 1
            return self.pixels[lane, self._shown[lane] % self.pixels.shape[1]]
        self._made += 1
        self.frames[self._made] = (lane, self._episode[lane])
        return np.resize(self._made // BASE % 256, (SIDE, SIDE)).astype(self.dtype)

    def step(self) -> Step:
        """Return the next transition of each lane."""
        slots = [self._slot(lane) for lane in range(LANES)]
        self.time += 1
        dtypes = (None, np.int64, np.float32, None, bool, bool, np.int64, np.int64)
        columns = zip(*slots, strict=True)
        return Step(*map(np.array, columns, dtypes))

    def _slot(self, lane: int) -> tuple[Any, ...]:
        stack, episode, at = self._stack[lane], self._episode[lane], self._at[lane]
        then = [*stack[1:], self._frame(lane)]
        ended = at + 1 == self.length
        limit = ended and episode // LANES % 2 == 1
        terminated, truncated = ended and not limit, limit
        action, reward = (self.time * LANES + lane) * 7 % 2**20, self.time + lane / LANES
        if self.pixels is None:
            now, after = numbers(np.array(stack)), numbers(np.array(then))
            row = Row(tuple(now), tuple(after), action, reward, terminated, truncated, self.time)
            self.rows[now[-1]] = row
        if ended:
            self._episode[lane], self._at[lane] = episode + LANES, 0
            self._stack[lane] = [self._frame(lane)] * STACK
        else:
            self._at[lane], self._stack[lane] = at + 1, then
        return stack, action, reward, then, terminated, truncated, episode, at


def numbers(stacks: np.ndarray) -> np.ndarray:
    """Return the numbers of frames [..., SIDE, SIDE]: NaN for NaN, -1 for other contents."""
    found = stacks.reshape(*stacks.shape[:-2], -1, 4).astype(np.float64) @ BASE
    first = found[..., 0]
    return np.where(np.isnan(first) | (found == first[..., None]).all(-1), first, -1)


@dataclass
class Verdict:
    """The drawn rows of one buffer, counted by place and kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: list[float] = field(default_factory=list)
    """The share of the ring's rows that were drawn at least once after each add."""

    @property
    def draws(self) -> int:
        """Number of drawn rows."""
        return self.counts.total()

    @property
    def missing(self) -> int:
        """Number of rows whose next observation is needed but is NaN or zeros."""
        return sum(count for (_, kind), count in self.counts.items() if kind == "missing")

    @property
    def wrong(self) -> int:
        """Number of rows from which a learner would compute a wrong target."""
        harmless = ("right", "unused", "missing")
        return sum(count for (_, kind), count in self.counts.items() if kind not in harmless)

    def summary(self, place: str) -> str:
        """Return the kinds of wrong rows at a place with their shares, or "right"."""
        of_place = {kind: self.counts[place, kind] for kind in KINDS if self.counts[place, kind]}
        total = sum(of_place.values())
        shares = [
            f"{percent(count, total)} {kind}" for kind, count in of_place.items() if kind != "right"
        ]
        return ", ".join(shares) or ("right" if total else "none drawn")


def percent(count: int, total: int) -> str:
    """Return a share as text: "0 %" and "100 %" are exact, others are rounded."""
    share = 100 * count / max(total, 1)
    if share in (0, 100) or 1 <= share <= 99:
        return f"{share:.0f} %"
    return "< 1 %" if share < 1 else "> 99 %"


def kind_of(
    stream: Stream,
    row: Row | None,
    observed: np.ndarray,
    then: np.ndarray,
    stops: bool,
    action: float,
    reward: float,
) -> str:
    """Return the kind of one drawn row, a key of ``KINDS``."""
    if row is None or (action, reward) != (row.action, row.reward):
        return "no such row"
    if tuple(observed) != row.observation:
        return "observation"
    if stops != row.terminated:
        return "no bootstrap" if stops else "bootstrap"
    if tuple(then) == row.next:
        return "right"
    if row.terminated:
        return "unused"
    newest = stream.frames.get(then[-1])
    if newest is None:
        return "missing" if np.isnan(then[-1]) or then[-1] == 0 else "unknown frame"
    if then[-1] == row.next[-1]:
        return "frames"
    if tuple(then) == row.observation:
        return "itself"
    lane, episode = stream.frames[row.observation[-1]]
    if newest[0] != lane:
        return "other lane"
    return "other episode" if newest[1] != episode else "other step"


def place_of(row: Row | None, time: int) -> str:
    """Return the place of a row in its episode and in the ring.

    The seam of the ring consists of the newest row of each lane, whose next row is not stored yet;
    the oldest rows, whose older frames were overwritten; and the last row before the end of the
    array. A row at the end of an episode is not counted as a row of the seam.
    """
    steps = PLACES // LANES
    if row is not None and row.truncated:
        return "time limit"
    if row is not None and row.terminated:
        return "termination"
    age = time - row.time if row is not None else 0
    if row is not None and (age == 1 or age > steps - STACK + 1 or row.time % steps == steps - 1):
        return "seam"
    return "mid-episode"


def check(kind: type[Buffer], draws: int) -> Verdict:
    """Draw at least ``draws`` rows from a full ring, some after every add, and classify them."""
    np.random.seed(0)  # the generator that Stable-Baselines3 and cpprb use
    torch.manual_seed(0)
    stream, verdict = Stream(kind.dtype), Verdict()
    # Two rounds of the ring, so that its end meets every step of an episode.
    adds = 2 * PLACES // LANES // kind.block
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as folder:
        buffer = kind(PLACES, 32, Stream(kind.dtype).step(), Path(folder))
        try:
            for number in range(3 * adds):
                steps = [stream.step() for _ in range(kind.block)]
                buffer.add(buffer.prepare(steps))
                if number >= 2 * adds:
                    judge(buffer, stream, verdict, -(-draws // adds))
        finally:
            buffer.close()
    return verdict


def judge(buffer: Buffer, stream: Stream, verdict: Verdict, draws: int) -> None:
    """Draw rows and count them by place and kind."""
    seen: set[float] = set()
    drawn = 0
    while drawn < draws:
        draw = buffer.read(buffer.sample())
        observed, then = numbers(np.asarray(draw.observation)), numbers(np.asarray(draw.next))
        drawn += len(observed)
        for each in zip(observed, then, draw.stops, draw.action, draw.reward, strict=True):
            row = stream.rows.get(each[0][-1])
            verdict.counts[place_of(row, stream.time), kind_of(stream, row, *each)] += 1
            seen.add(each[0][-1])
    oldest = stream.time - PLACES // LANES
    stored = {number for number, row in stream.rows.items() if row.time >= oldest}
    verdict.reached.append(len(seen & stored) / len(stored))


def pixels(count: int) -> tuple[np.ndarray, str]:
    """Return frames [LANES, count, 84, 84] and the name of their source."""
    try:
        from ale_py.vector_env import AtariVectorEnv
    except ImportError:
        return drawn_ball(count), "a drawn ball"
    game = AtariVectorEnv("breakout", LANES, stack_num=1)
    try:
        frame, _ = game.reset(seed=0)
        frames = [frame[:, 0]]
        random = np.random.default_rng(0)
        for _ in range(count - 1):
            frames.append(game.step(random.integers(0, 4, LANES))[0][:, 0])
    finally:
        game.close()
    return np.stack(frames, axis=1), "Breakout, random actions"


def drawn_ball(count: int) -> np.ndarray:
    """Return frames [LANES, count, 84, 84] of a ball that bounces on a constant background."""
    background = np.random.default_rng(0).integers(0, 256, (84, 84), np.uint8)
    frames = np.tile(background, (LANES, count, 1, 1))
    for time in range(count):
        y, x = (abs(time * speed % 160 - 80) for speed in (2, 3))
        frames[:, time, y : y + 4, x : x + 4] = 255
    return frames


def filled(kind: type[Buffer], rows: int, frames: np.ndarray, folder: Path) -> tuple[Any, Stream]:
    """Return a buffer whose ring was filled one and a quarter times, and its stream."""
    stream = Stream(length=200, pixels=frames)
    buffer = kind(rows, min(256, rows), Stream(pixels=frames).step(), folder)
    for _ in range(rows * 5 // 4 // LANES // kind.block):
        buffer.add(buffer.prepare([stream.step() for _ in range(kind.block)]))
    return buffer, stream


def bytes_a_row(kind: type[Buffer], rows: int, frames: np.ndarray) -> float:
    """Return the growth of private memory and of the buffer's files, divided by the rows."""
    prepare()
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
        first, second = Path(scratch, "first"), Path(scratch, "second")
        first.mkdir()
        second.mkdir()
        small, _ = filled(kind, 64, frames, first)  # loads and compiles what the library needs
        small.sample()
        small.close()
        del small
        before = own_memory()
        buffer, _ = filled(kind, rows, frames, second)
        files = sum(each.stat().st_blocks * 512 for each in second.rglob("*") if each.is_file())
        found = (own_memory() - before + files) / rows
        buffer.close()
    return found


def own_memory() -> int:
    """Return the bytes of anonymous memory of this process (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return 1024 * int(kilobytes)


class Adding(Contender):
    """Contender that adds to a full ring."""

    def __init__(self, buffer: Buffer, stream: Stream) -> None:
        self.name, self.buffer, self.stream = buffer.name, buffer, stream

    def make_ready(self) -> None:
        steps = [self.stream.step() for _ in range(self.buffer.block)]
        self.prepared = self.buffer.prepare(steps)

    def advance(self) -> None:
        self.buffer.add(self.prepared)

    def tally(self) -> Tally:
        return Tally(LANES * self.buffer.block, self.buffer.block)

    def close(self) -> None:
        self.buffer.close()


class Sampling(Contender):
    """Contender that draws batches from the ring of an `Adding`."""

    def __init__(self, buffer: Buffer) -> None:
        self.name, self.buffer = buffer.name, buffer

    def advance(self) -> None:
        self.sampled = self.buffer.sample()

    def tally(self) -> Tally:
        return Tally(self.buffer.batch, 1)


def costs(kinds: Sequence[type[Buffer]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return bytes a row and the CPU times of each buffer, by the name of the buffer."""
    frames, source = pixels(args.rows // LANES)
    print(f"Costs: {args.rows:,} rows of two 84x84x4 stacks, {source}\n", flush=True)
    found: dict[str, dict[str, float]] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tallyroll.storage", "torchrl.data"])  # slow to import
    for kind in kinds:
        with ProcessPoolExecutor(1, context) as pool:
            nbytes = pool.submit(bytes_a_row, kind, args.rows, frames).result(timeout=600)
        found[kind.name] = {"bytes_a_row": nbytes}
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for kind in kinds:
            folder = tempfile.TemporaryDirectory(prefix="tallyroll-bench-")
            buffer, stream = filled(kind, args.rows, frames, Path(stack.enter_context(folder)))
            contenders += [Adding(buffer, stream), Sampling(buffer)]
            stack.callback(buffer.close)
        results = interleave(contenders, args.rounds, args.seconds)
        for adding, sampling in zip(results[::2], results[1::2], strict=True):
            batch = min(256, args.rows)
            times = {"add_us": adding.own_us, "sample_us": sampling.own_us * batch}
            found[adding.name] |= times | {"spread": max(adding.spread, sampling.spread)}
    return found


def table(
    verdicts: dict[str, Verdict], costs_by_name: dict[str, dict[str, float]]
) -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    headings = [
        "buffer", "wrong", "missing", *PLACES_OF_ROWS, "rows reached",
        "bytes a row", "add, us / row", "sample 256, us / call",
    ]  # fmt: skip
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for name, verdict in verdicts.items():
        cost = costs_by_name.get(name, {})
        figures = [f"{cost[key]:,.0f}" for key in ("bytes_a_row", "add_us", "sample_us") if cost]
        cells = [
            name,
            f"**{percent(verdict.wrong, verdict.draws)}**",
            percent(verdict.missing, verdict.draws),
            *map(verdict.summary, PLACES_OF_ROWS),
            f"{PLACES * float(np.mean(verdict.reached)):.1f} of {PLACES}",
            *(figures or ["-"] * 3),
        ]
        yield "| " + " | ".join(cells) + " |"


def as_json(verdict: Verdict, cost: dict[str, float]) -> dict[str, Any]:
    """Return a buffer's figures for the file of ``--json``."""
    kinds = {
        place: {kind: verdict.counts[place, kind] for kind in KINDS if verdict.counts[place, kind]}
        for place in PLACES_OF_ROWS
    }
    totals = {"draws": verdict.draws, "wrong": verdict.wrong, "missing": verdict.missing}
    return {**totals, "reached": float(np.mean(verdict.reached)), "kinds": kinds, **cost}


def main() -> None:
    """Check and measure all buffers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=",".join(PEERS), help="libraries to compare, or none")
    parser.add_argument("--draws", type=int, default=20_000, help="rows to draw from each buffer")
    parser.add_argument(
        "--rows", type=int, default=4_000, help="size of the ring whose costs are measured"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a round")
    parser.add_argument(
        "--no-costs", action="store_true", help="check rows, but do not measure costs"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="only show that the script runs")
    args = parser.parse_args()
    peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers: expected some of {','.join(PEERS)}, got {','.join(unknown)}")
    if args.quick:
        args.draws, args.rows, args.rounds, args.seconds = 1_000, 80, 1, 0.001
    prepare()
    print_setting()
    kinds, remarks = chosen(peers)
    verdicts = {kind.name: check(kind, args.draws) for kind in kinds}
    found = {} if args.no_costs else costs(kinds, args)
    print("\n".join(table(verdicts, found)))
    print("\n" + "\n".join([*(f"{kind}: {meaning}" for kind, meaning in KINDS.items()), *remarks]))
    if args.json:
        results = [
            {"name": kind.name, "library": kind.library, "version": version(kind.library)}
            | as_json(verdicts[kind.name], found.get(kind.name, {}))
            for kind in kinds
        ]
        write_json(args.json, results)


def version(library: str) -> str:
    """Return the installed version of a library."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


if __name__ == "__main__":
    main()
