"""The peers of the storage benchmark. Each has the same columns, as far as it supports them."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from storage_work import Rows, Spec, Store, flat, length, row_nbytes, tensordict_of

if TYPE_CHECKING:
    from tensordict import TensorDict

CHUNK_NBYTES = 2**20
"""Bytes of a chunk, summed over all columns, in the chunked formats."""


def chunk_rows(spec: Spec) -> int:
    """Return the rows of a chunk, a divisor of ``room``."""
    rows = max(1, CHUNK_NBYTES // row_nbytes(spec.rows))
    return min(2 ** (rows.bit_length() - 1), spec.room)


class Wrapping(Store):
    """A library that can write at any row, so this class keeps the write position."""

    def __init__(self, spec: Spec) -> None:
        """Start at row 0."""
        super().__init__(spec)
        self.at = 0

    def place(self, count: int) -> slice:
        """Return where the next ``count`` rows go."""
        start = self.at
        self.at = (start + count) % self.spec.room
        return slice(start, start + count)


class TorchRLStorage(Wrapping):
    """``set`` with a slice, its cheapest cursor, and ``get``."""

    kind: ClassVar[str]

    def __init__(self, spec: Spec) -> None:
        """Create it; ``LazyMemmapStorage`` in a folder."""
        from torchrl.data import replay_buffers

        super().__init__(spec)
        self.name = f"TorchRL {self.kind}"
        folder = {"scratch_dir": spec.scratch} if "Memmap" in self.kind else {}
        self.storage = getattr(replay_buffers, self.kind)(spec.room, **folder)
        self.read = self.storage.get

    def given(self, rows: Rows) -> TensorDict:
        """Return a TensorDict [N]."""
        return tensordict_of(rows)

    def write(self, given: TensorDict) -> None:
        """Write."""
        self.storage.set(self.place(len(given)), given)

    def asked(self, index: np.ndarray) -> torch.Tensor:
        """Return a tensor."""
        return torch.from_numpy(index)


class LazyMemmap(TorchRLStorage):
    """In memory-mapped files."""

    kind = "LazyMemmapStorage"


class LazyTensor(TorchRLStorage):
    """In memory."""

    kind = "LazyTensorStorage"


class UnderBuffer(TorchRLStorage):
    """TorchRL's ``ReplayBuffer`` on its own storage."""

    def __init__(self, spec: Spec) -> None:
        """Create a buffer that uses the storage."""
        from torchrl.data import ReplayBuffer

        super().__init__(spec)
        self.name = f"ReplayBuffer({self.kind})"
        self.buffer = ReplayBuffer(storage=self.storage)
        self.write, self.read = self.buffer.extend, self.buffer.sample

    def asked(self, index: np.ndarray) -> Any:
        """Return the number of rows that the buffer draws."""
        return len(index)


class LazyMemmapUnderBuffer(UnderBuffer):
    """In memory-mapped files."""

    kind = "LazyMemmapStorage"


class LazyTensorUnderBuffer(UnderBuffer):
    """In memory."""

    kind = "LazyTensorStorage"


