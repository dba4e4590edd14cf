"""Tallyroll's storages, used directly and under TorchRL's replay buffers."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from storage_work import Rows, Spec, Store, tensordict_of
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tallyroll import storage

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

    from tallyroll.storage import ReusedRows

SUFFIX = {"MemmapStorage": "", "H5Storage": ".h5", "ZarrStorage": ".zarr"}
KINDS = [name for name in SUFFIX if hasattr(storage, name)]


class Ours(Store):
    """A Tallyroll storage, whose `extend` and `get` are called directly."""

    kind: ClassVar[str] = "MemmapStorage"
    options: ClassVar[tuple[str, ...]] = ("max_size",)

    def __init__(self, spec: Spec) -> None:
        """Create it with space for all rows."""
        super().__init__(spec)
        path = spec.scratch / f"ours{SUFFIX[self.kind]}"
        options = dict.fromkeys(self.options, spec.room)
        self.storage = getattr(storage, self.kind)(path, **options)
        # A collector's rows have new ids, but here the same rows are written repeatedly.
        self.write, self.read = partial(self.storage.extend, ids="fresh"), self.storage.get

    def asked(self, index: np.ndarray) -> torch.Tensor:
        """Return a tensor, as TorchRL's samplers do."""
        return torch.from_numpy(index)

    def close(self) -> None:
        """Close the storage."""
        self.storage.close()


class FromTensorDicts(Ours):
    """A ring that is given TensorDicts."""

    name = "MemmapStorage ring, TensorDict"

    def given(self, rows: Rows) -> TensorDict:
        """Return a TensorDict [N]."""
        return tensordict_of(rows)


class FromArrays(Ours):
    """A ring that is given a mapping of arrays, as by the collector."""

    name = "MemmapStorage ring, arrays"


class Reused(Ours):
    """The same ring, whose batches are read into reused memory."""

    name = "MemmapStorage ring, get(out=)"

    def __init__(self, spec: Spec) -> None:
        """Create it."""
        super().__init__(spec)
        self._reused: dict[int, ReusedRows] = {}
        self.read = self._read

    def _read(self, index: torch.Tensor) -> TensorDict:
        out = self._reused.get(len(index))
        if out is None:
            out = self._reused[len(index)] = self.storage.reused(len(index))
        found: TensorDict = self.storage.get(index, out=out)
        return found


class Capacity(Ours):
    """A storage that keeps every row, in space reserved beforehand."""

    options = ("capacity",)
    wraps = False

    def __init__(self, spec: Spec) -> None:
        """Create it."""
        super().__init__(spec)
        self.name = f"{self.kind}(capacity=)"

    def rewind(self) -> None:
        """Drop the rows but keep the files, which users cannot do: pages stay warm, as in a ring.

        This makes the formats comparable with each other and with the floor.
        """
        engine = self.storage.reader.engine
        engine._header.set_head(0)
        engine._header.set_reserve(0)
        engine.space.columns.mark_warm()


class Growing(Ours):
    """A storage that grows as rows are appended."""

    options = ()

    def __init__(self, spec: Spec) -> None:
        """Create it."""
        super().__init__(spec)
        self.name = f"{self.kind}, growing"


class UnderBuffer(Ours):
    """A ring under TorchRL's ``ReplayBuffer``."""

    name = "ReplayBuffer(MemmapStorage)"
    buffer_class: ClassVar[type[ReplayBuffer]] = ReplayBuffer

    def __init__(self, spec: Spec) -> None:
        """Create a buffer that uses the ring."""
        super().__init__(spec)
        self.buffer = self.buffer_class(storage=self.storage)
        self.vouched = ExitStack()
        self.vouched.enter_context(self.storage.writer.fresh_ids())
        self.write, self.read = self.buffer.extend, self.buffer.sample

    def given(self, rows: Rows) -> TensorDict:
        """Return a TensorDict [N]."""
        return tensordict_of(rows)

    def asked(self, index: np.ndarray) -> Any:
        """Return the number of rows that the buffer draws."""
        return len(index)


class UnderTensorDictBuffer(UnderBuffer):
    """A ring under TorchRL's ``TensorDictReplayBuffer``."""

    name = "TensorDictReplayBuffer(MemmapStorage)"
    buffer_class = TensorDictReplayBuffer


def of_format(base: type[Ours], kind: str) -> type[Ours]:
    """Return the same class for another format."""
    return type(f"{base.__name__}{kind}", (base,), {"kind": kind})


FORMATS = [of_format(Capacity, kind) for kind in KINDS]
WRITERS = [FromTensorDicts, FromArrays, *FORMATS, UnderBuffer, UnderTensorDictBuffer]
READERS = [FromArrays, Reused, *FORMATS, UnderBuffer, UnderTensorDictBuffer]
GROWERS = [*FORMATS, *(of_format(Growing, kind) for kind in KINDS if kind != "H5Storage")]
