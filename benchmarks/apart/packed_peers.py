"""Compare packed rows of images with other libraries' files of the same rows.

    tallyroll collect ale:breakout --frames 24000 --num-envs 8 --seed 0 --out data/stacks
    python benchmarks/apart/packed_peers.py data/stacks

Each library writes the rows of SRC, one trajectory after the other. It then reads 256 random rows
(observation, next observation, action, reward) with a newly opened reader, then more random rows,
then all rows in order. All times are CPU times of the process, including its threads. The script
compares the rows that it reads with those that it wrote. For a library that is not installed it
prints a line and skips it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tallyroll.storage import MemmapStorage, open_storage

COUNT, BLOCK = 256, 1024
Rows = dict[str, np.ndarray]


def part(rows: Rows, start: int, stop: int) -> Rows:
    """Return the rows ``[start, stop)``."""
    return {name: column[start:stop] for name, column in rows.items()}


class Peer:
    """A library's files. ``pieces`` are the trajectories."""

    name: ClassVar[str]
    only_stacks = only_frames = False

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        """Write the rows."""

    @staticmethod
    def named(rows: Rows, pieces: list[Rows]) -> dict[tuple[str, ...], np.ndarray]:
        """Return the columns of a storage."""
        return {
            ("observation",): rows["observation"],
            ("next", "observation"): rows["next"],
            ("action",): rows["action"],
            ("next", "reward"): rows["reward"],
            ("next", "terminated"): rows["terminated"],
            ("collector", "traj_ids"): np.repeat(
                np.arange(len(pieces)), [len(each["action"]) for each in pieces]
            ),
        }

    def open(self) -> None:
        """Open the files as a process does that has not read anything yet."""

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return observations and next observations of rows. Actions and rewards are read too."""
        raise NotImplementedError

    def in_order(self, start: int, stop: int) -> Any:
        """Return observations in their order."""
        return self.take(np.arange(start, stop))

    def nbytes(self, path: Path) -> int:
        """Return the bytes on the disk."""
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        return sum(min(each.stat().st_blocks * 512, each.stat().st_size) for each in files)


class Memmap(Peer):
    name = "MemmapStorage"
    pack: ClassVar[dict[str, Any] | None] = None

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        self.path = path
        where = path.with_suffix(".rows") if self.pack is not None else path
        named = self.named(rows, pieces)
        with MemmapStorage(where) as storage:
            for start in range(0, len(rows["action"]), BLOCK):
                storage.extend({key: each[start : start + BLOCK] for key, each in named.items()})
            if self.pack is not None:
                began = time.process_time()
                storage.pack(path, **self.pack)
                self.write_seconds = time.process_time() - began

    def open(self) -> None:
        self.storage = open_storage(self.path)

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self.storage.get(index)
        return found["observation"].numpy(), found["next", "observation"].numpy()

    def in_order(self, start: int, stop: int) -> Any:
        found = self.storage.reader.column(("observation",)).slice(start, stop)
        return found if self.pack is not None else found.copy()


class Packed(Memmap):
    name = "packed (zstd 3)"
    pack: ClassVar[dict[str, Any] | None] = {}


class PackedHdf5(Packed):
    name = "packed as HDF5 (gzip 4)"
    pack: ClassVar[dict[str, Any] | None] = {"format": "hdf5"}


class Minari(Peer):
    """One episode per trajectory. It reads full episodes: all episodes to which the rows belong."""

    name = "Minari (HDF5, as it comes)"

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        import gymnasium as gym
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage

        space = gym.spaces.Box(0, 255, rows["observation"].shape[1:], np.uint8)
        actions, self.path = gym.spaces.Discrete(4), path
        storage = MinariStorage.new(path, space, actions, data_format="hdf5", jpeg_encoding=False)
        for each in pieces:
            episode = EpisodeBuffer(
                observations=np.concatenate([each["observation"], each["next"][-1:]]),
                actions=each["action"],
                rewards=each["reward"][:, 0],
                terminations=each["terminated"][:, 0],
                truncations=np.zeros(len(each["action"]), np.bool_),
            )
            storage.update_episodes([episode])
        self.starts = np.cumsum([0, *(len(each["action"]) for each in pieces)])

    def open(self) -> None:
        from minari.dataset.minari_storage import MinariStorage

        self.storage = MinariStorage.read(self.path)

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of = self.starts.searchsorted(index, side="right") - 1
        which, place = np.unique(of, return_inverse=True)
        found = [each["observations"] for each in self.storage.get_episodes(which.tolist())]
        at = list(zip(place.tolist(), (index - self.starts[of]).tolist(), strict=True))
        now, after = ([found[e][r + more] for e, r in at] for more in (0, 1))
        return np.stack(now), np.stack(after)

    def in_order(self, start: int, stop: int) -> Any:
        # Read each episode once: find the episodes that begin in this block.
        first, last = self.starts[:-1].searchsorted([start, stop])
        return list(self.storage.get_episodes(range(int(first), int(last)))) if last > first else []


class Parquet(Peer):
    """Observation and next observation as bytes of one row each, zstd 3, groups of 64 rows."""

    name = "Parquet, zstd 3 (pyarrow)"
    group = 64

    def table(self, rows: Rows) -> Any:
        import pyarrow as pa

        self.shape = rows["observation"].shape[1:]
        nbytes = int(np.prod(self.shape))
        columns: dict[str, Any] = {
            name: pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(nbytes),
                len(rows["action"]),
                [None, pa.py_buffer(np.ascontiguousarray(rows[name]))],
            )
            for name in ("observation", "next")
        }
        columns |= {name: pa.array(rows[name].reshape(-1)) for name in ("action", "reward")}
        return pa.table(columns)

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        import pyarrow.parquet as pq

        self.path = path
        with pq.ParquetWriter(
            path, self.table(part(rows, 0, 1)).schema, compression="zstd", compression_level=3
        ) as writer:
            for start in range(0, len(rows["action"]), self.group):
                table = self.table(part(rows, start, start + self.group))
                writer.write_table(table, row_group_size=self.group)

    def open(self) -> None:
        import pyarrow.parquet as pq

        self.file = pq.ParquetFile(self.path)

    def arrays(self, table: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return two columns of a table as arrays."""
        found = []
        for name in ("observation", "next"):
            chunk = table[name].combine_chunks()
            chunk = chunk.chunk(0) if hasattr(chunk, "chunk") else chunk
            flat = np.frombuffer(chunk.buffers()[-1], np.uint8)
            size = int(np.prod(self.shape))
            flat = flat[chunk.offset * size : (chunk.offset + len(chunk)) * size]
            found.append(flat.reshape(-1, *self.shape))
        return found[0], found[1]

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        groups, place = np.unique(index // self.group, return_inverse=True)
        table = self.file.read_row_groups(groups.tolist(), use_threads=False)
        now, after = self.arrays(table)
        at = place * self.group + index % self.group
        return now[at], after[at]


class Pictures(Peer):
    """LeRobot's layout for images without videos: Parquet with a PNG per image.

    It is read as LeRobot reads it, through a table in memory. The next observation is that of the
    following row.
    """

    name = "Parquet with PNGs (as LeRobot's images)"
    only_frames = True

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from PIL import Image

        self.path, pictures, self.row_at = path, [], []
        for each in pieces:
            frames = np.concatenate([each["observation"], each["next"][-1:]])
            self.row_at += [len(pictures) + at for at in range(len(each["action"]))]
            for frame in frames:
                content = io.BytesIO()
                Image.fromarray(frame.reshape(frame.shape[-2:])).save(content, "PNG")
                pictures.append(content.getvalue())
        self.shape = rows["observation"].shape[1:]
        table = pa.table({"observation": pa.array(pictures, pa.binary())})
        pq.write_table(table, path, row_group_size=1000)
        self.row_at = np.array(self.row_at)

    def open(self) -> None:
        import pyarrow.parquet as pq

        self.column = pq.read_table(self.path)["observation"].combine_chunks()

    def pictures(self, at: np.ndarray) -> np.ndarray:
        from PIL import Image

        found = [np.asarray(Image.open(io.BytesIO(self.column[i].as_py()))) for i in at.tolist()]
        return np.stack(found).reshape(-1, *self.shape)

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = self.row_at[index]
        return self.pictures(at), self.pictures(at + 1)

    def in_order(self, start: int, stop: int) -> Any:
        return self.pictures(self.row_at[start:stop])


class Lance(Parquet):
    """The same table with each value compressed, which Lance does for binaries of any size."""

    name = "Lance, zstd a value"

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        import lance
        import pyarrow as pa

        self.path = path
        zstd = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "3"}
        schema = pa.schema(
            pa.field(each.name, pa.binary(), metadata=zstd)
            if pa.types.is_fixed_size_binary(each.type)
            else each
            for each in self.table(part(rows, 0, 1)).schema
        )
        blocks = range(0, len(rows["action"]), BLOCK)
        tables = (self.table(part(rows, each, each + BLOCK)).cast(schema) for each in blocks)
        batches = (batch for table in tables for batch in table.to_batches())
        lance.write_dataset(batches, str(path), schema=schema)

    def open(self) -> None:
        import lance

        self.file = lance.dataset(str(self.path))

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, place = np.unique(index, return_inverse=True)
        now, after = self.arrays(self.file.take(rows.tolist()))
        return now[place], after[place]


