"""Checkpoint files hold plain values, survive kills, report damage and execute nothing."""

from __future__ import annotations

import collections
import datetime
import decimal
import errno
import fractions
import io
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, ObservationNorm, TransformedEnv

from tallyroll.collector import SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.collector.errors import ArgumentError, LedgerError, StateError
from tallyroll.collector.ext.checkpoints import folder
from tallyroll.collector.ext.checkpoints.plain import from_plain, to_plain
from tallyroll.storage import MemmapStorage
from tallyroll.storage.errors import StorageError, StorageFull
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.files.manifest import sealed

from hostile_kit import in_a_child
from killed_storages_kit import Told, forked, in_a_process, lines_of, oracle

KILLS = int(os.environ.get("TALLYROLL_KILLS", "50"))

FORMAT_1 = Path(__file__).parent / "format_1"
RECORD = np.dtype([("a", "i1"), ("b", ">f8", (2,)), ("c", "<U3")], align=True)
SHARED = torch.arange(12.0).reshape(3, 4)
numbers = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**5000, -(2**64), 2**63, -(2**63)])
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from([0.0, -0.0, torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 1])])
)
dtypes = st.sampled_from(
    [
        "?",
        "b",
        "H",
        "l",
        "q",
        ">i4",
        "e",
        "d",
        "g",
        "F",
        ">c16",
        "M8[25s]",
        ">m8[ns]",
        "U2",
        "S3",
        "V2",
    ]
).map(np.dtype) | st.just(RECORD)
scalars = dtypes.map(lambda dtype: np.ndarray(2, dtype, b"A\0\0\0" * 32)[1])
scalars |= st.sampled_from([np.str_("a\0"), np.bytes_(b"a\0"), np.longlong(3), np.float64(-0.0)])
keys = st.recursive(
    numbers | scalars.filter(lambda each: each.dtype.kind != "V") | st.just("tallyroll"),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = draw(dtypes), draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind in "U?" or dtype.names:  # arbitrary bytes are not valid here
        raw = bytearray(size)
    array = np.ndarray(shape, dtype, raw)
    return draw(
        st.sampled_from(
            [array, array.T, array[::2], np.asfortranarray(array)] if shape else [array]
        )
    )


TENSORS = [
    change(torch.arange(6).reshape(2, 3).to(dtype))
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.uint16, torch.bool)
    for change in (
        lambda each: each,
        lambda each: each.T,
        lambda each: each[:, ::2],
        lambda each: each[:0],
        lambda each: each[:1].expand(4, 3),
        lambda each: torch.nn.Parameter(each, requires_grad=False),
        lambda each: each.conj(),
    )
]
TENSORS += [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]
TENSORS += [torch.eye(3).to_sparse(), SHARED, SHARED[1], SHARED.T]


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        items = st.dictionaries(keys, inner, max_size=3)
        return (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | items
            | items.map(collections.OrderedDict)
            | items.map(partial(collections.defaultdict, list))
            | items.map(lambda each: collections.Counter(each))
            | st.lists(inner, max_size=3).map(partial(collections.deque, maxlen=4))
            | st.sampled_from(["array", "mapping", "dict", "Tensor", "deque", 3]).flatmap(
                lambda kind: inner.map(lambda each: {"tallyroll": kind, "values": each})
            )
        )

    return st.recursive(leaf, around, max_leaves=8)


leaves = (
    numbers
    | scalars
    | arrays()
    | st.binary(max_size=9).map(bytearray)
    | st.sets(keys, max_size=3)
    | st.frozensets(keys, max_size=3)
    | st.sampled_from(TENSORS)
)


