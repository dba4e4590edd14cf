"""Columns with colliding names are refused, and renamed columns hold their values.

Each observation of the oracle is a number of its column plus the step, so that a value in the wrong
column is detected.
"""

from ast import literal_eval
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv, StepCounter, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv, Info, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.errors import ArgumentError, NameRefused, TransitionError
from tallyroll.storage import open_storage, verify
from tallyroll.storage.errors import InvalidSchema

from collect_kit import collect, joined
from worker_kit import collect_all, in_threads, start

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
BUDGET = {"frames_per_batch": 7, "total_frames": 40}
LENGTH = 5


def box() -> spaces.Box:
    return spaces.Box(0, 1e6, (), np.float32)


def group(*names: Any) -> spaces.Dict:
    return spaces.Dict({name: box() for name in names})


def numbered(space: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """Number the leaves of a space."""
    if isinstance(space, spaces.Dict):
        parts: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        return {path: 0}
    leaves = [leaf for name, part in parts for leaf in numbered(part, (*path, name))]
    return {leaf: 100 * (index + 1) for index, leaf in enumerate(leaves)}


class Numbered(gym.Env[Any, Any]):
    """Environment whose observations are the number of their leaf plus the step.

    Its reward is the action.
    """

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(3)
        self.numbers = numbered(space)

    def _value(self, space: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: self._value(part, (*path, name)) for name, part in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._value(part, (*path, i)) for i, part in enumerate(space.spaces))
        return np.array(self.numbers[path] + self.steps, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._value(self.observation_space, ()), self._info()

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation = self._value(self.observation_space, ())
        return observation, float(action), self.steps >= LENGTH, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {"lives": 90_000 + self.steps, "action": 80_000 + self.steps}


def vec(space: Any, lanes: int = 2, mode: AutoresetMode = SAME) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Numbered, space)] * lanes, autoreset_mode=mode)


def check(rows: TensorDictBase, **wanted: int) -> None:
    """Check that columns hold their number plus the step.

    ``__`` in a name separates the parts of a nested key.
    """
    step = rows["collector", "step"]
    for name, number in wanted.items():
        key = tuple(name.split("__"))
        assert torch.equal(rows[key].long().reshape(-1), number + step), key
        assert torch.equal(rows[("next", *key)].long().reshape(-1), number + step + 1), key
    assert torch.equal(rows["next", "reward"].reshape(-1), rows["action"].float())
    assert torch.equal(rows["next", "terminated"].reshape(-1), step == LENGTH - 1)


# A space, the renames that resolve its collisions, and the resulting column of each leaf.
COLLIDING: dict[str, tuple[Any, Any, dict[tuple[Any, ...], str]]] = {
    name: (group(name, "zeta"), {name: "fine"}, {(name,): "fine", ("zeta",): "zeta"})
    for name in (
        *("action", "next", "collector", "reward", "done", "terminated", "truncated", ""),
        *("_reset", "_step"),
    )
}
COLLIDING |= {
    "a group": (
        spaces.Dict({"action": group("x", "y"), "o": box()}),
        {"action": "was"},
        {("action", "x"): "was__x", ("action", "y"): "was__y", ("o",): "o"},
    ),
    "one of a group": (
        spaces.Dict({"next": spaces.Tuple((box(), box()))}),
        {"next/0": "a", ("next", "1"): ("b", "c")},
        {("next", 0): "a", ("next", 1): "b__c"},
    ),
    "a mask in a group": (
        spaces.Dict({"a": group("_reset", "x")}),
        {"a/_reset": "b"},
        {("a", "_reset"): "b", ("a", "x"): "a__x"},
    ),
    "an empty part": (spaces.Dict({"a": group("")}), {("a", ""): "b"}, {("a", ""): "b"}),
    "1 and '1'": (group(1, "1"), {1: "one"}, {(1,): "one", ("1",): "1"}),
    "1 and its string": (group(1, "1"), {"1": "one"}, {(1,): "1", ("1",): "one"}),
}


@pytest.mark.parametrize("case", COLLIDING)
def test_names_that_collide_are_refused_and_renamed(case: str, tmp_path: Path) -> None:
    space, rename, columns = COLLIDING[case]
    with pytest.raises(NameRefused, match=r"rename=\{"):
        SyncCollector(partial(vec, space), storage=tmp_path / "s", **BUDGET)
    with pytest.raises(NameRefused, match=r"rename=\{"):
        GymnasiumVectorEnv(vec(space))
    assert not list(tmp_path.iterdir())
    batches, _ = collect(partial(vec, space), storage=tmp_path / "s", rename=rename, **BUDGET)
    numbers = numbered(space)
    check(joined(batches), **{columns[path]: number for path, number in numbers.items()})
    assert not verify(tmp_path / "s").findings


