"""Each stored info equals the environment's, or the collector raises an error.

The oracle's infos encode lane, episode and step in several dtypes and shapes, some of them only at
some steps. A plain function of these three computes the expected rows.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from tensordict import TensorDictBase
from torchrl.envs import StepCounter, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv, Info, MultiprocessCollector, SyncCollector
from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.errors import ArgumentError, NameRefused, TransitionError
from tallyroll.collector.slab.info import parsed
from tallyroll.collector.slab.lossless import cast
from tallyroll.storage import open_storage, verify

from collect_kit import ByObservation, collect, columns, joined
from oracles import OracleEnv, decode, length_of
from worker_kit import collect_all, in_threads, start

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MODES = (NEXT, SAME, DISABLED)
LENGTHS = [3, 1, 4, 2]


def told(lane: int, episode: int, step: int, ended: bool) -> dict[str, Any]:
    """Return the oracle's info at ``step`` of an episode."""
    code = 10_000 * lane + 100 * episode + step
    info: dict[str, Any] = {
        "code": code,
        "wide": code + 2**40,
        "half": code + 0.5,
        "odd": bool(step % 2),
        "small": np.int32(code),
        "vec": np.array([lane, episode, step], np.float32),
        "img": np.full((2, 2), (lane + step) % 256, np.uint8),
        "pair": [lane, step],
        "group": {"n": code, "deep": {"x": -float(code)}},
    }
    if step:
        info["move"] = np.float32(code)
    if (lane + step) % 3 == 1:
        info["some"] = code
    if step == 2:
        info["group"]["odd"] = np.int16(step)
    if ended:
        info["is_success"] = bool(code % 2)
    return info


class Telling(OracleEnv):
    """Oracle whose infos encode its position."""

    def _info(self) -> dict[str, Any]:
        return told(self.lane, self.episode, self.step_in_episode, self._ended)


ALWAYS = ["code", "wide", "half", "odd", "small", "vec", "img", ("group", "n"), "group/deep/x"]
SOMETIMES = [
    Info("pair", np.int16, (2,)),
    Info("move", torch.float64, fill=-1.5),
    Info("some", "int64", fill=7),
    Info("is_success", bool, fill=False),
    Info(("group", "odd"), dtype="float32", fill=0),
]
DTYPES = {
    "code": torch.int64, "wide": torch.int64, "half": torch.float64, "odd": torch.bool,
    "small": torch.int32, "vec": torch.float32, "img": torch.uint8, "pair": torch.int16,
    "move": torch.float64, "some": torch.int64, "is_success": torch.bool,
}  # fmt: skip
FILLS = {"move": -1.5, "some": 7, "is_success": False, "group/odd": 0}


def check_told(rows: TensorDictBase, names: Any = ()) -> None:
    """Check that every info of every row equals the oracle's."""
    lanes, episodes, steps = decode("float", {"observation": rows["observation"].numpy()})
    for row, (lane, episode, step) in enumerate(zip(lanes, episodes, steps, strict=True)):
        for at, root in ((step, ()), (step + 1, ("next",))):
            ended = at == length_of(LENGTHS, lane, episode)
            info = told(int(lane), int(episode), int(at), bool(ended))
            for name in names or [*DTYPES, "group/n", "group/deep/x", "group/odd"]:
                key = (*root, *name.split("/"))
                value: Any = info
                for part in name.split("/"):
                    value = value.get(part) if value is not None else None
                got = rows[key][row]
                if name in FILLS:
                    assert bool(rows[(*key[:-1], key[-1] + "_given")][row]) is (value is not None)
                    value = FILLS[name] if value is None else value
                assert got.tolist() == np.asarray(value).tolist(), (key, row, lane, episode, at)


def telling(lanes: int, mode: AutoresetMode, first: int = 0, kind: Any = SyncVectorEnv) -> Any:
    makes = [partial(Telling, first + lane, LENGTHS, ends="mixed") for lane in range(lanes)]
    return kind(makes, autoreset_mode=mode)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["factory", "object", "adapter"])
@pytest.mark.parametrize("mode", MODES)
def test_every_info_of_every_row_is_the_one_of_its_step(mode: AutoresetMode, given: str) -> None:
    infos = [*ALWAYS, *SOMETIMES]
    env: Any = {
        "factory": partial(telling, 3, mode),
        "object": telling(3, mode),
        "adapter": GymnasiumVectorEnv(telling(3, mode), info_keys=infos),
    }[given]
    kwargs = {} if given == "adapter" else {"info_keys": infos}
    rows = joined(collect(env, ByObservation(), frames_per_batch=7, total_frames=60, **kwargs)[0])
    check_told(rows)
    assert {name: rows[name].dtype for name in DTYPES} == DTYPES