class Cpprb(Store):
    """cpprb's ``ReplayBuffer`` in memory. It chooses the rows that it samples."""

    name = "cpprb, memory"
    mapped: ClassVar[bool] = False

    def __init__(self, spec: Spec) -> None:
        """Declare the columns."""
        from cpprb import ReplayBuffer

        super().__init__(spec)
        columns = {
            name: {"shape": column.shape[1:] or 1, "dtype": column.dtype}
            for name, column in flat(spec.rows).items()
        }
        prefix = str(spec.scratch / "cpprb") if self.mapped else None
        self.buffer = ReplayBuffer(spec.room, columns, mmap_prefix=prefix)
        self.read = self.buffer.sample

    def given(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the arrays by flat names."""
        return flat(rows)

    def write(self, given: dict[str, np.ndarray]) -> None:
        """Write."""
        self.buffer.add(**given)

    def asked(self, index: np.ndarray) -> Any:
        """Return the number of rows that the buffer draws."""
        return len(index)


class CpprbMapped(Cpprb):
    """The same in memory-mapped files."""

    name = "cpprb, mmap"
    mapped = True


class StableBaselines3(Store):
    """Stable-Baselines3's ``ReplayBuffer``: a call adds one row for each of N lanes, five columns.

    It chooses the rows that it samples, and converts them to tensors.
    """

    name = "Stable-Baselines3 (5 columns)"
    lanes: ClassVar[int] = 0

    def __init__(self, spec: Spec) -> None:
        """Create it for N lanes."""
        import gymnasium as gym
        from stable_baselines3.common.buffers import ReplayBuffer

        super().__init__(spec)
        observation = spec.rows["observation",]
        box = gym.spaces.Box(
            0 if observation.dtype == np.uint8 else -np.inf,
            255 if observation.dtype == np.uint8 else np.inf,
            observation.shape[1:],
            observation.dtype,
        )
        self.buffer = ReplayBuffer(
            spec.room, box, gym.spaces.Discrete(2), device="cpu", n_envs=self.lanes or spec.count
        )
        self.read = self.buffer.sample

    def fill(self) -> None:
        """Touch its arrays. It accepts only N rows at a time."""
        buffer = self.buffer
        buffer.observations[:] = buffer.next_observations[:] = 1
        buffer.actions[:] = buffer.rewards[:] = buffer.dones[:] = buffer.timeouts[:] = 0
        buffer.full = True

    def given(self, rows: Rows) -> tuple[Any, ...]:
        """Return the arguments of ``add``."""
        ended = rows["next", "terminated"][:, 0] | rows["next", "truncated"][:, 0]
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in rows["next", "truncated"][:, 0]]
        return (
            rows["observation",],
            rows["next", "observation"],
            rows["action",],
            rows["next", "reward"][:, 0],
            ended,
            infos,
        )

    def write(self, given: tuple[Any, ...]) -> None:
        """Write."""
        self.buffer.add(*given)

    def asked(self, index: np.ndarray) -> Any:
        """Return the number of rows that the buffer draws."""
        return len(index)


class StableBaselines3OneLane(StableBaselines3):
    """The same for one lane, for which sampling is faster."""

    lanes = 1


class H5py(Wrapping):
    """h5py: a contiguous dataset for each column, written and read through the library."""

    name = "h5py, contiguous"
    layout: ClassVar[str] = "contiguous"

    def __init__(self, spec: Spec) -> None:
        """Create the datasets with space for all rows, or for none if they grow."""
        import h5py

        super().__init__(spec)
        self.file = h5py.File(spec.scratch / "peer.h5", "w")
        rows = 0 if self.layout == "growing" else spec.room
        self.datasets = []
        for name, column in flat(spec.rows).items():
            chunked: dict[str, Any] = {}
            if self.layout != "contiguous":
                chunked = {
                    "chunks": (chunk_rows(spec), *column.shape[1:]),
                    "maxshape": (None, *column.shape[1:]),
                }
            shape = (rows, *column.shape[1:])
            self.datasets.append(self.file.create_dataset(name, shape, column.dtype, **chunked))

    def write(self, given: Rows) -> None:
        """Write, and flush to the operating system as the other contenders do."""
        where = self.place(length(given))
        for dataset, array in zip(self.datasets, given.values(), strict=True):
            dataset[where] = array
        self.file.flush()

    def asked(self, index: np.ndarray) -> np.ndarray:
        """Return the row numbers sorted, as h5py requires."""
        return np.sort(index)

    def read(self, asked: np.ndarray) -> list[np.ndarray]:
        """Read rows by number."""
        return [dataset[asked] for dataset in self.datasets]

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class H5pyChunked(H5py):
    """The same in chunks."""

    name = "h5py, chunked"
    layout = "chunked"


class H5pyGrowing(H5py):
    """The same in chunks, enlarged with each batch."""

    name = "h5py, chunked, appended"
    layout = "growing"

    def write(self, given: Rows) -> None:
        """Enlarge and write."""
        stop = self.at + length(given)
        for dataset, array in zip(self.datasets, given.values(), strict=True):
            dataset.resize(stop, axis=0)
            dataset[self.at : stop] = array
        self.at = stop
        self.file.flush()


class ZarrPython(Wrapping):
    """zarr-python: uncompressed chunks in a local store."""

    name = "zarr-python"
    grows: ClassVar[bool] = False

    def __init__(self, spec: Spec) -> None:
        """Create the arrays with space for all rows, or for none if they grow."""
        import zarr

        super().__init__(spec)
        group = zarr.open_group(spec.scratch / "peer.zarr", mode="w")
        self.arrays = [
            group.create_array(
                name,
                shape=(0 if self.grows else spec.room, *column.shape[1:]),
                chunks=(chunk_rows(spec), *column.shape[1:]),
                dtype=column.dtype,
                compressors=None,
            )
            for name, column in flat(spec.rows).items()
        ]

    def write(self, given: Rows) -> None:
        """Write."""
        where = self.place(length(given))
        for array, column in zip(self.arrays, given.values(), strict=True):
            array[where] = column

    def read(self, asked: np.ndarray) -> list[Any]:
        """Read rows by number."""
        return [array.oindex[asked] for array in self.arrays]


class ZarrPythonGrowing(ZarrPython):
    """The same, with appended batches."""

    name = "zarr-python, appended"
    grows = True

    def write(self, given: Rows) -> None:
        """Append."""
        for array, column in zip(self.arrays, given.values(), strict=True):
            array.append(column)


class TensorStore(Wrapping):
    """TensorStore on Zarr v3, uncompressed. A call handles all columns concurrently."""

    name = "TensorStore (Zarr v3)"

    def __init__(self, spec: Spec) -> None:
        """Create the arrays with space for all rows."""
        import tensorstore

        super().__init__(spec)
        self.arrays = [
            tensorstore.open(
                {
                    "driver": "zarr3",
                    "kvstore": {"driver": "file", "path": os.fspath(spec.scratch / name)},
                },
                create=True,
                dtype=column.dtype,
                shape=(spec.room, *column.shape[1:]),
                chunk_layout=tensorstore.ChunkLayout(
                    chunk_shape=(chunk_rows(spec), *column.shape[1:])
                ),
            ).result()
            for name, column in flat(spec.rows).items()
        ]

    def write(self, given: Rows) -> None:
        """Write, and wait until everything is written."""
        where = self.place(length(given))
        pending = [
            array[where].write(column)
            for array, column in zip(self.arrays, given.values(), strict=True)
        ]
        for write in pending:
            write.result()

    def read(self, asked: np.ndarray) -> list[np.ndarray]:
        """Read rows by number."""
        pending = [array[asked].read() for array in self.arrays]
        return [read.result() for read in pending]


class Minari(Store):
    """Minari's storage on HDF5: a call adds an episode of N steps, as its ``DataCollector`` does.

    It stores observations once (N + 1), actions, rewards and two flags, and reads only full
    episodes.
    """

    name = "Minari, an episode a call (5 columns)"

    def __init__(self, spec: Spec) -> None:
        """Create an empty one."""
        import gymnasium as gym
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage

        super().__init__(spec)
        self.episode_class = EpisodeBuffer
        observation = spec.rows["observation",]
        limit = 255 if observation.dtype == np.uint8 else np.inf
        self.storage = MinariStorage.new(
            spec.scratch / "minari",
            gym.spaces.Box(0 if limit == 255 else -limit, limit, observation.shape[1:]),
            gym.spaces.Discrete(2),
            data_format="hdf5",
            jpeg_encoding=False,  # lossy, and only for three channels
        )

    def given(self, rows: Rows) -> dict[str, Any]:
        """Return the parts of an episode."""
        following = rows["next", "observation"][-1:]
        return {
            "observations": np.concatenate([rows["observation",], following]),
            "actions": rows["action",],
            "rewards": rows["next", "reward"][:, 0],
            "terminations": rows["next", "terminated"][:, 0],
            "truncations": rows["next", "truncated"][:, 0],
        }

    def write(self, given: dict[str, Any]) -> None:
        """Add an episode."""
        self.storage.update_episodes([self.episode_class(**given)])


LIBRARIES = {
    Cpprb: "cpprb",
    CpprbMapped: "cpprb",
    StableBaselines3: "stable_baselines3",
    StableBaselines3OneLane: "stable_baselines3",
    H5py: "h5py",
    H5pyChunked: "h5py",
    H5pyGrowing: "h5py",
    ZarrPython: "zarr",
    ZarrPythonGrowing: "zarr",
    TensorStore: "tensorstore",
    Minari: "minari",
}
TORCHRL: list[type[Store]] = [LazyMemmap, LazyTensor, LazyMemmapUnderBuffer, LazyTensorUnderBuffer]
FILES: list[type[Store]] = [H5py, H5pyChunked, ZarrPython, TensorStore]
WRITERS = [*TORCHRL, Cpprb, CpprbMapped, StableBaselines3]
GROWERS: list[type[Store]] = [H5pyGrowing, ZarrPythonGrowing, Minari]
READERS = [*TORCHRL, Cpprb, CpprbMapped, StableBaselines3OneLane]


def installed(stores: list[type[Store]]) -> tuple[list[type[Store]], list[str]]:
    """Return the stores whose library is installed, and a remark for each missing library."""
    missing = {
        library
        for store, library in LIBRARIES.items()
        if store in stores and importlib.util.find_spec(library) is None
    }
    remarks = [f'{name}: left out, not installed: install ".[bench]"' for name in sorted(missing)]
    return [store for store in stores if LIBRARIES.get(store) not in missing], remarks