def test_the_way_out_that_an_error_names_works() -> None:
    rename: dict[Any, Any] = {}
    for _ in range(9):
        try:
            collector = SyncCollector(
                partial(vec, group("action", "next", "reward", "done", "", "collector")),
                rename=rename,
                **BUDGET,
            )
        except NameRefused as error:
            rename |= literal_eval(str(error).split("rename=")[1].split(" or ")[0])
        else:
            break
    with collector:
        assert len(rename) == 6
        rows = joined(list(collector))
    for index, name in enumerate(sorted(rename)):
        assert torch.equal(rows[rename[name]].long(), 100 * (index + 1) + rows["collector", "step"])


@pytest.mark.parametrize("name", ["a/b", "a\0b", ".", "..", "\ud800"])
def test_names_that_no_storage_holds(name: str, tmp_path: Path) -> None:
    space = group(name, "zeta")
    with pytest.raises(NameRefused, match=r"so no storage can hold it\. .*rename=\{"):
        SyncCollector(partial(vec, space), storage=tmp_path / "s", **BUDGET)
    assert not list(tmp_path.iterdir())
    check(joined(collect(partial(vec, space), **BUDGET)[0]), zeta=numbered(space)[("zeta",)])
    batches, _ = collect(partial(vec, space), storage=tmp_path / "s", rename={name: "b"}, **BUDGET)
    check(joined(batches), b=numbered(space)[(name,)], zeta=numbered(space)[("zeta",)])


def test_a_name_too_long_for_a_storage(tmp_path: Path) -> None:
    with pytest.raises(InvalidSchema) as caught:
        SyncCollector(partial(vec, group("x" * 300)), storage=tmp_path / "s", **BUDGET)
    assert "rename=" in caught.value.__notes__[0]


def test_names_that_are_spelled_alike_are_columns_of_their_own(tmp_path: Path) -> None:
    space = spaces.Dict({"a": group("b"), "a.b": box(), "a_b": box()})
    rows = joined(collect(partial(vec, space), storage=tmp_path / "s", **BUDGET)[0])
    check(rows, a__b=100, **{"a.b": 200, "a_b": 300})
    with open_storage(tmp_path / "s") as storage:
        assert storage.column(("a.b",))[0] - storage.column(("a", "b"))[0] == 100


def test_a_slash_in_a_name_beside_the_group_of_that_name() -> None:
    space = spaces.Dict({"a": group("b"), "a/b": box()})
    rows = joined(collect(partial(vec, space), rename={"a/b": "flat"}, **BUDGET)[0])
    check(rows, a__b=100, flat=200)
    rows = joined(collect(partial(vec, space), rename={("a", "b"): "deep"}, **BUDGET)[0])
    check(rows, deep=100, **{"a/b": 200})


@pytest.mark.parametrize(
    ("space", "infos", "rename", "wanted"),
    [
        (group("lives", "o"), ["lives"], {"lives": "seen"}, {"seen": 100, "lives": 90_000}),
        (group("o"), ["action"], {"action": "told"}, {"told": 80_000}),
        (spaces.Dict({"lives": group("x")}), ["lives"], {"lives": "l"}, {"lives": 90_000}),
        (group("lives_given"), [Info("lives", int, fill=0)], {"lives_given": "g"}, {"g": 100}),
    ],
)
def test_infos_and_observations_of_one_name(
    space: Any, infos: Any, rename: Any, wanted: dict[str, int]
) -> None:
    with pytest.raises(NameRefused, match=r"an info has it.*rename=\{"):
        SyncCollector(partial(vec, space), info_keys=infos, **BUDGET)
    batches, _ = collect(partial(vec, space), info_keys=infos, rename=rename, **BUDGET)
    check(joined(batches), **wanted)