@pytest.mark.slow
def test_infos_of_an_async_vector() -> None:
    env = telling(2, SAME, kind=partial(AsyncVectorEnv, context="fork"))
    infos = [*ALWAYS, *SOMETIMES]
    with SyncCollector(
        env, ByObservation(), frames_per_batch=9, total_frames=40, info_keys=infos
    ) as collector:
        check_told(joined(list(collector)))
    env.close()


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        (DISABLED, {"surplus": "never_step"}),
        (NEXT, {"reset_slots": "avoid"}),
        (NEXT, {"max_frames_per_traj": 100}),
        (SAME, {"max_frames_per_traj": 100}),
        (DISABLED, {"max_frames_per_traj": 100, "reset_at_each_iter": True}),
        (SAME, {"surplus": "discard"}),
    ],
)
def test_infos_however_lanes_are_stepped(mode: AutoresetMode, kwargs: dict[str, Any]) -> None:
    infos = [*ALWAYS, *SOMETIMES]
    env = partial(telling, 3, mode) if "reset_slots" in kwargs else telling(3, mode)
    budget = {"frames_per_batch": 7, "total_frames": 60}
    batches, _ = collect(env, ByObservation(), info_keys=infos, **budget, **kwargs)
    check_told(joined(batches))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_infos_through_workers_and_a_storage(mode: Any, tmp_path: Path) -> None:
    makes = [partial(telling, 2, SAME, 0), partial(telling, 1, SAME, 2)]
    infos = [*ALWAYS, *SOMETIMES]
    rename = {"code": "number", "group": "told"}
    kwargs = {"frames_per_batch": 7, "total_frames": 60, "info_keys": infos, "rename": rename}
    with in_threads():
        run = collect_all(
            start(makes, ByObservation(), mode=mode, storage=tmp_path / "s", **kwargs)
        )
    rows = joined(run.batches)
    assert torch.equal(rows["number"], rows["told", "n"])
    rows = rows.clone().set("code", rows["number"]).set(("next", "code"), rows["next", "number"])
    for place in (rows, rows["next"]):
        place.set("group", place["told"])
    check_told(rows)
    assert not verify(tmp_path / "s").findings
    with open_storage(tmp_path / "s") as storage:
        (run_entry,) = storage.manifest["runs"]
    assert run_entry["call"]["rename"] == ["code=number", "group=told"]
    assert "move:float64=-1.5" in run_entry["call"]["info_keys"]


def test_names_that_a_reset_lacks_are_filled_with_0_where_a_factory_shows_it() -> None:
    env = partial(telling, 3, NEXT)
    rows = joined(collect(env, frames_per_batch=7, total_frames=60, info_keys=["move"])[0])
    assert torch.equal(rows["move_given"], rows["collector", "step"] > 0)
    assert not rows["move"][~rows["move_given"]].any()
    assert rows["next", "move_given"].all()
    assert rows["move"].dtype is torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_of_the_vector_wrapper_stand_at_ends(mode: AutoresetMode) -> None:
    infos = [Info("episode/r", float, fill=0), Info(("episode", "l"), int, fill=0)]
    env = RecordEpisodeStatistics(telling(3, mode))
    batches, collector = collect(env, frames_per_batch=7, total_frames=60, info_keys=infos)
    rows, step = joined(batches), joined(batches)["collector", "step"]
    ends = rows["next", "terminated"] | rows["next", "truncated"]
    assert torch.equal(rows["next", "episode", "l_given"], ends.flatten())
    assert torch.equal(rows["next", "episode", "l"], torch.where(ends.flatten(), step + 1, 0))
    assert not rows["episode", "r_given"].any()
    returns = rows["next", "episode", "r"][ends.flatten()].sort().values
    own = torch.tensor([each.total_return for each in collector.episodes]).double()
    assert torch.allclose(returns, own.sort().values)


# --- values that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize("having", [[0], [0, 1], [1, 2], [], None])
def test_a_group_of_a_wrapper_is_shown_of_lanes_that_go_on(having: list[int] | None) -> None:
    """In SAME_STEP mode, the group of an ended lane belongs to its last step, not to its reset."""
    infos = InfoColumns([Info("episode/r", dtype="float64", fill=-1)], 3)
    values, ended, rows = np.array([5.0, 6.0, 7.0]), np.arange(3) == 0, infos.new_rows()
    info: dict[str, Any] = {"episode": {"r": values}}
    has = np.ones(3, np.bool_)
    if having is not None:
        info["_episode"] = has = np.isin(np.arange(3), having)
    for _ in range(2):
        infos.write(rows, {})
        assert (rows[0] == -1).all()
        infos.write_final(infos.new_rows(), info, has & ended)
        infos.write_shown(rows, info, ended)
        np.testing.assert_array_equal(rows[1], has & ~ended)
        np.testing.assert_array_equal(rows[0], np.where(rows[1], values, -1))


