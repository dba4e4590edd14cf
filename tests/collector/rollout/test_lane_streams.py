"""Each lane's stream is the same, bit for bit, on every path, and every row is correct."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

from tallyroll.collector import GymnasiumVectorEnv

from collect_kit import (
    LENGTHS,
    Batches,
    ByObservation,
    assert_same,
    collect,
    joined,
    stream,
)
from oracles import (
    ACTIONS,
    ENDS,
    KINDS,
    Actions,
    Ends,
    Kind,
    OracleTorchEnv,
    OracleVectorEnv,
    check_rows,
    make_oracle_vec,
)

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
LANES, FRAMES, EACH = 3, 100, 18


def vec(mode: AutoresetMode, reset_slots: Any = "mask", cls: Any = "sync", **kwargs: Any) -> Any:
    if cls == "async":
        kwargs["vec_kwargs"] = {"context": "fork"}  # spawned workers need seconds to import torch
    return GymnasiumVectorEnv(
        make_oracle_vec(LANES, LENGTHS, mode=mode, cls=cls, **kwargs), reset_slots=reset_slots
    )


class Unseeded(GymWrapper):
    """TorchRL's wrapper without its seeding, which resets and would begin another episode."""

    def _set_seed(self, seed: int | None) -> None:
        pass


def wrapped(**kwargs: Any) -> EnvBase:
    vector = make_oracle_vec(LANES, LENGTHS, mode=DISABLED, **kwargs)
    env = Unseeded(vector, categorical_action_encoding=True)
    for lane in vector.envs:
        lane.episode = -1  # the wrapper resets during its construction
    return env


def serial(**kwargs: Any) -> EnvBase:
    lanes = [partial(OracleTorchEnv, None, LENGTHS, first_lane=i, **kwargs) for i in range(LANES)]
    return SerialEnv(LANES, lanes)


DRIVERS: dict[str, Callable[..., Any]] = {
    "next": partial(vec, NEXT),
    "next-avoided": partial(vec, NEXT, "avoid"),
    "same": partial(vec, SAME),
    "disabled": partial(vec, DISABLED),
    "native": partial(OracleVectorEnv, LANES, LENGTHS),
    "torch": partial(OracleTorchEnv, LANES, LENGTHS),
}
ASYNC: dict[str, Callable[..., Any]] = {
    "next": partial(vec, NEXT, cls="async"),
    "next-avoided": partial(vec, NEXT, "avoid", cls="async"),
    "same": partial(vec, SAME, cls="async"),
    "disabled": partial(vec, DISABLED, cls="async"),
}


def run(make: Callable[..., Any], kind: Kind, ends: Ends, action: Actions = "discrete") -> Batches:
    batches, collector = collect(
        lambda: make(kind=kind, ends=ends, action=action),
        ByObservation(kind, action),
        frames_per_batch=23,
        total_frames=FRAMES,
        seed=0,
    )
    assert collector.ledger.stored == FRAMES
    return batches


def assert_streams(batches: Batches, others: Batches, kind: Kind, ends: Ends) -> None:
    """Check the rows of both, and compare each lane's stream except for trajectory ids."""
    mine, theirs = joined(batches), joined(others)
    for rows in (mine, theirs):
        assert len(check_rows(rows, LENGTHS, kind=kind, ends=ends, from_start=True).lane) == FRAMES
    for batch in batches:
        check_rows(batch, LENGTHS, kind=kind, ends=ends)
    for lane in range(LANES):
        one, other = stream(mine, lane, EACH), stream(theirs, lane, EACH)
        assert len(one) == EACH
        assert_same(one, other)


@pytest.mark.parametrize("kind", ["float", "uint8", "dict", "tuple"])
@pytest.mark.parametrize("driver", list(DRIVERS))
def test_streams_are_those_of_the_plain_torch_environment(driver: str, kind: Kind) -> None:
    reference = run(DRIVERS["torch"], kind, "mixed")
    assert_streams(run(DRIVERS[driver], kind, "mixed"), reference, kind, "mixed")


@pytest.mark.parametrize("kind", ["discrete", "multidiscrete", "multibinary"])
@pytest.mark.parametrize("driver", ["next", "next-avoided", "same", "disabled", "native"])
def test_streams_of_integer_observations(driver: str, kind: Kind) -> None:
    reference = run(DRIVERS["torch"], kind, "mixed")
    assert_streams(run(DRIVERS[driver], kind, "mixed"), reference, kind, "mixed")


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("driver", ["next", "next-avoided", "same", "disabled", "native"])
def test_streams_however_episodes_end(driver: str, ends: Ends) -> None:
    reference = run(DRIVERS["torch"], "float", ends)
    assert_streams(run(DRIVERS[driver], "float", ends), reference, "float", ends)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("driver", ["next", "same", "disabled", "native", "torch"])
def test_the_action_that_is_stored_is_the_one_that_was_executed(
    driver: str, action: Actions
) -> None:
    batches = run(DRIVERS[driver], "float", "mixed", action)
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", action=action, from_start=True)
    assert_same(
        ByObservation("float", action)(rows.select("observation")).select("action"),
        rows.select("action"),
    )


@pytest.mark.parametrize("kind", ["float", "dict"])
@pytest.mark.parametrize("driver", list(ASYNC))
def test_streams_of_asynchronous_vectors(driver: str, kind: Kind) -> None:
    reference = run(DRIVERS[driver], kind, "mixed")
    batches = run(ASYNC[driver], kind, "mixed")
    assert_streams(batches, reference, kind, "mixed")
    assert_same(joined(batches), joined(reference))


@pytest.mark.parametrize("kind", ["float", "uint8", "dict"])
@pytest.mark.parametrize("driver", ["next", "next-avoided", "same", "disabled"])
def test_streams_of_torchrls_own_wrapper(driver: str, kind: Kind) -> None:
    reference = run(wrapped, kind, "mixed")
    assert_streams(run(DRIVERS[driver], kind, "mixed"), reference, kind, "mixed")


def test_streams_of_a_serial_environment() -> None:
    assert_streams(
        run(serial, "dict", "mixed"), run(DRIVERS["disabled"], "dict", "mixed"), "dict", "mixed"
    )


@pytest.mark.parametrize("driver", ["next-avoided", "same", "disabled"])
def test_modes_without_reset_slots_give_the_same_batches(driver: str) -> None:
    reference = run(DRIVERS["torch"], "float", "mixed")
    for one, other in zip(run(DRIVERS[driver], "float", "mixed"), reference, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [NEXT, SAME, DISABLED])
def test_a_reused_buffer_is_copied_or_refused(kind: Kind, mode: AutoresetMode) -> None:
    from tallyroll.collector.errors import EnvironmentRefused

    def make(**kwargs: Any) -> Any:
        return vec(mode, reuse_buffer=True, vec_kwargs={"copy": False}, **kwargs)

    if mode is SAME and kind not in ("discrete",):
        with pytest.raises(EnvironmentRefused, match="in one array that it overwrites"):
            run(make, kind, "mixed")
    else:
        check_rows(
            joined(run(make, kind, "mixed")), LENGTHS, kind=kind, ends="mixed", from_start=True
        )


def test_a_plain_function_is_a_policy_like_a_module() -> None:
    module = ByObservation()
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 50, "seed": 1}
    one, _ = collect(partial(vec, NEXT), module, **kwargs)
    other, _ = collect(partial(vec, NEXT), lambda td: ByObservation()(td), **kwargs)
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)