@pytest.mark.parametrize(
    ("rename", "kind", "match"),
    [
        (
            {"nope": "x"},
            ArgumentError,
            r"expected the names of columns, got 'nope'\. The columns are 'o",
        ),
        ({"o": "x", "p": "x"}, NameRefused, "'x' is taken twice"),
        ({"o": "p"}, NameRefused, "'p' is taken twice"),
        ({"o": ("p", "q")}, NameRefused, "'p/q' and the name 'p' collide"),
        ({"o": "reward"}, NameRefused, "'reward' is taken twice: it is the name of the reward"),
        ({"o": "next/o"}, NameRefused, "tallyroll reserves it for its own columns"),
        ({"t": "x", ("t", "0"): "y"}, ArgumentError, "'t/0' is renamed twice, by 't' and by"),
        ({"o": ""}, ArgumentError, "expected a new name for 'o'.* not empty, got ''"),
        ({"o": 3}, ArgumentError, "expected a new name for 'o'.*got 3"),
        (["o"], ArgumentError, "rename: expected a mapping of old names to new ones"),
    ],
)
def test_renames_that_cannot_be_right(rename: Any, kind: Any, match: str, tmp_path: Path) -> None:
    space = spaces.Dict({"o": box(), "p": box(), "t": spaces.Tuple((box(), box()))})
    with pytest.raises(kind, match=match):
        SyncCollector(partial(vec, space), storage=tmp_path / "s", rename=rename, **BUDGET)
    assert not list(tmp_path.iterdir())


def test_two_columns_change_names_with_each_other() -> None:
    rows = joined(collect(partial(vec, group("o", "p")), rename={"o": "p", "p": "o"}, **BUDGET)[0])
    check(rows, p=100, o=200)


def test_two_columns_of_a_torchrl_environment_do_too() -> None:
    rename = {"own": "told", "told": "own"}
    rows = joined(collect(partial(Echo, "told"), rename=rename, **BUDGET)[0])
    assert torch.equal(rows["told"], rows["collector", "step"])
    assert torch.equal(rows["next", "own"], rows["action"])


def test_a_plain_observation_and_a_tuple_have_other_names_too() -> None:
    rows = joined(collect(partial(vec, box()), rename={"observation": "state"}, **BUDGET)[0])
    check(rows, state=0)
    both = spaces.Tuple((box(), box()))
    rows = joined(collect(partial(vec, both), rename={"observation": "both"}, **BUDGET)[0])
    check(rows, both__0=100, both__1=200)


def test_renamed_columns_are_checked_and_seen_by_the_policy() -> None:
    class Wrong(Numbered):
        def _value(self, space: Any, path: Any) -> Any:
            value = super()._value(space, path)
            return value - 999 if path == ("action",) and self.steps == 3 else value

    seen = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(sorted(td.keys()))
        return td.set("action", torch.ones(1, dtype=torch.int64))

    env = SyncVectorEnv([partial(Wrong, group("action"))], autoreset_mode=SAME)
    with pytest.raises(TransitionError, match=r"next/before lies outside its space at lane 0, st"):
        collect(env, policy, rename={"action": "before"}, **BUDGET)
    assert seen[-1] == ["before"]


# --- TorchRL's environments -----------------------------------------------------------------------


class Echo(EnvBase):
    """Environment whose observation ``key`` echoes the previous action, or 9 after a reset."""

    def __init__(self, key: Any = "action") -> None:
        super().__init__(batch_size=[])
        self.key = key
        self.observation_spec = Composite(own=Unbounded((), dtype=torch.int64))
        self.observation_spec[key] = Unbounded((), dtype=torch.int64)
        self.action_spec = Categorical(5, shape=(), dtype=torch.int64)
        self.reward_spec = Unbounded((1,))

    def _out(self, echoed: Any) -> TensorDict:
        td = TensorDict({"own": torch.tensor(self.steps), "done": [self.steps >= LENGTH]})
        return td.set(self.key, torch.as_tensor(echoed))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self.steps = 0
        return self._out(9)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.steps += 1
        return self._out(tensordict["action"]).set("reward", torch.zeros(1))

    def _set_seed(self, seed: int | None) -> None:
        pass