class Saying(OracleEnv):
    """Oracle whose ``info["x"]`` follows a list by the step of lane 1; None omits it."""

    def __init__(self, lane: int, values: list[Any], lengths: Any = (6,)) -> None:
        super().__init__(lane, lengths)
        self.values = values

    def _info(self) -> dict[str, Any]:
        value = self.values[min(self.step_in_episode, len(self.values) - 1)]
        value = self.values[0] if self.lane != 1 else value
        return {} if value is None else {"x": value}


BAD = {
    "0 then 0.75": ([0, 0, 0.75], "int64 holds without loss, got 0.75", 'dtype="float64"'),
    "False then 3": ([False, False, 3], "bool holds without loss, got 3", 'dtype="int64"'),
    "int32 then 2**40": ([np.int32(1)] * 2 + [2**40], "int32 holds .* 1099511627776", '"int64"'),
    "uint8 then -1": ([np.uint8(3)] * 2 + [-1], "uint8 holds without loss, got -1", '"int64"'),
    "float32 then 0.1": ([np.float32(1)] * 2 + [0.1], "float32 holds .* got 0.1", '"float64"'),
    "three then one": ([np.zeros(3)] * 2 + [1.0], r"shape \[3\], got .*1.0.* of", "one shape"),
    "one then three": ([1.0, 1.0, np.zeros(3)], r"shape \[\], got \[0.0.*", r"shape=\(3,\)"),
    "three then [1]": ([np.zeros(3)] * 2 + [np.ones(1)], r"shape \[3\], got", r"shape=\(1,\)"),
    "then a word": ([1, 1, "a"], "a number or an array of numbers, got str 'a'", "encode it"),
    "then too much": ([1, 1, 2**70], "a number or an array of numbers, got int", "encode it"),
    "then nothing": ([1, 1, None], "every step and every reset", "fill=0"),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_does_not_fit_is_an_error_that_says_where(
    mode: AutoresetMode, case: str, alone: bool
) -> None:
    """The array may also come from the value of another lane in the same step."""
    values, problem, advice = BAD[case]
    lanes = [1] if alone else [0, 1, 2]
    makes = [partial(Saying, lane, values) for lane in lanes]
    where = f"at lane {0 if alone else 1}, step 1 of its trajectory"
    with pytest.raises(TransitionError, match=f"(?s)'x'.*{problem}.*{where}.*{advice}"):
        collect(
            partial(SyncVectorEnv, makes, autoreset_mode=mode),
            frames_per_batch=12,
            total_frames=36,
            info_keys=["x"],
        )


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_that_of_the_trajectory_and_a_reset_is_named(mode: AutoresetMode) -> None:
    class Late(Saying):
        def _info(self) -> dict[str, Any]:
            bad = self.lane == 1 and (self.episode, self.step_in_episode) == self.values[1]
            return {"x": 0.5 if bad else 0}

    for at, where in (((2, 3), "step 2 of its"), ((1, 0), "in the reset before step 0 of its")):
        makes = [partial(Late, lane, [0, at]) for lane in range(2)]
        with pytest.raises(TransitionError, match=f"at lane 1, {where} trajectory"):
            collect(
                SyncVectorEnv(makes, autoreset_mode=mode),
                frames_per_batch=5,
                total_frames=99,
                info_keys=["x"],
            )


def test_the_lane_is_that_of_the_run_where_workers_step_it() -> None:
    makes = [
        partial(SyncVectorEnv, [partial(Saying, 0, [0])]),
        partial(SyncVectorEnv, [partial(Saying, 1, [0, 0, 0.5])]),
    ]
    with in_threads(), pytest.raises(TransitionError, match="at lane 1, step 1 of its traj"):
        collect_all(start(makes, frames_per_batch=9, total_frames=36, info_keys=["x"]))


def test_rows_complete_before_are_stored(tmp_path: Path) -> None:
    makes = [partial(Saying, lane, [0, 0, 0, 0.5]) for lane in range(3)]
    with pytest.raises(TransitionError, match="step 2"):
        collect(
            SyncVectorEnv(makes),
            frames_per_batch=30,
            total_frames=60,
            info_keys=["x"],
            storage=tmp_path / "s",
        )
    with open_storage(tmp_path / "s") as storage:
        assert storage.head == 6


def test_declared_wide_enough_it_goes_in() -> None:
    makes = [partial(Saying, lane, [0, 0.75, True, np.uint8(3), -1]) for lane in range(3)]
    infos = [Info("x", float)]
    rows = joined(collect(SyncVectorEnv(makes), frames_per_batch=9, total_frames=36,
                          info_keys=infos)[0])  # fmt: skip
    own = rows["collector", "lane"] == 1
    assert rows["next", "x"][own][:5].tolist() == [0.75, 1, 3, -1, -1]


ANY = [0, 1, -1, 2**24 + 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 255, 256, 65504, 65520]
ANY_FLOAT = [0.0, -0.0, 0.1, 0.5, 1e300, -1e300, 2.0**63, -(2.0**63), 2.0**64, 65520.0,
             float("inf"), float("-inf"), 16777217.0, -1.0, 255.0, 256.0]  # fmt: skip
KINDS = ["?", "u1", "i1", "i2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("target", [kind for kind in KINDS if kind != "u8"])
def test_a_cast_keeps_values_or_says_so(target: str) -> None:
    """The expected results come from Python's numbers, whose comparisons are exact."""
    to = np.dtype(target)
    for source in KINDS:
        values = []
        for each in (*ANY, *ANY_FLOAT):
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    values.append(np.array(each).astype(source))
                except OverflowError:
                    continue
        array = np.array(values, source)
        found, lost = cast(array, to)
        assert found.dtype == to
        for index, value in enumerate(array):
            kept = found[index].item() == value.item()
            changed = lost is not None and bool(lost[index])
            if not changed:
                assert kept, (source, target, value)
                continue
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inside = to.kind not in "iu" or (
                    value.imag == 0
                    and np.isfinite(value.real)
                    and np.iinfo(to).min <= value.real.item() <= np.iinfo(to).max
                )
                assert not inside or value.astype(to).item() != value.item(), (source, target)
    nan, lost = cast(np.array([np.nan]), np.dtype("f4"))
    assert np.isnan(nan).all()
    assert lost is None
    assert cast(np.array([np.nan]), np.dtype("i4"))[1] is not None


# --- discovery ----------------------------------------------------------------------------------


class Drawing(OracleEnv):
    """Oracle that draws observations from its seed and counts its instances."""

    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, kind="seeded")
        type(self).made += 1
        np.random.random()
        torch.rand(())


@pytest.fixture
def own_env() -> Iterator[str]:
    gym.register("tallyroll/Drawing-v0", Drawing)
    yield "tallyroll/Drawing-v0"
    gym.registry.pop("tallyroll/Drawing-v0")


def drawn(wrap: Callable[..., Any] = lambda env: env) -> Any:
    env = SyncVectorEnv([partial(Drawing, lane, LENGTHS) for lane in range(3)])
    return wrap(env)


@pytest.mark.parametrize("wrap", [NormalizeObservation, RecordEpisodeStatistics, lambda env: env])
@pytest.mark.parametrize("given", ["object", "factory"])
def test_two_runs_with_one_seed_are_equal_with_infos_and_without(given: str, wrap: Any) -> None:
    def run(**kwargs: Any) -> dict[Any, torch.Tensor]:
        torch.manual_seed(3)
        np.random.seed(4)
        env = partial(drawn, wrap) if given == "factory" else drawn(wrap)
        budget = {"frames_per_batch": 9, "total_frames": 45, "seed": 5}
        return columns(joined(collect(env, **budget, **kwargs)[0]), "tick", ("next", "tick"))

    runs = [run(), run(info_keys=["tick"]), run(info_keys=["tick"])]
    for other in runs[1:]:
        assert runs[0].keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in runs[0].items())