def said(value: Any) -> Any:
    """Return everything in a value that == can compare, with the types of all its parts."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, np.array(value).tobytes()
    if isinstance(value, torch.Tensor):
        plain = value.detach().to_dense().resolve_conj().contiguous()
        octets = plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []
        strides = value.stride() if value.layout == torch.strided else None
        of = (value.dtype, value.shape, strides, value.requires_grad, value.layout)
        return kind, of, octets
    if isinstance(value, (np.str_, np.bytes_)):
        return kind, "".join(value) if kind is np.str_ else b"".join([value])
    if isinstance(value, (np.ndarray, np.generic)):
        dtype = value.dtype
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        padded = dtype.names or dtype.char in "gG"  # has padding bytes, which carry no value
        of = str(value.tolist()) if padded else value.tobytes()
        return kind, (dtype, dtype.char, str(dtype), value.shape, order), of
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        items = [(said(key), said(each)) for key, each in value.items()]
        return kind, factory, items, said(getattr(value, "__dict__", None))
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, map(said, value)))
    if isinstance(value, (list, tuple, collections.deque)):
        return kind, getattr(value, "maxlen", None), list(map(said, value))
    return kind, value


slow = settings(suppress_health_check=[HealthCheck.too_slow])


@slow
@given(nested(leaves))
def test_values_come_back_equal_and_of_their_types(value: Any) -> None:
    file = io.BytesIO()
    torch.save(to_plain(value, "value"), file)
    file.seek(0)
    assert said(from_plain(torch.load(file, weights_only=True))) == said(value)


@settings(slow, max_examples=20)
@given(nested(leaves))
def test_parts_come_back_equal_and_of_their_types(value: Any) -> None:
    class Part:
        def state_dict(self) -> Any:
            return {"deep": value}

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    with tempfile.TemporaryDirectory() as base:
        save_checkpoint(base, value=value, part=(part := Part()))
        loaded = load_checkpoint(base, part=part)
    assert said(loaded.values["value"]) == said(value)
    assert said(part.state) == said({"deep": value})


def test_what_is_shared_stays_shared() -> None:
    part, base = [1], torch.zeros(4)
    value = {"one": part, "other": (part, [part]), "base": base, "view": base[1:3]}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, value=value)
        found = load_checkpoint(folder).values["value"]
    found["one"].append(2)
    found["base"][1] = 5
    assert found["other"] == ([1, 2], [[1, 2]])
    assert found["view"].tolist() == [5, 0]


def test_a_checkpoint_of_format_1_loads() -> None:
    """Values have the types that format 1 preserved.

    It saved NumPy scalars as numbers, for example.
    """

    class Rms:
        def load_state_dict(self, state: Any) -> None:
            self.state = state

        state_dict = None

    rms, net = Rms(), torch.nn.Linear(2, 2)
    rms.state_dict = dict  # type: ignore[assignment]
    numpy_rng, python_rng = np.random.default_rng(0), random.Random(0)
    loaded = load_checkpoint(
        FORMAT_1,
        net=net,
        optimizer=torch.optim.Adam(net.parameters()),
        rms=rms,
        numpy_rng=numpy_rng,
        python_rng=python_rng,
        torch_rng=torch.Generator(),
    )
    assert numpy_rng.random() == np.random.default_rng(5).random()
    assert python_rng.random() == random.Random(3).random()
    mean = np.arange(3.0)
    state = {"mean": mean, "count": 4, "tag": b"x", "alike": {"tallyroll": "array"}}
    assert said(rms.state) == said(state)
    assert said(dict(sorted(loaded.values.items()))) == said(
        {
            "alike": {"tallyroll": "array", "values": 3},
            "array": np.arange(3, dtype=np.uint16),
            "big": 2**80,
            "complex": 1j,
            "content": b"ab",
            "dtype": torch.float32,
            "nested": {"a": [np.arange(2.0), b"c", (1, {"tallyroll": "mapping"})], 3: True},
            "nothing": None,
            "number": 3,
            "tallyroll": {"tallyroll": 1},
            "tensor": torch.arange(3),
            "text": "a",
        }
    )


def test_a_run_goes_on_from_a_checkpoint_of_format_1() -> None:
    with SyncCollector(
        "CartPole-v1",
        TensorDictModule(Greedy(), ["observation"], ["action"]),
        num_envs=2,
        frames_per_batch=10,
        total_frames=100,
        seed=1,
    ) as collector:
        load_checkpoint(FORMAT_1, collector=collector)
        assert collector.ledger.stored == 10
        assert sum(map(len, collector)) == 90


class Greedy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


class Danger:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


class Text(str): ...


Pair = collections.namedtuple("Pair", "a b")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(3000):
    DEEP = [DEEP]
REFUSED = [
    Danger(),
    {Danger(): 1},
    len,
    range(3),
    slice(2),
    Pair(1, 2),
    Text("a"),
    pathlib.Path("x"),
    datetime.datetime(2026, 1, 1),
    decimal.Decimal("0.1"),
    fractions.Fraction(1, 3),
    signal.SIGTERM,
    collections.UserDict(a=1),
    types.MappingProxyType({}),
    collections.defaultdict(lambda: 0),
    collections.defaultdict(Danger),
    memoryview(b"a"),
    np.array([None]),
    np.array(["a"], np.dtypes.StringDType()),
    np.zeros(2, np.dtype([("a", "O")])),
    np.zeros(2, np.dtype("f4", metadata={"unit": "m"})),
    np.ma.masked_array([1, 2], [True, False]),
    np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    np.dtype("f4"),
    {torch.ones(2)},
    torch.ones(2, device="meta"),
    torch.ones(2).as_subclass(type("Ours", (torch.Tensor,), {})),
    MemoryMappedTensor.from_tensor(torch.ones(2)),
    torch.ones(2).to_mkldnn(),
    CYCLE,
    {"a": (CYCLE,)},
    DEEP,
]


def listed(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_come_back_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> Any:
            return {"deep": [1, value]}

        def load_state_dict(self, state: Any) -> None: ...

    save_checkpoint(tmp_path / "c", number=1)
    before = listed(tmp_path)
    mapped = isinstance(value, MemoryMappedTensor)  # the state of a TorchRL buffer has them
    if not mapped:
        with pytest.raises(StateError, match=r"thing\['deep'\]\[1\].*: expected "):
            save_checkpoint(tmp_path / "c", thing=Part())
    with pytest.raises(ArgumentError, match=r"thing: expected an object with state_dict"):
        save_checkpoint(tmp_path / "c", thing=value)
    with pytest.raises(ArgumentError, match=r"thing\[\(1, 'a'\)\]\[0\].*: expected "):
        save_checkpoint(tmp_path / "c", other=3, thing={"k": 1, (1, "a"): [value]})
    assert listed(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["path", "collector", "storage", "every", "keep_last", "copy_rows", "rows"]
)
@pytest.mark.parametrize("value", [np.arange(3), "text", {"a": 1}, torch.nn.Linear(1, 1)])
def test_names_of_arguments_are_no_names_of_parts(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: "):
        save_checkpoint(tmp_path / "c", **{name: value})
    assert not (tmp_path / "c").exists()
    save_checkpoint(path=tmp_path / "c", tallyroll=1, self=2, parts=3, state=4, name=5)
    if name in ("path", "collector", "storage", "rows"):
        with pytest.raises(ArgumentError, match=f"{name}: "):
            load_checkpoint(tmp_path / "c", **{name: value})
    found = load_checkpoint(path=tmp_path / "c").values
    assert found == {"tallyroll": 1, "self": 2, "parts": 3, "state": 4, "name": 5}


def test_generators_and_modules_are_parts(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        parts = {
            "torch_rng": torch.Generator().manual_seed(seed),
            "numpy_rng": np.random.default_rng(seed),
            "python_rng": random.Random(seed),
            "net": torch.nn.Linear(3, 2),
        }
        parts["adam"] = torch.optim.Adam(parts["net"].parameters())
        parts["net"](torch.ones(3)).sum().backward()
        parts["adam"].step()
        return parts

    def drawn(parts: dict[str, Any]) -> list[Any]:
        return [
            float(torch.rand((), generator=parts["torch_rng"])),
            parts["numpy_rng"].random(),
            parts["python_rng"].random(),
            parts["net"].weight.tolist(),
            parts["adam"].state_dict()["state"][0]["exp_avg"].tolist(),
        ]

    one, other = made(1), made(2)
    save_checkpoint(tmp_path / "c", **one, best=np.float64(2.5))
    loaded = load_checkpoint(tmp_path / "c", **other)
    assert drawn(one) == drawn(other)
    assert loaded.values == {"best": 2.5}
    loaded = load_checkpoint(tmp_path / "c", net=other["net"])
    assert loaded.unused == ("adam", "numpy_rng", "python_rng", "torch_rng")
    with pytest.raises(StateError, match="net: expected a state_dict, as in the checkpoint, got"):
        load_checkpoint(tmp_path / "c", net=torch.Generator())


# --- files ----------------------------------------------------------------------------------------


def damaged(path: Path, how: str, tmp_path: Path) -> None:
    state, about = path / "state.pt", path / "checkpoint.json"
    if how == "bit":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 4
        state.write_bytes(content)
    elif how == "short":
        state.write_bytes(state.read_bytes()[:-9])
    elif how == "gone":
        state.unlink()
    elif how == "link":
        shutil.move(state, tmp_path / "elsewhere")
        state.symlink_to(tmp_path / "elsewhere")
    elif how == "json":
        about.write_text("{")
    elif how == "other":
        about.write_text('{"format": "theirs"}')
    elif how == "newer":
        about.write_text(json.dumps({**json.loads(about.read_text()), "version": 9}))
    elif how == "code":
        torch.save({"parts": Danger()}, state)
        found = {"nbytes": state.stat().st_size, "sha256": folder._sha256(state)}
        found = {**json.loads(about.read_text()), **found}
        about.write_text(
            json.dumps(sealed({name: found[name] for name in found if name != "crc32"}))
        )
    elif how == "digit":
        found = about.read_text().replace('"transitions": 0', '"transitions": 1')
        assert found != about.read_text()
        about.write_text(found)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("bit", "state.pt does not match its checksum"),
        ("short", r"expected \d+ bytes in state.pt, got"),
        ("gone", "state.pt is missing"),
        ("link", "link"),
        ("json", "is not valid JSON"),
        ("other", "another program wrote"),
        ("newer", "of version 9"),
        ("digit", "checkpoint.json does not match its checksum"),
        ("code", "cannot be read"),
    ],
)
def test_damage_is_told(how: str, match: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c", net=net, keep_last=None)
    path = save_checkpoint(tmp_path / "c", net=net, keep_last=None)
    assert path is not None
    before = net.weight.tolist()
    damaged(path, how, tmp_path)
    with pytest.raises((StateError, StorageError), match=match):
        load_checkpoint(tmp_path / "c", net=net)
    assert net.weight.tolist() == before
    load_checkpoint(tmp_path / "c" / "000001-at-0", net=net)


MISSING = object()

IMPOSSIBLE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "NumPy's generator": (("generators", "numpy", 2), 2**30),
    "a part's MT19937": (("parts", 0, 2, "state", "pos"), -(2**30)),
    "a part's Philox": (("parts", 1, 2, "buffer_pos"), -(2**30)),
    "Python's generator": (("generators", "python", 1), (1,) * 624 + (2**26,)),
    "torch's generator": (("generators", "torch"), torch.zeros(7, dtype=torch.uint8)),
    "slots of actions": (("collector", "generators", "actions", "taken"), 2**40),
    "a count": (("collector", "ledger", "slots"), float("nan")),
    "a large count": (("collector", "ledger", "slots"), 2**62),
    "the next id": (("collector", "next_id"), 2**63 - 1),
    "the seed": (("collector", "seed"), -1),
    "open trajectories": (("collector", "open"), 1.5),
    "lanes": (("collector", "lanes"), torch.zeros(2)),
    "a shard": (("collector", "shard"), 1),
}


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of `value` with another value at `place`."""
    if not place:
        return new
    items = value.copy() if isinstance(value, dict) else list(value)
    if place[1:] or new is not MISSING:
        items[place[0]] = replaced(items[place[0]], place[1:], new)
    else:
        del items[place[0]]
    return tuple(items) if isinstance(value, tuple) else items