class Cpprb(Peer):
    """In memory, mapped to files. Stores each frame of a stack once. It draws rows itself."""

    name = "cpprb, stack_compress and next_of"
    only_stacks = True

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        from cpprb import ReplayBuffer

        path.mkdir()
        shape = (*rows["observation"].shape[2:], rows["observation"].shape[1])
        columns: dict[str, Any] = {"obs": {"shape": shape, "dtype": np.uint8}}
        columns |= {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
        self.buffer = ReplayBuffer(
            len(rows["action"]),
            columns,
            next_of="obs",
            stack_compress="obs",
            mmap_prefix=str(path / "rows"),
        )
        for each in pieces:
            self.buffer.add(
                obs=np.moveaxis(each["observation"], 1, -1),
                next_obs=np.moveaxis(each["next"], 1, -1),
                act=each["action"],
                rew=each["reward"],
                done=each["terminated"],
            )
            self.buffer.on_episode_end()

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self.buffer._encode_sample(index)
        return np.moveaxis(found["obs"], -1, 1), np.moveaxis(found["next_obs"], -1, 1)

    def nbytes(self, path: Path) -> int:
        return sum(os.stat(each).st_blocks * 512 for each in path.iterdir())


class Vault(Peer):
    """Flashbax's Vault, which reads all that was written, and keeps it in memory.

    The next observation is that of the following row, even if that row belongs to another
    trajectory: Vault has no final observations.
    """

    name = "flashbax Vault (zstd, TensorStore)"

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        import jax.numpy as jnp
        from flashbax.buffers.trajectory_buffer import TrajectoryBufferState
        from flashbax.vault import Vault as Files

        names = ("observation", "action", "reward")
        small = {name: jnp.asarray(rows[name][None, :1]) for name in names}
        self.path, self.small = path, small
        files = Files("rows", experience_structure=small, rel_dir=str(path), vault_uid="one")
        for start in range(0, len(rows["action"]), BLOCK):
            block = part(rows, start, start + BLOCK)
            state = TrajectoryBufferState(
                experience={name: jnp.asarray(block[name][None]) for name in names},
                current_index=jnp.asarray(0),
                is_full=jnp.asarray(True),
            )
            files.write(state, source_interval=(0, len(block["action"])))

    def open(self) -> None:
        from flashbax.vault import Vault as Files

        self.files = Files("rows", rel_dir=str(self.path), vault_uid="one")
        self.rows: Any = None

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.rows is None:
            self.rows = np.asarray(self.files.read().experience["observation"][0])
        return self.rows[index], self.rows[np.minimum(index + 1, len(self.rows) - 1)]

    def in_order(self, start: int, stop: int) -> Any:
        return self.take(np.arange(start, stop))[0]


class LeRobot(Peer):
    """Tallyroll's export to LeRobot, images as PNGs, with LeRobot's own loader, one row per call.

    The next observation is that of the following row of the episode: it has no final observations.
    """

    name = "LeRobot's own loader, PNGs"
    only_frames = True

    def __init__(self, path: Path, rows: Rows, pieces: list[Rows]) -> None:
        shape, lengths = rows["observation"].shape[-2:], [len(each["action"]) for each in pieces]
        pictures = {name: rows[name].reshape(-1, *shape, 1) for name in ("observation", "next")}
        named = self.named(rows | pictures, pieces)
        named["collector", "step"] = np.concatenate([np.arange(each) for each in lengths])
        named["collector", "lane"] = np.zeros(sum(lengths), np.int32)
        named["next", "truncated"] = np.zeros_like(rows["terminated"])
        where = path.with_suffix(".rows")
        with MemmapStorage(where) as storage:
            for start in range(0, sum(lengths), BLOCK):
                storage.extend({key: each[start : start + BLOCK] for key, each in named.items()})
        began = time.process_time()
        with open_storage(where) as storage:
            storage.export(path, "lerobot")
        self.write_seconds = time.process_time() - began
        self.path, self.shape = path, rows["observation"].shape[1:]

    def open(self) -> None:
        # With torch for CPUs, torchvision has no operators, although it declares two.
        self.library = torch.library.Library("torchvision", "FRAGMENT")
        for each in ("nms", "qnms"):
            self.library.define(f"{each}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        dataset = LeRobotDataset("tallyroll/rows", root=self.path)
        self.image = next(k for k, v in dataset.features.items() if v["dtype"] == "image")
        times = {self.image: [0.0, 1 / dataset.fps]}
        self.dataset = LeRobotDataset("tallyroll/rows", root=self.path, delta_timestamps=times)

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = torch.stack([self.dataset[each][self.image] for each in index.tolist()])
        pixels = (found * 255).round().to(torch.uint8).numpy().reshape(len(index), 2, *self.shape)
        return pixels[:, 0], pixels[:, 1]

    def in_order(self, start: int, stop: int) -> Any:
        return self.take(np.arange(start, stop))[0]


PEERS = [Memmap, Packed, PackedHdf5, Parquet, Lance, Minari, Pictures, LeRobot, Vault, Cpprb]


def read_rows(source: Path, most: int | None) -> tuple[Rows, list[Rows]]:
    """Return rows in the order of trajectories, and the trajectories."""
    with open_storage(source) as storage, tempfile.TemporaryDirectory() as scratch:
        storage.pack(Path(scratch, "packed"))
        with open_storage(Path(scratch, "packed")) as packed:
            count = min(len(packed), most or len(packed))
            reader = packed.reader
            keys = {
                "observation": ("observation",),
                "next": ("next", "observation"),
                "action": ("action",),
                "reward": ("next", "reward"),
                "terminated": ("next", "terminated"),
                "ids": ("collector", "traj_ids"),
            }
            rows = {name: reader.column(key).slice(0, count) for name, key in keys.items()}
    cuts = np.flatnonzero(np.diff(rows.pop("ids"))) + 1
    bounds = [0, *cuts.tolist(), count]
    return rows, [part(rows, *each) for each in itertools.pairwise(bounds)]


def cpu(call: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and its result."""
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def checked(kind: type[Peer], found: Any, rows: Rows, index: np.ndarray) -> None:
    """Raise an error unless these are the expected rows."""
    after = rows["next"][index]
    same_next = (found[1] == after).all()
    no_finals = kind in (Vault, LeRobot)
    if not (found[0] == rows["observation"][index]).all() or not (same_next or no_finals):
        raise AssertionError(f"{kind.name} returned other rows")


def play(
    kind: type[Peer], path: Path, rows: Rows, pieces: list[Rows], rounds: int
) -> dict[str, Any]:
    """Measure one library."""
    count, random = len(rows["action"]), np.random.default_rng(0)
    seconds, peer = cpu(lambda: kind(path, rows, pieces))
    seconds = getattr(peer, "write_seconds", seconds)
    peer.open()
    checked(
        kind, peer.take(np.arange(0, count, count // 50)), rows, np.arange(0, count, count // 50)
    )
    opened, more = [], []
    for _ in range(rounds):
        index = random.integers(0, count, COUNT)
        opened.append(cpu(lambda index=index: (peer.open(), peer.take(index)))[0] * 1e3)
    for number in range(2 * rounds + 20):
        index = random.integers(0, count, COUNT)
        spent, found = cpu(lambda index=index: peer.take(index))
        if number >= 20:
            more.append(spent * 1e3)
    checked(kind, found, rows, index)
    del found
    order = []
    for _ in range(2):
        peer.open()
        spent = sum(each for each in _in_order(peer, count))
        order.append(count / spent)
    return {
        "name": kind.name,
        "bytes_a_row": peer.nbytes(path) / count,
        "write_us": seconds / count * 1e6,
        "opened_ms": float(np.median(opened)),
        "more_ms": float(np.median(more)),
        "rows_in_order_a_s": max(order),
    }


def _in_order(peer: Peer, count: int) -> Iterator[float]:
    for start in range(0, count, BLOCK):
        yield cpu(lambda start=start: peer.in_order(start, min(start + BLOCK, count)))[0]


def main() -> None:
    """Measure all libraries."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="a storage of images, with trajectories")
    parser.add_argument("--rows", type=int, help="so many rows of it (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="times that it is opened")
    parser.add_argument("--only", help="these: packed,Lance,…, as their names begin")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, pieces = read_rows(args.source, args.rows)
    stacks = rows["observation"].ndim == 4 and rows["observation"].shape[1] > 1
    shape, load = rows["observation"].shape[1:], os.getloadavg()[0]
    print(f"{len(rows['action']):,} rows of {shape}, load {load:.1f}")
    print(
        "| | bytes a row | write, us | 256 rows, opened, ms | 256 more, ms | in order, rows a s |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    figures = []
    for kind in PEERS:
        wanted = not args.only or any(kind.name.startswith(each) for each in args.only.split(","))
        if not wanted or (kind.only_stacks and not stacks) or (kind.only_frames and stacks):
            continue
        with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
            try:
                found = play(kind, Path(scratch, "files"), rows, pieces, args.rounds)
            except ImportError as error:
                print(f"{kind.name}: left out ({error})")
                continue
        figures.append(found)
        print(
            f"| {found['name']} | {found['bytes_a_row']:,.0f} | {found['write_us']:,.1f} "
            f"| {found['opened_ms']:,.1f} | {found['more_ms']:,.2f} "
            f"| {found['rows_in_order_a_s']:,.0f} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