def test_generators_are_as_before_where_another_environment_was_looked_at(own_env: str) -> None:
    def after(**kwargs: Any) -> tuple[float, float]:
        torch.manual_seed(3)
        np.random.seed(4)
        collector = SyncCollector(own_env, frames_per_batch=5, total_frames=5, **kwargs)
        collector.shutdown()
        return float(torch.rand(())), float(np.random.random())

    assert after() == after(info_keys=["tick"])


def test_a_given_environment_is_reset_once_and_not_stepped() -> None:
    env = telling(2, NEXT)
    with SyncCollector(env, frames_per_batch=5, total_frames=5, info_keys=["code"]):
        assert env.get_attr("resets_done") == (1, 1)
        assert env.get_attr("steps_taken") == (0, 0)


def test_declared_infos_need_no_second_environment(own_env: str) -> None:
    Drawing.made = 0
    with SyncCollector(
        own_env, frames_per_batch=5, total_frames=5, num_envs=2, info_keys=[Info("tick", int)]
    ):
        assert Drawing.made == 2
    with SyncCollector(own_env, frames_per_batch=5, total_frames=5, num_envs=2, info_keys=["tick"]):
        assert Drawing.made == 5


def test_a_factory_of_one_object_is_as_the_object() -> None:
    env = telling(2, NEXT)
    with SyncCollector(lambda: env, frames_per_batch=5, total_frames=5, info_keys=["code"]):
        assert env.get_attr("resets_done") == (1, 1)