def put_state(path: Path, state: Any) -> None:
    """Replace the state in a checkpoint and update its checksums."""
    torch.save(state, path / folder.STATE)
    found = json.loads((path / folder.ABOUT).read_text())
    found |= {"nbytes": (path / folder.STATE).stat().st_size}
    found |= {"sha256": folder._sha256(path / folder.STATE)}
    found.pop("crc32")
    (path / folder.ABOUT).write_text(json.dumps(sealed(found)))


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_nothing_can_go_on_from(name: str, tmp_path: Path) -> None:
    """With these numbers, generators would read out of bounds or draw 2**40 times.

    Rows are kept.
    """
    with MemmapStorage(tmp_path / "rows") as storage:
        options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 20, "total_frames": 80}
        collector = SyncCollector("CartPole-v1", seed=0, storage=storage, **options)
        next(iter(collector))
        parts = {
            kind.__name__: np.random.Generator(kind(1))
            for kind in (np.random.MT19937, np.random.Philox)
        }
        path = save_checkpoint(tmp_path / "saved", collector=collector, **parts)
        assert path is not None
        next(iter(collector))
        collector.shutdown()
    state = torch.load(path / folder.STATE, weights_only=True)
    put_state(path, replaced(state, *IMPOSSIBLE[name]))

    def load() -> int:
        with MemmapStorage(tmp_path / "rows", mode="append") as storage:
            collector = SyncCollector(
                "CartPole-v1", seed=0, storage=storage, resume=True, **options
            )
            with pytest.raises((StateError, LedgerError)):
                load_checkpoint(path, collector=collector, **parts)
            head: int = storage.head
            collector.shutdown()
        return head

    assert in_a_child(load, seconds=60) == 40