ECHOES: dict[str, Any] = {
    "plain": Echo,
    "transformed": lambda key="action": TransformedEnv(Echo(key), StepCounter()),
    "serial": lambda key="action": SerialEnv(2, partial(Echo, key)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("key", ["action", "next", ("collector", "mine")])
@pytest.mark.parametrize("kind", ECHOES)
def test_an_echoed_action_of_a_torchrl_environment(kind: str, key: Any, workers: int) -> None:
    if kind == "serial" and key != "action":
        return  # TorchRL itself refuses these names.
    with pytest.raises(NameRefused, match=r"rename=\{"):
        SyncCollector(partial(ECHOES[kind], key), **BUDGET)
    create, kwargs = partial(ECHOES[kind], key), {"rename": {key: "before"}, **BUDGET}
    if workers:
        with in_threads():
            rows = joined(collect_all(start([create] * workers, **kwargs)).batches)
    else:
        rows = joined(collect(create, **kwargs)[0])
    assert torch.equal(rows["next", "before"], rows["action"])
    assert torch.equal(rows["before"] == 9, rows["collector", "step"] == 0)
    assert len(rows["action"].unique()) > 1


def test_renaming_a_given_adapter_is_for_the_adapter() -> None:
    env = GymnasiumVectorEnv(vec(group("o")), rename={"o": "p"})
    with pytest.raises(
        ArgumentError, match=r"rename: expected an environment .*, got a GymnasiumVectorEnv"
    ):
        SyncCollector(env, rename={"p": "q"}, **BUDGET)
    check(joined(collect(env, **BUDGET)[0]), p=100)


def test_a_step_count_of_the_environments_own_is_not_written_over() -> None:
    kwargs = {"max_frames_per_traj": 3, **BUDGET}
    for create in (partial(vec, group("step_count")), partial(Echo, "step_count")):
        with pytest.raises(NameRefused, match="max_frames_per_traj counts in a column 'step_cou"):
            SyncCollector(create, **kwargs)
    rows = joined(
        collect(partial(vec, group("step_count")), rename={"step_count": "own"}, **kwargs)[0]
    )
    assert torch.equal(rows["own"].long(), 100 + rows["collector", "step"])
    assert torch.equal(rows["step_count"].flatten(), rows["collector", "step"])


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["gymnasium", "torchrl"])
@pytest.mark.parametrize(
    "key",
    [
        "reward",
        "",
        "collector",
        ("collector", "step"),
        ("collector", "own"),
        ("reward", "x"),
    ],
)
def test_keys_of_a_policy_that_are_taken(env: str, key: Any) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        zeros = torch.zeros(td.batch_size, dtype=torch.int64)
        return td.set("action", zeros).set(key, zeros.clone())

    create: Any = partial(vec, group("o")) if env == "gymnasium" else partial(Echo, "o")
    with pytest.raises(NameRefused, match="the policy's out_keys"):
        SyncCollector(create, policy, **BUDGET)


def test_keys_of_a_policy_with_an_underscore_are_its_own() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        zeros = torch.zeros(td.batch_size, dtype=torch.int64)
        return td.set("action", zeros).set("_step", zeros.clone()).set(("a", "_own"), zeros.clone())

    rows = joined(collect(partial(vec, group("o")), policy, **BUDGET)[0])
    assert not [key for key in rows.keys(True, True) if "_step" in key or "_own" in key]


# --- workers, resume, command line ----------------------------------------------------------------


def test_renamed_columns_through_a_resume(tmp_path: Path) -> None:
    space = group("action", "zeta")
    kwargs = {"rename": {"action": "before"}, "storage": tmp_path / "s"}
    collect(partial(vec, space), frames_per_batch=7, total_frames=20, seed=1, **kwargs)
    with pytest.raises(NameRefused):
        SyncCollector(partial(vec, space), resume=True, storage=tmp_path / "s", **BUDGET)
    makes = [partial(vec, space, 1)] * 2
    with in_threads():
        collect_all(start(makes, resume=True, frames_per_batch=7, total_frames=40, **kwargs))
    with open_storage(tmp_path / "s") as storage:
        assert storage.head == 40
        assert [run["call"]["rename"] for run in storage.manifest["runs"]] == [
            ["action=before"]
        ] * 2
        step = storage.column(("collector", "step"))
        assert (storage.column(("before",)) == 100 + step).all()
        assert (storage.column(("next", "zeta")) == 201 + step).all()
    assert not verify(tmp_path / "s").findings


def test_the_command_line_renames_declares_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gym.register("tallyroll/Colliding-v0", partial(Numbered, group("action", "lives", "o")))
    try:
        words = ["collect", "tallyroll/Colliding-v0", "--frames", "20", "--out", "data", "--quiet"]
        assert main([*words]) == 1
        infos = ["--info-keys", "lives:float64,none:int32[2x3]=-1"]
        assert main([*words, *infos, "--rename", "action=before", "--rename", "lives=seen"]) == 0
        assert main(["collect", "--resume", "--frames", "40", "--out", "data", "--quiet"]) == 0
    finally:
        gym.registry.pop("tallyroll/Colliding-v0")
    with open_storage("data") as storage:
        assert storage.head == 40
        step = storage.column(("collector", "step"))
        assert (storage.column(("before",)) == 100 + step).all()
        assert (storage.column(("seen",)) == 200 + step).all()
        assert (storage.column(("lives",)) == 90_000 + step).all()
        assert storage.column(("lives",)).dtype == np.float64
        assert (storage.column(("none",)) == np.full((2, 3), -1)).all()
        assert not storage.column(("none_given",)).any()
    assert not verify("data").findings
