"""Draw the pictures of the front page and the concepts page: `python docs/drawings.py`.

Each picture has its own background and two sets of colours, for light and dark mode. The bars of
the front page show figures that the script reads from the tables of other pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "drawings"
ROOT = Path(__file__).parents[1]
WIDTH, CELL, GAP = 480, 44, 6  # a phone shows them at two thirds of this size, with letters of 8 px
STEP = CELL + GAP
BYTES = "bytes a row"

STYLE = """
.ground { fill: #ffffff; stroke: #d0d4da; }
text { font: 14px sans-serif; fill: #24292f; }
.small { font-size: 12px; }
.strong { font-weight: bold; }
.middle { text-anchor: middle; }
.row { fill: #cfe3f7; stroke: #3a75b0; }
.over { fill: #f6d9a8; stroke: #a76a10; }
.other { fill: #e4e7eb; stroke: #8b929b; }
.none { fill: none; stroke: #8b929b; stroke-dasharray: 4 3; }
.line { stroke: #8b929b; fill: none; stroke-width: 1.5; }
.mark { stroke: #c0392b; fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #161b22; stroke: #3d444d; }
  text { fill: #e6edf3; }
  .row { fill: #1d4468; stroke: #6ba6dd; }
  .over { fill: #6b4a12; stroke: #e0ad55; }
  .other { fill: #2d333b; stroke: #8b949e; }
  .none { stroke: #8b949e; }
  .line { stroke: #8b949e; }
  .mark { stroke: #ff7b6b; }
}
"""


def text(x: float, y: float, words: str, *kinds: str) -> str:
    """Return a line of text whose left end, or middle, is at x."""
    return f'<text x="{x:g}" y="{y:g}" class="{" ".join(kinds)}">{escape(words)}</text>'


def cell(x: float, y: float, kind: str, words: str = "", width: float = CELL) -> str:
    """Return a box with centred text."""
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL}" rx="5" class="{kind}"/>'
    return box + text(x + width / 2, y + CELL / 2 + 5, words, "middle") if words else box


def path(kind: str, way: str) -> str:
    """Return a line."""
    return f'<path d="{way}" class="{kind}"/>'


def arrow(x: float, y: float, to: float) -> str:
    """Return an arrow to the right."""
    return path("line", f"M{x:g} {y:g}H{to:g}m-7 -5l7 5l-7 5")


def picture(height: int, title: str, parts: Iterable[str]) -> str:
    """Return the content of a picture file."""
    ground = (
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="{{}}"/>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        ground.format("ground"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def reset_slot() -> str:
    """Draw two lanes over six step calls. Each lane spends one of them on a reset."""
    ends, resets = {(0, 2), (1, 3)}, {(0, 3), (1, 4)}
    parts = [text(20, 30, "Two lanes, six step calls: 12 slots, 10 transitions", "strong")]
    for lane in range(2):
        y = 64 + lane * STEP
        parts.append(text(20, y + CELL / 2 + 5, f"lane {lane}"))
        for slot in range(6):
            x = 90 + slot * STEP
            kind = "none" if (lane, slot) in resets else "row"
            words = "reset" if kind == "none" else "end" if (lane, slot) in ends else ""
            parts.append(cell(x, y, kind, words))
    parts += [
        text(90 + slot * STEP + CELL / 2, 56, str(slot + 1), "middle", "small") for slot in range(6)
    ]
    parts += [
        cell(20, 180, "row"),
        text(76, 207, "an action was executed: a row, counted"),
        cell(20, 180 + STEP, "none"),
        text(76, 207 + STEP, "the action was ignored: a reset, no row, not counted"),
        text(20, 298, "ledger: 12 slots = 10 executed + 2 reset slots", "small"),
    ]
    return picture(314, "A reset slot is no transition", parts)


def surplus() -> str:
    """Draw four lanes and batches of ten, in which the third step makes twelve transitions."""
    second = 310
    parts = [text(20, 30, "Four lanes, batches of 10: two rows too many", "strong")]
    for batch, x0 in enumerate((90, second)):
        carried = 2 if batch else 0
        parts.append(text(x0, 56, f"batch {batch + 1}", "small"))
        for lane in range(4):
            y = 66 + lane * STEP
            if not batch:
                parts.append(text(20, y + CELL / 2 + 5, f"lane {lane}"))
            for slot in range(3):
                number = slot * 4 + lane + 1 - (2 if batch else 0)
                if number < 1:
                    continue
                kind = "row" if number <= 10 else "over"
                if batch and number <= carried:
                    kind = "over"
                parts.append(cell(x0 + slot * STEP, y, kind, str(number)))
    y = 66 + 3 * STEP
    parts += [
        arrow(90 + 3 * STEP + 4, y, second - 10),
        text(246, y - 10, "carried", "small"),
        text(20, 290, "The two are carried: with 8 new ones they make a batch."),
        text(
            20, 312, "At the end of the budget, the rest is discarded and counted as such.", "small"
        ),
    ]
    return picture(328, "The surplus of a batch is carried into the next one", parts)


def kill() -> str:
    """Draw a storage before a commit, when its process is killed, and when it is opened again."""
    width, count = 24, 9
    stages = (
        ("6 rows are committed", 6, 0),
        ("3 more half written: killed", 6, 3),
        ("opened again: the 6 rows", 6, 0),
    )
    parts = [text(20, 30, "kill -9 in the middle of a commit: the count moves last", "strong")]
    for stage, (words, whole, torn) in enumerate(stages):
        y = 52 + stage * 62
        for row in range(count):
            kind = "row" if row < whole else "over" if row < whole + torn else "none"
            parts.append(
                cell(20 + row * (width + 4), y, kind, str(row + 1) if row < whole else "", width)
            )
        parts.append(text(290, y + CELL / 2 + 5, words))
    x, y = 20 + 8 * (width + 4), 52 + 62
    edge = 20 + 6 * (width + 4) - 2
    parts += [
        path("mark", f"M{x + 16:g} {y - 12:g}l-10 32h10l-8 34"),
        path("line", f"M{edge:g} 46V{52 + 2 * 62 + CELL + 6}"),
        text(20, 250, "the line: the number of committed rows, which is in the header", "small"),
        text(20, 268, "A resumed run continues with row 7, to exactly N.", "small"),
    ]
    return picture(284, "After a kill every committed row is there, and nothing else", parts)


def figure(page: str, row: str, column: str) -> float:
    """Return a number of a table: that of the row with this name, in the column with this name."""
    column_at = None
    for line in (ROOT / page).read_text("utf-8").splitlines():
        if not line.startswith("|"):
            column_at = None  # the table ends
            continue
        cells = [each.strip() for each in line.strip("|").split("|")]
        if column in cells:
            column_at = cells.index(column)
        elif column_at is not None and cells[0] == row:
            return float(cells[column_at].strip("*").replace(",", ""))
    raise LookupError(f"{page} has no table with a row {row!r} and a column {column!r}")


def bars(
    title: str, values: Iterable[tuple[str, float, str]], notes: Iterable[str], longest: float
) -> str:
    """Draw a bar for each value, with its name and the text that gives it."""
    parts, y = [text(20, 30, title, "strong")], 44
    for name, value, shown in values:
        width = max(value / longest * 180, 1.5) if value else 0
        kind = "row" if name.startswith("Tallyroll") else "other"
        parts += [
            text(20, y + 15, name),
            f'<rect x="220" y="{y}" width="{width:g}" height="20" rx="3" class="{kind}"/>',
            text(220 + width + 8, y + 15, shown, *(["strong"] if kind == "row" else [])),
        ]
        y += 28
    for note in notes:
        y += 18
        parts.append(text(20, y, note, "small"))
    return picture(y + 16, title, parts)


def memory() -> str:
    """Draw the memory of a million Atari transitions, in the buffers that return true ones."""
    of = {
        "Tallyroll": figure("docs/pixels.md", "Breakout", "bytes a row, stored once"),
        "cpprb, next_of": figure("docs/truth.md", "cpprb `next_of`, a buffer for each lane", BYTES),
        "TorchRL, compressed list": figure(
            "docs/truth.md", "TorchRL `CompressedListStorage`", BYTES
        ),
        "Tianshou": figure("docs/truth.md", "Tianshou `VectorReplayBuffer`", BYTES),
        "Stable-Baselines3": figure("docs/truth.md", "Stable-Baselines3 `ReplayBuffer`", BYTES),
    }
    values = [
        (name, nbytes, f"{nbytes / 1000:.2g} GB" if nbytes < 1000 else f"{nbytes / 1000:.0f} GB")
        for name, nbytes in of.items()
    ]
    notes = (
        "Bytes a row of Breakout, random actions, times a million.",
        "Only buffers that returned the true transition in every draw.",
    )
    return bars("Memory of a million Atari transitions", values, notes, max(of.values()))


def speed() -> str:
    """Draw the speed of collecting relative to a raw loop."""
    of = {
        "raw loop, nothing stored": 1.0,
        **{
            shown: figure("docs/speed.md", row, "8 lanes")
            for shown, row in {
                "Tallyroll, to disk": "Tallyroll, `MemmapStorage`",
                "Stable-Baselines3": "Stable-Baselines3, `ReplayBuffer` in memory",
                "Tianshou": "Tianshou, `VectorReplayBuffer` in memory",
                "TorchRL, to disk": "TorchRL, `LazyMemmapStorage`",
            }.items()
        },
    }
    values = [(name, value, f"{value:.2f}") for name, value in of.items()]
    notes = ("CartPole, 8 lanes, random actions; 1 is as fast as env.step alone.",)
    return bars("Speed relative to the raw loop", values, notes, 1)


def losses() -> str:
    """Draw the stored rows that are lost if their process is killed."""
    of = {
        shown: figure("benchmarks/README.md", row, "at most")
        for shown, row in {
            "Tallyroll": "Tallyroll, `storage=PATH`",
            "TorchRL, memory-mapped": "TorchRL, `LazyMemmapStorage`",
            "Stable-Baselines3": "Stable-Baselines3, `ReplayBuffer`",
        }.items()
    }
    values = [(name, value, f"{value:,.0f}") for name, value in of.items()]
    notes = ("Of 10,000 rows, opened again in a new process, no checkpoint.",)
    return bars("Rows lost after kill -9", values, notes, 10_000)


DRAWINGS: dict[str, Callable[[], str]] = {
    "reset_slot.svg": reset_slot,
    "surplus.svg": surplus,
    "kill.svg": kill,
    "memory.svg": memory,
    "speed.svg": speed,
    "losses.svg": losses,
}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