def collector_over(storage: MemmapStorage, several: bool, **options: Any) -> SyncCollector:
    """Return a collector of two policies, or of one policy and an environment with a state."""
    torch.manual_seed(3)
    policies: Any = [([0], Chooser()), ([1], Chooser())]
    return SyncCollector(
        "CartPole-v1" if several else normalised,
        policies if several else Chooser(),
        num_envs=2 if several else None,
        frames_per_batch=20,
        total_frames=80,
        seed=0,
        storage=storage,
        **options,
    )


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def normalised() -> TransformedEnv:
    return TransformedEnv(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
    )


PLACES: dict[str, list[tuple[Any, ...]]] = {
    "env": [(), ("items",), ("items", 0), ("items", 1), ("keys", 0)],
    "policy": [(), ("version",), ("weights",), ("weights", "items", 0), ("weights", "keys", 1)],
    "several": [
        *[(each,) for each in ("parts", "ids", "versions", "openings", "version")],
        *[("parts", 0, *each) for each in ((), ("version",), ("weights",))],
        *[(each, 0) for each in ("versions", "openings", "ids")],
    ],
    "rest": [
        *[(each,) for each in ("ledger", "next_id", "open", "generators", "policy")],
        *[("generators", each) for each in ("torch", "actions")],
    ],
    "generators": [("policies",), ("policies", 0), ("policies", 0, "actions")],
}
OTHERS = (None, [], "x", -7, {}, torch.zeros(3, 3), MISSING)