def test_a_transform_around_infos_that_the_first_reset_declares() -> None:
    env = TransformedEnv(
        GymnasiumVectorEnv(telling(3, DISABLED), info_keys=ALWAYS), StepCounter(max_steps=100)
    )
    assert "code" not in env.observation_spec.keys()
    batches, _ = collect(env, ByObservation(), frames_per_batch=7, total_frames=60)
    check_told(joined(batches), ["code", "vec", "group/n"])


def test_a_name_that_the_first_reset_lacks_of_a_given_environment() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"'move' is not in the infos of the first reset. The known keys are \['code'.*"
        r"declare it: Info\('move', dtype=\"float64\", fill=0\)",
    ):
        collect(telling(2, NEXT), frames_per_batch=5, total_frames=5, info_keys=["move"])


def test_a_factory_that_makes_but_one() -> None:
    once: list[int] = []

    def make() -> Any:
        once.append(1)
        if len(once) > 1:
            raise OSError("the port is taken")
        return telling(2, NEXT)

    with pytest.raises(ArgumentError, match=r"needs a second environment, .* OSError: the port is"):
        collect(make, frames_per_batch=5, total_frames=5, info_keys=["code"])
    once.clear()
    collect(make, frames_per_batch=5, total_frames=5, info_keys=[Info("code", int)])


# --- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Info(""), "expected a name, or a tuple of names"),
        (lambda: Info(("a", "")), "expected a name, or a tuple of names"),
        (lambda: Info("a", "uint16"), "expected a dtype among bool, uint8.* got 'uint16'"),
        (lambda: Info("a", torch.bfloat16), "expected a dtype among"),
        (lambda: Info("a", "nonsense"), "expected a dtype among"),
        (lambda: Info("a", int, (0,)), r"expected a shape of integers above 0, got \(0,\)"),
        (lambda: Info("a", int, (2.5,)), "expected a shape of integers"),
        (lambda: Info("a", shape=(2,)), r"expected a dtype with the shape \[2\], got none"),
        (lambda: Info("a", int, fill=0.5), "expected a fill that int64 holds without loss, got"),
        (lambda: Info("a", float, fill=float("nan")), "expected a finite fill.* a_given marks"),
        (lambda: Info("a", int, fill="x"), "expected a number as fill"),
    ],
)
def test_infos_that_cannot_be_right(make: Callable[[], Info], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        make()


@pytest.mark.parametrize(
    "text", ["lives", "group/x", "pos:float32[3]", "m:int64[2x3]=-1", "is_success:bool=False"]
)
def test_a_spelling_is_read_back(text: str) -> None:
    assert str(parsed(text)) == text
    assert parsed(str(parsed(text))) == parsed(text)


def test_a_fill_alone_says_the_dtype() -> None:
    assert [Info("a", fill=fill).dtype.str[1:] for fill in (0, 0.0, False)] == ["i8", "f8", "b1"]


def test_infos_twice_and_columns_of_where_they_were_given() -> None:
    with pytest.raises(ArgumentError, match="info_keys: expected each name once, got 'a/b' twice"):
        GymnasiumVectorEnv(telling(1, NEXT), info_keys=[("a", "b"), "a/b"])
    with pytest.raises(NameRefused, match="'some_given' is taken twice: an info has it, and an in"):
        GymnasiumVectorEnv(telling(1, NEXT), info_keys=["some_given", Info("some", fill=0)])


def test_ticks_of_a_nested_info_that_was_renamed() -> None:
    _, collector = collect(
        partial(telling, 1, DISABLED),
        frames_per_batch=4,
        total_frames=8,
        frame_skip="group/n",
        rename={"group": "told"},
    )
    assert collector.ledger.ticks == 8


def test_collectors_of_many_processes_take_them(own_env: str) -> None:
    with pytest.raises(ArgumentError, match="info_keys: expected a sequence of names, got Info"):
        MultiprocessCollector(
            own_env, num_workers=2, frames_per_batch=5, total_frames=5, info_keys=Info("tick")
        )
