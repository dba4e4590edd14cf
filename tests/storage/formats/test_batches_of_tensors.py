"""Test that tensors of any kind reach a storage bit for bit.

Tensors that resemble those of the previous batch are copied as raw memory. Only plain memory may be
copied so, and a batch that would be refused alone must be refused here, too. Both the first and
later batches of a size are tested, and also a torch that cannot compare the properties of tensors.
"""

from __future__ import annotations

import itertools
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import MemmapStorage, RowsMismatch
from tallyroll.storage.compat import tensor_guards
from tallyroll.storage.engine import columns
from tallyroll.storage.engine.columns import Columns
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows import batch_check
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.stores.input_rows import InputRows

BATCHES = 4
"""The second batch is the first copied by address, or the third if no file exists yet."""
ROWS = 5
WIDE = 9000
"""Bytes per row that exceed a small copy."""


@pytest.fixture(autouse=True, params=["looks", "no looks"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether torch offers to compare the properties of tensors."""
    there: bool = request.param == "looks"
    if not there:
        monkeypatch.setattr("tallyroll.storage.rows.batch_check.TensorGuards", None)
    return there


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[MemmapStorage]:
    with MemmapStorage(tmp_path / "rows") as storage:
        yield storage


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call the slow path is an error."""

    def slow(self: InputRows, rows: Any, without: Any = None) -> Any:
        raise AssertionError("the longer way")

    return lambda: monkeypatch.setattr(InputRows, "_converted", slow)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random bits, including NaNs with payloads and negative zeros, and both booleans."""
    chance = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(chance.integers(2, size=shape).astype(bool))
    content = chance.integers(256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    values = tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return bytes(values.numpy(force=True))


def stored(storage: MemmapStorage, key: str, start: int, stop: int) -> bytes:
    return storage.column(key)[start:stop].tobytes()


@pytest.mark.parametrize("count", [1, ROWS, 700])
def test_every_dtype_arrives_bit_for_bit(storage: MemmapStorage, count: int) -> None:
    columns = {str(dtype).removeprefix("torch."): dtype for dtype in NUMPY}
    batches = [
        TensorDict(
            {
                name: {
                    "narrow": random_bits(dtype, (count,), seed),
                    "deep": random_bits(dtype, (count, 2, 3), seed + 100),
                    "wide": random_bits(dtype, (count, 160 // dtype.itemsize), seed + 200),
                }
                for name, dtype in columns.items()
            },
            [count],
        )
        for seed in range(BATCHES)
    ]
    for batch in batches:
        storage.extend(batch)
    for name in columns:
        for inner in ("narrow", "deep", "wide"):
            column = storage.column((name, inner)).tobytes()
            assert column == b"".join(bits(batch[name, inner]) for batch in batches)


KEYS = [("x",), ("n", "a"), ("n", "b"), ("m", "c", "d"), ("m", "y")]


@pytest.mark.parametrize("keys", list(itertools.permutations(KEYS))[::7])
def test_columns_in_any_order(storage: MemmapStorage, keys: tuple[tuple[str, ...], ...]) -> None:
    """The first batch sets the order of the schema. Later tensors come level by level."""
    for number in range(BATCHES):
        rows = {key: base(10 * number + place) for place, key in enumerate(sorted(keys))}
        if number:
            batch = TensorDict({}, [ROWS])
            for key in sorted(keys, key=lambda key: (len(key), key)):
                batch[key] = rows[key]
            storage.extend(batch)
        else:
            storage.extend({key: rows[key].numpy() for key in keys})
        for key in keys:
            assert storage.column(key)[-ROWS:].tobytes() == bits(rows[key])
    assert storage.schema.keys == keys


def test_nothing_of_another_size_is_left(storage: MemmapStorage) -> None:
    sizes = [3, 3, 3, 0, 0, 0, 1, 1, 3, 3, 2, 2, 0, 2]
    given = [torch.randn(size, 4) for size in sizes]
    for rows in given:
        storage.extend(TensorDict({"x": rows}, [len(rows)]))
    assert storage.head == sum(sizes)
    np.testing.assert_array_equal(storage.column("x"), torch.cat(given).numpy())


def test_two_storages_have_nothing_in_common(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "a") as one, MemmapStorage(tmp_path / "b") as other:
        for number in range(BATCHES):
            one.extend(TensorDict({"x": torch.full((ROWS,), number)}, [ROWS]))
            other.extend(TensorDict({"x": torch.full((ROWS,), -number)}, [ROWS]))
        np.testing.assert_array_equal(one.column("x"), -other.column("x"))
        assert one.column("x").tolist() == np.repeat(range(BATCHES), ROWS).tolist()


def test_a_ring_takes_a_batch_in_two_pieces(tmp_path: Path) -> None:
    given = torch.arange(28).reshape(4, 7)
    with MemmapStorage(tmp_path / "ring", max_size=10) as ring:
        for rows in given:
            ring.extend(TensorDict({"x": rows}, [7]))
        numbers = np.array(ring.span)
        assert ring.column("x")[ring.slots_of(numbers)].tolist() == list(range(18, 28))


# --- tensors of every kind ------------------------------------------------------------------------


def base(number: int) -> torch.Tensor:
    return torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4) + 100 * number


def tracked(number: int) -> torch.Tensor:
    return base(number).requires_grad_()


def computed(number: int) -> torch.Tensor:
    return tracked(number) * 2


def in_inference_mode(number: int) -> torch.Tensor:
    with torch.inference_mode():
        return base(number) + 1


def on_disk(number: int) -> torch.Tensor:
    return MemoryMappedTensor.from_tensor(base(number))


QUICK: dict[str, Callable[[int], torch.Tensor]] = {
    "plain": base,
    "transposed": lambda number: base(number).T.contiguous().T,
    "every second": lambda number: base(number).repeat_interleave(2, 1)[:, ::2],
    "one row expanded": lambda number: base(number)[:1].expand(ROWS, 4),
    "one value expanded": lambda number: torch.tensor(float(number)).expand(ROWS, 4),
    "a part": lambda number: torch.cat([base(9), base(number)])[ROWS:],
    "of inference mode": in_inference_mode,
    "detached": lambda number: computed(number).detach(),
    "on disk": on_disk,
    "bfloat16": lambda number: base(number).bfloat16(),
}
LONGER: dict[str, Callable[[int], torch.Tensor]] = {
    "tracked": tracked,
    "computed": computed,
    "a parameter": lambda number: torch.nn.Parameter(base(number)),
    "a conjugate": lambda number: torch.complex(base(number), base(number)).conj(),
    "a negative view": lambda number: torch.complex(base(number), base(number)).conj().imag,
    "zeros without memory": lambda number: torch._efficientzerotensor((ROWS, 4)),
}


def extend_and_compare(storage: MemmapStorage, make: Callable[[int], torch.Tensor]) -> None:
    for number in range(1, BATCHES):
        leaf = make(number)
        start = storage.head
        storage.extend(TensorDict({"x": leaf}, [ROWS]))
        assert stored(storage, "x", start, start + ROWS) == bits(leaf.detach())


@pytest.mark.parametrize("kind", QUICK)
def test_tensors_of_every_kind_arrive_quickly(
    storage: MemmapStorage, quick: Callable[[], None], kind: str
) -> None:
    plain = QUICK[kind](0).resolve_conj().resolve_neg().clone()
    for _ in range(2):
        storage.extend(TensorDict({"x": plain}, [ROWS]))
    quick()
    extend_and_compare(storage, QUICK[kind])


@pytest.mark.parametrize("kind", QUICK | LONGER)
def test_tensors_of_every_kind_arrive(storage: MemmapStorage, kind: str) -> None:
    extend_and_compare(storage, (QUICK | LONGER)[kind])


@pytest.mark.parametrize("wide", [False, True])
def test_inference_mode_and_others_take_turns(
    storage: MemmapStorage, quick: Callable[[], None], wide: bool
) -> None:
    width = WIDE if wide else 3

    def extend(number: int) -> None:
        storage.extend(TensorDict({"x": torch.full((ROWS, width), number)}, [ROWS]))

    with torch.inference_mode():
        for number in range(3):  # fills the cache that later batches use
            extend(number)
    quick()
    extend(3)
    with torch.inference_mode():
        extend(4)
    with torch.no_grad():
        extend(5)
    assert storage.column("x")[:, 0].tolist() == np.repeat(range(6), ROWS).tolist()


def test_an_index_that_a_writer_added_costs_no_longer_way(
    tmp_path: Path, quick: Callable[[], None]
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        replay = TensorDictReplayBuffer(storage=storage, batch_size=2)
        for number in range(3):
            replay.extend(TensorDict({"x": base(number)}, [ROWS]))
        quick()
        replay.extend(TensorDict({"x": base(3)}, [ROWS]))
        assert storage.column("x").tobytes() == bits(torch.cat([base(n) for n in range(4)]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised in torch itself
def test_autograd_follows_nothing_into_the_storage(
    storage: MemmapStorage, quick: Callable[[], None]
) -> None:
    for make in (base, base, base, tracked, computed):
        storage.extend(TensorDict({"x": make(1)}, [ROWS]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(base(2), base(3))
        storage.extend(TensorDict({"x": dual}, [ROWS]))
    quick()
    storage.extend(TensorDict({"x": base(4)}, [ROWS]))
    assert storage.column("x")[-2 * ROWS :].tobytes() == bits(torch.cat([base(2), base(4)]))


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    kind: make for kind, make in (QUICK | LONGER).items() if make(0).dtype is torch.float32
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=12))
def test_tensors_of_all_kinds_take_turns(tmp_path: Path, kinds: list[str]) -> None:
    shutil.rmtree(tmp_path / "turns", ignore_errors=True)
    with MemmapStorage(tmp_path / "turns") as storage:
        for number, kind in enumerate(kinds):
            leaf = KINDS[kind](number)
            storage.extend(TensorDict({"x": leaf, "n": {"y": base(-number)}}, [ROWS]))
            start = number * ROWS
            assert stored(storage, "x", start, start + ROWS) == bits(leaf.detach())
            assert storage.column(("n", "y"))[start:].tobytes() == bits(base(-number))


@pytest.mark.parametrize("count", [1, ROWS, 3000])
def test_batches_that_look_alike_are_copied_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: bool, count: int
) -> None:
    """Rows go through the map in small batches.

    In a full ring, they do so in all batches.
    """
    copies = []

    def copy_memory(self: Columns, slot: int, count: int, addresses: Any) -> None:
        copies.append((slot, count))
        copied(self, slot, count, addresses)

    copied = Columns.copy_memory
    monkeypatch.setattr(Columns, "copy_memory", copy_memory)
    given = [torch.randn(count, 4) for _ in range(7)]
    with MemmapStorage(tmp_path / "ring", max_size=3 * count) as ring:
        for rows in given:
            ring.extend(TensorDict({"x": rows}, [count]))
        np.testing.assert_array_equal(
            ring.column("x"), torch.cat([given[6], given[4], given[5]]).numpy()
        )
    # The first batch is inspected.
    small = [(count * slot, count) for slot in (1, 2, 0, 1, 2, 0)]
    assert copies == ([] if not compared else small if count < 3000 else small[2:])


def test_nothing_of_a_batch_is_held_on_to(storage: MemmapStorage) -> None:
    for number in range(BATCHES):
        leaf = base(number)
        gone = weakref.ref(leaf)
        storage.extend(TensorDict({"x": leaf}, [ROWS]))
        del leaf
        assert gone() is None


class Alike:
    """Guard that accepts all tensors."""

    said = True

    def __init__(self, *leaves: torch.Tensor, **dynamic: Any) -> None:
        pass

    def check(self, *leaves: torch.Tensor) -> bool:
        return self.said


class Unlike(Alike):
    said = False


class Renamed:
    def __init__(self, *leaves: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("other", [Alike, Unlike, Renamed, None])
def test_a_torch_that_compares_otherwise_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    module = torch._C._dynamo.guards
    assert tensor_guards() is module.TensorGuards
    if other is None:
        monkeypatch.delattr(module, "TensorGuards")
    else:
        monkeypatch.setattr(module, "TensorGuards", other)
    assert tensor_guards() is None


# --- batches that do not match --------------------------------------------------------------------


def without_memory() -> torch.Tensor:
    leaf = torch.zeros(ROWS, 4)
    leaf.untyped_storage().resize_(0)
    return leaf


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(ROWS, 4)


UNFIT: dict[str, Callable[[], Any]] = {
    "one for all": lambda: torch.zeros(ROWS, 1),
    "an axis more": lambda: torch.zeros(ROWS, 1, 4),
    "an axis less": lambda: torch.zeros(ROWS),
    "narrower": lambda: torch.zeros(ROWS, 3),
    "float64": lambda: torch.zeros(ROWS, 4, dtype=torch.float64),
    "float16": lambda: torch.zeros(ROWS, 4, dtype=torch.float16),
    "int32": lambda: torch.zeros(ROWS, 4, dtype=torch.int32),
    "bool": lambda: torch.zeros(ROWS, 4, dtype=torch.bool),
    "sparse": lambda: torch.zeros(ROWS, 4).to_sparse(),
    "without values": lambda: torch.zeros(ROWS, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4)] * ROWS),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(4)] * ROWS, layout=torch.jagged),
    "without memory": without_memory,
    "functional": lambda: torch._to_functional_tensor(torch.zeros(ROWS, 4)),
    "fake": fake,
    "float8": lambda: torch.zeros(ROWS, 4).to(torch.float8_e4m3fn),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(ROWS, 4), 0.1, 0, torch.qint8),
    "a group": lambda: TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS, 4]),
    "text": lambda: "text",
}


@pytest.mark.parametrize(
    ("what", "before", "compared"),
    [
        (what, before, ("looks", "no looks")[(turn + before) % 2])
        for turn, what in enumerate(UNFIT)
        for before in range(BATCHES)
    ],
    indirect=["compared"],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested", "ignore:.*quantize")
def test_values_that_do_not_fit_are_refused_in_every_batch(
    storage: MemmapStorage, what: str, before: int
) -> None:
    def good(number: int) -> TensorDict:
        return TensorDict({"x": base(number), "y": {"z": torch.ones(ROWS)}}, [ROWS])

    storage.extend(good(0)[:2])
    for number in range(before):
        storage.extend(good(number))
    head, batch = storage.head, good(0)
    batch["x"] = UNFIT[what]()
    with pytest.raises(RowsMismatch):
        storage.extend(batch)
    assert storage.head == head
    storage.extend(good(7))
    assert stored(storage, "x", head, head + ROWS) == bits(base(7))


@pytest.mark.parametrize("before", range(BATCHES))
def test_a_batch_is_as_long_as_its_columns(storage: MemmapStorage, before: int) -> None:
    """Tensordict checks the length if tensors are set one by one, but not everywhere."""
    for number in range(before):
        storage.extend(TensorDict({"x": base(number)}, [ROWS]))
    for count in (0, 1, ROWS - 1, ROWS + 1):
        wrong = TensorDict._new_unsafe(source={"x": base(0)}, batch_size=torch.Size([count]))
        with pytest.raises(RowsMismatch, match=f"the {count} rows of the batch"):
            storage.extend(wrong)
    lazy = TensorDict.lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (4, 3)])
    with pytest.raises((RowsMismatch, InvalidSchema), match="cannot be read as one batch"):
        storage.extend(lazy)
    storage.extend(TensorDict({"x": base(9)}, [ROWS]))
    assert storage.head == (before + 1) * ROWS


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("where", ["intake.TensorGuard", "columns.ctypes"])
def test_an_interrupt_leaves_nothing_half_prepared(
    storage: MemmapStorage, monkeypatch: pytest.MonkeyPatch, where: str, tensors: bool
) -> None:
    """The interrupt comes while a batch of another size is inspected."""

    def extend(number: int, count: int) -> None:
        rows = base(number)[:count]
        storage.extend(TensorDict({"x": rows}, [count]) if tensors else {("x",): rows.numpy()})

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for number in range(3):
        extend(number, ROWS)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        if where == "intake.TensorGuard":
            patch.setattr(batch_check, "TensorGuard", interrupt)
        else:
            patch.setattr(columns.ctypes, "c_size_t", interrupt)
        for _ in range(2):
            extend(3, 2)
    start = storage.head
    for number in range(4, 7):
        extend(number, ROWS)
        extend(number, 2)
    wanted = torch.cat([base(n)[:c] for n in range(4, 7) for c in (ROWS, 2)])
    assert stored(storage, "x", start, storage.head) == bits(wanted)


@pytest.mark.parametrize("before", range(BATCHES))
def test_a_column_of_one_takes_no_plain_one(storage: MemmapStorage, before: int) -> None:
    for _ in range(before + 1):
        storage.extend(TensorDict({"x": torch.zeros(1, 1)}, [1]))
    with pytest.raises(RowsMismatch, match=r"x has float32, shape \[1\], expected .* \[1, 1\]"):
        storage.extend(TensorDict({"x": torch.zeros(1)}, [1]))
    assert storage.head == before + 1


@pytest.mark.parametrize("before", range(BATCHES))
def test_a_column_too_many_or_too_few_is_refused(storage: MemmapStorage, before: int) -> None:
    for _ in range(before + 1):
        storage.extend(TensorDict({"a": {"x": base(0), "y": base(1)}}, [ROWS]))
    more = TensorDict({"a": {"x": base(0), "y": base(1), "z": base(2)}}, [ROWS])
    fewer = TensorDict({"a": {"x": base(0)}}, [ROWS])
    other = TensorDict({"a": {"x": base(0), "z": base(1)}}, [ROWS])
    for batch in (more, fewer, other):
        with pytest.raises(RowsMismatch):
            storage.extend(batch)
    assert storage.head == (before + 1) * ROWS


def test_batches_that_are_views_of_others(storage: MemmapStorage) -> None:
    """Batches may be lazy stacks, locked, or memory-mapped."""
    whole = TensorDict({"x": base(0), "y": {"z": base(1)}}, [ROWS])
    lazy = TensorDict.lazy_stack([whole[i] for i in range(ROWS)])
    makers = [whole, whole.clone().lock_(), lazy, whole.memmap(), whole.view(-1), whole.flatten()]
    for each in makers * 2:
        storage.extend(each)
    for key, number in (("x", 0), (("y", "z"), 1)):
        assert storage.column(key).tobytes() == bits(base(number)) * 2 * len(makers)