@pytest.mark.parametrize("kind", PLACES)
def test_states_of_another_shape_change_nothing(kind: str, tmp_path: Path) -> None:
    """The collector refuses states that cannot be loaded before it rewinds any rows."""
    several = kind in ("several", "generators")
    with MemmapStorage(tmp_path / "rows") as storage:
        collector = collector_over(storage, several)
        batches = iter(collector)
        next(batches)
        path = save_checkpoint(tmp_path / "saved", collector=collector)
        assert path is not None
        next(batches)
        collector.shutdown()
    state = torch.load(path / folder.STATE, weights_only=True)
    part = {"several": ("policy",), "rest": ()}.get(kind, (kind,))
    with MemmapStorage(tmp_path / "rows", mode="append") as storage:
        collector = collector_over(storage, several, resume=True)
        before = repr(collector.state_dict())
        for place in PLACES[kind]:
            for value in OTHERS:
                put_state(path, replaced(state, ("collector", *part, *place), value))
                with pytest.raises((StateError, LedgerError)):
                    load_checkpoint(path, collector=collector)
                assert storage.head == 40
                assert repr(collector.state_dict()) == before
        put_state(path, state)
        load_checkpoint(path, collector=collector)
        assert storage.head == 20
        collector.shutdown()


def test_where_nothing_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StateError, match="holds no checkpoint"):
            load_checkpoint(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        save_checkpoint(tmp_path / "file")
    for wrong in ({"every": 0}, {"keep_last": 0}, {"copy_rows": True}, {"collector": 3}):
        with pytest.raises(ArgumentError):
            save_checkpoint(tmp_path / "c", **wrong)  # type: ignore[arg-type]


def test_a_full_disk_leaves_the_ones_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = torch.nn.Linear(2, 2)
    first = save_checkpoint(tmp_path / "c", net=net)
    before = net.weight.tolist()
    with torch.no_grad():
        net.weight += 1

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            save_checkpoint(tmp_path / "c", net=net)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "000001-at-0"]
    assert first == tmp_path / "c" / "000001-at-0"
    load_checkpoint(tmp_path / "c", net=net)
    assert net.weight.tolist() == before


@pytest.mark.parametrize("size", [0, 1, 2_000, 100_000, 399_000, 600_000])
def test_a_file_that_may_not_grow_so_large(size: int, tmp_path: Path) -> None:
    """The limit applies to each write in turn. torch reports it as a RuntimeError."""
    save_checkpoint(tmp_path / "c", number=1)
    before = listed(tmp_path)
    with file_size_limit(size):
        if size < 400_000:
            with pytest.raises(StorageFull, match=r"needs 4[0-9]{5} more bytes, which exceeds the"):
                save_checkpoint(tmp_path / "c", value=torch.zeros(100_000))
        else:
            save_checkpoint(tmp_path / "c", value=torch.zeros(100_000))
    if size < 400_000:
        assert listed(tmp_path) == before
        assert sorted(os.listdir(tmp_path / "c")) == [".lock", "000001-at-0"]
        assert load_checkpoint(tmp_path / "c").values == {"number": 1}


