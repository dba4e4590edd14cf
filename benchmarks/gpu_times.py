"""Sections of `gpu_check.py` that measure waits, bandwidth, rings and collectors."""

from __future__ import annotations

import shutil
import tempfile
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch
from common import Contender, Tally, interleave, print_results, ratio
from gpu_envs import ExactPolicy, TensorEnv
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase, GymWrapper

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensordict import TensorDictBase

ROUNDS = 5


def is_small(device: str) -> bool:
    """Return True for devices whose figures mean nothing, so that small sizes are enough."""
    return device in ("cpu", "fakegpu")


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device != "cpu":
        torch.accelerator.synchronize()


class TimedCall(Contender):
    """A contender that calls a function.

    Args:
        name: its name in tables.
        call: the function. The measured time ends when the device has finished.
        device: the device.
        rows: rows of one call.
        steps: vector steps of one call.
        close: called at the end.
    """

    def __init__(
        self, name: str, call: Callable[[], Any], device: str, rows: float, steps: float,
        close: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.call, self.device = name, call, device
        self.work, self.closed = Tally(rows, steps), close

    def make_ready(self) -> None:
        """Wait for earlier work."""
        synchronize(self.device)

    def advance(self) -> None:
        """Call the function, and wait for the device."""
        self.call()
        synchronize(self.device)

    def tally(self) -> Tally:
        """Return the work of one call."""
        return self.work

    def close(self) -> None:
        """Release what the contender holds."""
        if self.closed is not None:
            self.closed()


def compare(
    title: str, makes: dict[str, Callable[[], TimedCall]], seconds: float, units: tuple[str, str],
    optional: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Compare contenders with the first one, print a table, and return records.

    A contender that raises is left out. This is an error, unless its name is in ``optional``: peers
    may refuse a device.
    """
    left_out, errors = {}, {}
    with ExitStack() as stack:
        contenders: list[TimedCall] = []
        for name, make in makes.items():
            try:
                contender = make()
                stack.callback(contender.close)
                contender.advance()
            except Exception as error:
                if not contenders:
                    raise
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                (left_out if name in optional else errors)[name] = text
                print(f"  {name} is left out: {text}", flush=True)
            else:
                contender.name = name
                contenders.append(contender)
        share = max(seconds / (ROUNDS * len(contenders)), 1e-3)
        results = interleave(contenders, ROUNDS, share)
    print_results(title, results, against="the first", units=units)
    records = [
        {
            "contender": result.name,
            f"us per {units[0]}": round(result.vector_step_us, 3),
            f"us per {units[1]}": round(result.transition_us, 5),
            "speed to the first": round(ratio(results[0], result), 4),
            "spread": round(result.spread, 3),
        }
        for result in results
    ]
    return {"results": records, "left out": left_out, "errors": errors}


# --- waits ----------------------------------------------------------------------------------------

LANES, STEPS, BATCHES = 64, 10, 5


def place() -> str:
    """Return the innermost line of code on the stack: of Tallyroll, or else of a library."""
    frames = [frame for frame in traceback.extract_stack() if "warnings" not in frame.filename]
    ours = [frame for frame in frames if "/tallyroll/" in frame.filename]
    libraries = [frame for frame in frames if "-packages/" in frame.filename]
    if not (found := ours or libraries):
        return "this script"
    path = "/".join(Path(found[-1].filename).parts[-2:])
    return f"{path}:{found[-1].lineno}"


def by_warnings(call: Callable[[], Any]) -> Counter[str]:
    """Count the waits of a call on CUDA, by line of code."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def by_fakegpu(call: Callable[[], Any]) -> tuple[Counter[str], dict[str, float]]:
    """Count waits, by line of code, and kernels and copies of a call on the simulated GPU."""
    import fakegpu

    found: Counter[str] = Counter()
    fakegpu.reset_counts()
    fakegpu.call_at_waits(lambda reason: found.update([place()]))
    try:
        call()
    finally:
        fakegpu.call_at_waits(None)
    return found, fakegpu.counts()


def by_profiler(call: Callable[[], Any], device: str) -> dict[str, int]:
    """Count the calls of the driver and the copies of a call, by name."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if hasattr(ProfilerActivity, device.upper()) and device != "cpu":
        kinds.append(getattr(ProfilerActivity, device.upper()))
    with profile(activities=kinds) as profiled:
        call()
        synchronize(device)
    names = ("cuda", "cuLaunch", "ur", "ze", "Memcpy", "Memset")
    events = profiled.key_averages()
    return {each.key: each.count for each in events if each.key.startswith(names)}


def waits_of(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Count waits, copies and kernels of `BATCHES` batches, and return the mean per batch."""
    places: Counter[str] = Counter()
    counts: dict[str, Any] = {}
    if device == "fakegpu":
        places, counts = by_fakegpu(call)
    elif device == "cuda":
        places = by_warnings(call)
        try:
            counts = by_profiler(call, device)
        except Exception as error:  # noqa: BLE001  the driver may forbid profiling
            counts = {"profiler": f"{type(error).__name__}: {error}"[:200]}
    else:
        counts = by_profiler(call, device)
    share = {
        name: count / BATCHES if isinstance(count, int) else count for name, count in counts.items()
    }
    found: dict[str, Any] = {"counts of a batch": share}
    if device in ("cuda", "fakegpu"):
        found["waits of a batch"] = sum(places.values()) / BATCHES
        found["waits by place"] = {name: n / BATCHES for name, n in places.most_common(12)}
    return found


def waits(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases: placements of environment, policy and batches, and rows on disk."""

    def bare(where: str) -> Any:
        env, policy = TensorEnv(LANES, where), ExactPolicy(where)
        td = env.reset()

        def batches() -> None:
            nonlocal td
            for _ in range(BATCHES * STEPS):
                _, td = env.step_and_maybe_reset(policy(td))

        batches()
        return shown("bare loop", waits_of(batches, device))

    def placed(name: str, env: str, policy: str, batches: str, disk: bool) -> Any:
        frames = LANES * STEPS
        with ExitStack() as stack:
            options: dict[str, Any] = {"storing_device": batches}
            if disk:
                options["storage"] = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "x"
            collector = stack.enter_context(
                SyncCollector(
                    TensorEnv(LANES, env), ExactPolicy(policy), frames_per_batch=frames,
                    total_frames=-1, **options,
                )
            )  # fmt: skip
            rest = iter(collector)
            next(rest)
            return shown(name, waits_of(lambda: [next(rest) for _ in range(BATCHES)], device))

    here, there = "cpu", device
    places = [(here, here, there), (here, there, here), (here, there, there)]
    places += [(there, there, there), (there, there, here), (there, here, there)]
    cases: dict[str, Callable[[], Any]] = {"bare loop": partial(bare, device)}
    for env, policy, batches in places:
        words = ["CPU" if each == here else "device" for each in (env, policy, batches)]
        name = "environment {}, policy {}, batches {}".format(*words)
        cases[name] = partial(placed, name, env, policy, batches, False)
    name = "all on the device, rows also to disk"
    return cases | {name: partial(placed, name, there, there, there, True)}


def shown(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the waits of a batch, and return the record."""
    number = found.get("waits of a batch")
    if number is not None:
        most = ", ".join(f"{place} {n:g}" for place, n in list(found["waits by place"].items())[:3])
        print(f"  {name}: {number:g} waits a batch of {STEPS} steps ({most})", flush=True)
    return found


# --- bandwidth ------------------------------------------------------------------------------------


def pinned(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a pinned copy, or None if the device has no pinned memory."""
    try:
        return tensor.pin_memory() if torch.accelerator.is_available() else None
    except (RuntimeError, NotImplementedError):
        return None


def large_copies(device: str, seconds: float) -> Any:
    """Measure the bandwidth of copies of one large block."""
    size = (1 if is_small(device) else 256) << 20
    there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    here = torch.ones(size, dtype=torch.uint8)
    fast = pinned(here)
    calls: dict[str, Callable[[], Any]] = {"on the device": lambda: other.copy_(there)}
    calls["to the device, pageable"] = lambda: there.copy_(here)
    calls["to the host, pageable"] = lambda: here.copy_(there)
    if fast is not None:
        calls["to the device, pinned"] = lambda: there.copy_(fast, non_blocking=True)
        calls["to the host, pinned"] = lambda: fast.copy_(there, non_blocking=True)
    makes = {
        name: partial(TimedCall, "", call, device, size / 1e6, 1) for name, call in calls.items()
    }
    found = compare(f"copies of {size >> 20} MiB", makes, seconds, ("copy", "MB"))
    for record in found["results"]:
        record["GB per s"] = round(1e3 / record["us per MB"], 2)
        print(f"  {record['contender']}: {record['GB per s']} GB/s", flush=True)
    return found


def columns_copies(device: str, seconds: float) -> Any:
    """Measure copies of the columns of a batch to the device: one by one, pinned and packed."""
    rows, columns = (64 if is_small(device) else 4096), 25
    parts = [torch.ones(rows, 16, dtype=torch.uint8) for _ in range(columns)]
    packed = torch.ones(rows, 16 * columns, dtype=torch.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "each column": lambda: [part.to(device) for part in parts],
        "one packed block": lambda: packed.to(device),
    }
    if (fast := pinned(packed)) is not None:
        ready = [part.pin_memory() for part in parts]
        copy = {"device": device, "non_blocking": True}
        calls |= {
            "each column, pinned in the call": lambda: [p.pin_memory().to(**copy) for p in parts],
            "each column, pinned before": lambda: [part.to(**copy) for part in ready],
            "one packed block, pinned before": lambda: fast.to(**copy),
        }
    makes = {name: partial(TimedCall, "", call, device, rows, 1) for name, call in calls.items()}
    title = f"copies to the device: {columns} columns of {rows} x 16 bytes"
    return compare(title, makes, seconds, ("batch", "row"))


def bandwidth(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases of the section."""
    return {
        "large copies": partial(large_copies, device, seconds / 2),
        "columns of a batch": partial(columns_copies, device, seconds / 2),
    }


# --- rings ----------------------------------------------------------------------------------------

WIDE = tuple(f"c{number}" for number in range(8))


def wide_rows(rows: int, device: str) -> TensorDict:
    """Return rows of 287 bytes, with eight observations of four numbers each.

    Each observation holds the number of its row, and each next observation holds 1 more.
    """
    one: dict[str, Any] = {"device": device}
    number = torch.arange(rows, **one).float()
    seen = number[:, None].expand(-1, 4).contiguous()
    flag = torch.zeros(rows, 1, dtype=torch.bool, **one)
    following: dict[str, Any] = {key: seen + 1 for key in WIDE}  # noqa: C420  own memory each
    following |= {"reward": torch.ones(rows, 1, **one)}
    following |= {name: flag.clone() for name in ("done", "terminated", "truncated")}
    ids = torch.arange(rows, **one)
    values = {key: seen.clone() for key in WIDE} | {"action": ids % 2}
    values |= {
        "next": TensorDict(following, [rows], **one),
        "collector": TensorDict({"traj_ids": ids, "step": ids * 0}, [rows], **one),
    }
    return TensorDict(values, [rows], **one)


class Ring(ABC):
    """Ring of ``size`` rows, which come from a device and are sampled to it."""

    def __init__(self, size: int, batch: int, device: str, folder: Path) -> None:
        self.size, self.batch, self.device, self.folder = size, batch, device, folder

    @abstractmethod
    def extend(self, rows: TensorDictBase) -> None:
        """Write rows of the device."""

    @abstractmethod
    def sample(self) -> TensorDictBase:
        """Return ``batch`` random rows on the device."""

    def close(self) -> None:
        """Release files and threads."""
        return


class TorchrlRing(Ring):
    """TorchRL's ``LazyTensorStorage`` in the memory of the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffer = ReplayBuffer(storage=self.storage(), batch_size=self.batch)

    def storage(self) -> Any:
        """Return the storage of the buffer."""
        return LazyTensorStorage(self.size, device=self.device)

    def extend(self, rows: TensorDictBase) -> None:
        """Write rows of the device."""
        self.buffer.extend(rows)

    def sample(self) -> TensorDictBase:
        """Return random rows on the device."""
        return self.buffer.sample().to(self.device)


class TorchrlMemmapRing(TorchrlRing):
    """TorchRL's ``LazyMemmapStorage``, whose samples are copied to the device."""

    def storage(self) -> Any:
        """Return the storage of the buffer."""
        return LazyMemmapStorage(self.size, scratch_dir=self.folder)

    def extend(self, rows: TensorDictBase) -> None:
        """Copy rows of the device to the host, and write them."""
        self.buffer.extend(rows.cpu())


class MemmapRing(Ring):
    """`MemmapStorage`, whose samples come from ``get`` and are copied to the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.storage = MemmapStorage(self.folder / "rows", max_size=self.size)

    def extend(self, rows: TensorDictBase) -> None:
        """Write rows of the device."""
        self.storage.extend(rows)

    def sample(self) -> TensorDictBase:
        """Return random rows on the device."""
        return self.storage.get(torch.randint(len(self.storage), (self.batch,))).to(self.device)

    def close(self) -> None:
        """Close the files."""
        self.storage.close()


class LoaderRing(MemmapRing):
    """`MemmapStorage`, whose samples come from ``loader(device=)``."""

    loader: Any = None

    def sample(self) -> TensorDictBase:
        """Return random rows on the device."""
        if self.loader is None:
            self.loader = self.storage.loader(self.batch, device=self.device, seed=0)
        return next(self.loader)

    def close(self) -> None:
        """Stop the threads and close the files."""
        if self.loader is not None:
            self.loader.close()
        super().close()


RINGS: dict[str, type[Ring]] = {
    "LazyTensorStorage on the device": TorchrlRing,
    "MemmapStorage, get": MemmapRing,
    "MemmapStorage, loader": LoaderRing,
    "LazyMemmapStorage": TorchrlMemmapRing,
}
"""Rings by name. The others are compared with the first one."""
OPTIONAL_RINGS = ("LazyMemmapStorage",)


def check_sample(name: str, found: TensorDictBase, batch: int, device: str) -> None:
    """Raise AssertionError unless a sample has rows of `wide_rows`, on the device."""
    if len(found) != batch or found["c0"].device.type != device:
        raise AssertionError(f"{name}: got {len(found)} rows on {found['c0'].device}")
    for key in WIDE:
        if not torch.equal(found["next", key], found[key] + 1):
            raise AssertionError(f"{name}: a sample has torn rows in {key}")


def rings(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases of the section."""
    lanes, slots = (64, 4) if is_small(device) else (4096, 16)
    count, size = lanes * slots, lanes * slots * 8

    def compared(what: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            rows = wide_rows(count, device)

            def make(number: int, kind: type[Ring]) -> TimedCall:
                own = Path(folder) / str(number)
                own.mkdir()
                ring = kind(size, lanes, device, own)
                ring.extend(rows)
                name = f"{kind.__name__} {what}"
                check_sample(name, ring.sample(), lanes, device)
                if what == "writing":
                    return TimedCall(name, lambda: ring.extend(rows), device, count, 1, ring.close)
                ring.extend(rows)
                return TimedCall(name, ring.sample, device, lanes, 1, ring.close)

            makes = {name: partial(make, n, kind) for n, (name, kind) in enumerate(RINGS.items())}
            title = f"{what}, {count if what == 'writing' else lanes} rows a call"
            return compare(title, makes, seconds / 2, ("call", "row"), OPTIONAL_RINGS)

    return {what: partial(compared, what) for what in ("writing", "sampling")}


# --- collectors -----------------------------------------------------------------------------------


class WideEnv(EnvBase):
    """Environment that returns precomputed results, with eight observations of four numbers."""

    def __init__(self, lanes: int, device: str) -> None:
        super().__init__(device=torch.device(device), batch_size=torch.Size([lanes]))
        on: dict[str, Any] = {"device": self.device}
        seen = {key: Unbounded((lanes, 4), **on) for key in WIDE}
        self.observation_spec = Composite(seen, shape=(lanes,), **on)
        self.action_spec = Categorical(2, shape=(lanes,), **on)
        self.reward_spec = Unbounded((lanes, 1), **on)
        flag = Binary(1, shape=(lanes, 1), dtype=torch.bool, **on)
        names = ("done", "terminated", "truncated")
        self.done_spec = Composite(dict.fromkeys(names, flag), shape=(lanes,), **on)
        rng, self.results, self.at = torch.Generator().manual_seed(0), [], 0
        for _ in range(8):
            done = torch.rand(lanes, 1, generator=rng) < 0.05
            values = {key: torch.rand(lanes, 4, generator=rng) for key in WIDE}
            flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
            values |= {"reward": torch.ones(lanes, 1), **flags}
            self.results.append({key: each.clone().to(device) for key, each in values.items()})

    def _set_seed(self, seed: int | None) -> None:
        """Ignore the seed, because the values are fixed."""

    def _following(self) -> dict[str, torch.Tensor]:
        self.at += 1
        return dict(self.results[self.at % len(self.results)])

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        found = self._following()
        del found["reward"]
        for name in ("done", "terminated", "truncated"):
            found[name] = torch.zeros_like(found[name])
        return TensorDict(found, self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._following(), self.batch_size, device=self.device)


def wide_policy(td: TensorDictBase) -> TensorDictBase:
    """Choose actions on the device of the observations."""
    return td.set("action", (td["c0"][:, 0] > 0.5).long())


class Cart(torch.nn.Module):
    """Policy for CartPole with 64 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one action per lane."""
        with torch.no_grad():
            return self.layers(observation).argmax(-1)


def cart_vector(lanes: int) -> Any:
    """Return CartPole on the CPU."""
    kwargs = {"autoreset_mode": AutoresetMode.DISABLED}
    return gym.make_vec("CartPole-v1", lanes, vectorization_mode="sync", vector_kwargs=kwargs)


def cart_policy(device: str) -> TensorDictModule:
    """Return the policy on the device."""
    return TensorDictModule(Cart().to(device), ["observation"], ["action"])


def stepping(env: EnvBase, policy: Callable[[Any], Any], steps: int) -> Callable[[], None]:
    """Return TorchRL's loop, which keeps no data. The policy may be on another device."""
    td = env.reset()

    def loop() -> None:
        nonlocal td
        for _ in range(steps):
            _, td = env.step_and_maybe_reset(policy(td))

    return loop


def moved(policy: Callable[[Any], Any], device: str) -> Callable[[Any], Any]:
    """Return a policy that moves observations to the device, and actions back."""
    return lambda td: td.set("action", policy(td.to(device))["action"].to(td["observation"].device))


def torchrl_collector(env: EnvBase, policy: Any, frames: int, device: str) -> Any:
    """Return TorchRL's collector, whose batches are on the device."""
    from torchrl.collectors import Collector

    return Collector(
        env, policy, frames_per_batch=frames, total_frames=-1, storing_device=device,
        env_device=env.device, policy_device=device,
    )  # fmt: skip


def collected(
    env: Callable[[], Any], policy: Any, device: str, lanes: int, slots: int,
    loop: Callable[[], Callable[[], None]], peer_env: Callable[[], EnvBase], seconds: float,
    title: str,
) -> Any:  # fmt: skip
    """Compare collectors with ``loop``, a bare loop of the same number of steps."""
    frames = lanes * slots
    one: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
    folder = Path(tempfile.mkdtemp())

    def ours(storing: str, **options: Any) -> TimedCall:
        collector = SyncCollector(env(), policy, storing_device=storing, **one, **options)
        rest: Iterator[Any] = iter(collector)
        return TimedCall("", lambda: next(rest), device, frames, slots, collector.shutdown)

    def stored() -> TimedCall:
        storage = MemmapStorage(folder / "rows", max_size=8 * frames)
        collector = SyncCollector(env(), policy, storage=storage, **one)

        def close() -> None:
            collector.shutdown()
            storage.close()

        return TimedCall("", lambda: collector.collect(frames), device, frames, slots, close)

    def buffer() -> Any:
        return ReplayBuffer(storage=LazyTensorStorage(8 * frames, device=device), batch_size=64)

    def theirs(there: Any = None) -> TimedCall:
        collector = torchrl_collector(peer_env(), policy, frames, device)
        rest = iter(collector)

        def batch() -> None:
            data = next(rest)
            if there is not None:
                there.extend(data.reshape(-1))

        return TimedCall("", batch, device, frames, slots, collector.shutdown)

    makes: dict[str, Callable[[], TimedCall]] = {
        "bare loop": lambda: TimedCall("", loop(), device, frames, slots),
        "Tallyroll, batches on the device": lambda: ours(device),
        "Tallyroll, LazyTensorStorage on the device": lambda: ours(device, replay_buffer=buffer()),
        "Tallyroll, MemmapStorage": stored,
        "TorchRL, batches on the device": theirs,
        "TorchRL, LazyTensorStorage on the device": lambda: theirs(buffer()),
    }
    try:
        peers = [name for name in makes if name.startswith("TorchRL")]
        return compare(title, makes, seconds, ("vector step", "transition"), peers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def collectors(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases: an environment on the device, and one on the CPU with a policy there."""
    lanes, slots = (64, 4) if is_small(device) else (4096, 16)
    carts, steps = (8, 4) if is_small(device) else (64, 32)

    def there() -> Any:
        env = partial(WideEnv, lanes, device)
        title = f"environment and policy on the device, {lanes} lanes, batches of {lanes * slots}"
        loop = partial(stepping, env(), wide_policy, slots)
        return collected(env, wide_policy, device, lanes, slots, loop, env, seconds / 2, title)

    def here() -> Any:
        policy = cart_policy(device)
        title = (
            f"CartPole on the CPU, policy on the device, {carts} lanes, batches of {carts * steps}"
        )

        def wrapped() -> EnvBase:
            return GymWrapper(cart_vector(carts), categorical_action_encoding=True)

        loop = partial(stepping, wrapped(), moved(policy, device), steps)
        return collected(
            partial(cart_vector, carts), policy, device, carts, steps, loop, wrapped, seconds / 2,
            title,
        )  # fmt: skip

    return {"environment on the device": there, "environment on the CPU": here}