CALLS = ["mkdir", "open", "write", "close", "fsync", "rename", "json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("call", CALLS)
def test_any_call_of_the_system_may_fail(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "c", number=1)
    before = listed(tmp_path)

    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    class File:
        """File that fails in one call."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 3  # writes before one fails

        def write(self, content: Any) -> int:
            self.left -= call == "write"
            return fail() if call == "write" and self.left <= 0 else self.file.write(content)

        def close(self) -> None:
            self.file.close()
            if call == "close":
                fail()

    def opened(path: Path, mode: str = "r", **more: Any) -> Any:
        if mode != "xb":
            return open(path, mode, **more)
        return fail() if call == "open" else File(open(path, mode))

    with monkeypatch.context() as patched:
        patched.setattr(folder, "open", opened, raising=False)
        if call == "mkdir":
            make = Path.mkdir
            aside = folder._WRITING
            patched.setattr(
                Path,
                "mkdir",
                lambda path, *of, **more: fail() if aside in path.name else make(path, *of, **more),
            )
        if call == "fsync":
            patched.setattr(os, "fsync", fail)
        if call == "rename":
            patched.setattr(Path, "rename", fail)
        if call == "json":
            patched.setattr(Path, "write_text", fail)
        with pytest.raises(StorageError):
            save_checkpoint(tmp_path / "c", value=torch.zeros(100))
    assert listed(tmp_path) == before
    assert {*os.listdir(tmp_path / "c")} == {".lock", "000001-at-0"}
    assert load_checkpoint(tmp_path / "c").values == {"number": 1}


def test_two_processes_save_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "c", number=1)
    monkeypatch.setattr(folder, "_PATIENCE_SECONDS", 0.05)
    saving = pytest.raises(StateError, match="another process has been saving")
    with folder.locked(tmp_path / "c"), saving:
        save_checkpoint(tmp_path / "c", number=2)
    save_checkpoint(tmp_path / "c", number=2)
    assert load_checkpoint(tmp_path / "c").values == {"number": 2}


def save_often(path: Path, told: Told) -> None:
    """Save several checkpoints of committed rows, and report the newest one."""
    with MemmapStorage(path / "rows", mode="append") as storage:
        for _ in range(3):
            storage.extend(oracle(storage.head, 20))
            save_checkpoint(path / "c", storage=storage, head=storage.head, keep_last=2)
            told.head = storage.head


def kill_while_saving(base: Path, points: int, seed: int) -> list[int]:
    """Kill a saver at many lines, and return how many rows the newest checkpoint had each time."""
    (base / "start").mkdir()
    with MemmapStorage(base / "start" / "rows") as storage:
        storage.extend(oracle(0, 20))
        save_checkpoint(base / "start" / "c", storage=storage, head=20, keep_last=2)
    pick, found, total = random.Random(seed), [], 0
    for number in range(points + 1):
        work, told = base / "work", Told()
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base / "start", work)
        told.head = 20
        line = 0
        if number:  # one kill in each part of the run, so that few kills cover all of it
            first = 1 + (number - 1) * total // points
            line = pick.randrange(first, max(first, number * total // points) + 1)

        def act(work: Path = work, told: Told = told, line: int = line) -> None:
            told.lines = lines_of(lambda: save_often(work, told), line, folder.__file__)

        _, status = os.waitpid(forked(act), 0)
        assert status == 0 or (line and os.WIFSIGNALED(status)), status
        total = total or told.lines
        loaded = load_checkpoint(work / "c")
        head = loaded.values["head"]
        assert head in (told.head, told.head + 20), f"killed at line {line}"
        assert 1 <= len(folder.entries_of(work / "c")) <= 3
        with MemmapStorage(work / "rows", mode="append") as storage:
            assert load_checkpoint(work / "c", storage=storage).transitions == head
            assert storage.head == head
            save_checkpoint(work / "c", storage=storage, head=0, keep_last=2)
        left = sorted(os.listdir(work / "c"))
        assert [name for name in left if name.startswith(".")] == [".lock"]
        assert len(left) == 3
        found.append(head)
    return found


@pytest.mark.timeout(60 + 4 * KILLS)
def test_kill_9_while_saving_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    seed, points = random.randrange(2**32), max(10, KILLS // 5)
    found = in_a_process(kill_while_saving, tmp_path, points, seed, seconds=60 + 4 * KILLS)
    assert {20, 40, 60} <= {*found}
