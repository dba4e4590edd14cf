"""Environments of JAX: a collector beside the raw jitted loop of each, at 1, 8 and 64 lanes.

    python benchmarks/functional_systems.py gymnax:CartPole-v1 jumanji:Snake-v1 smax:3m
    python benchmarks/functional_systems.py brax:inverted_pendulum playground:CartpoleBalance

The raw loop is one compiled call of the system's own step, batched, with its own auto-reset, and
what it returns as NumPy arrays. Both get random actions; rounds are interleaved, and the best of
each is shown, in microseconds a vector step: CPU time of all threads, and time that passed. Real
Brax and Playground compile for minutes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tallyroll.collector import SyncCollector
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.systems.functional import Functional

KWARGS: dict[str, dict[str, Any]] = {
    "jumanji:Snake-v1": {"unbounded": ["step_count"]},
    "brax:inverted_pendulum": {"backend": "spring"},
}


def raw(name: str, system: Any, lanes: int) -> Callable[[int], None]:
    """The system's own loop; its argument is how many vector steps."""
    import jax

    env, kind = system._env, name.partition(":")[0]
    keys = jax.random.split(jax.random.PRNGKey(0), lanes)
    if kind in ("brax", "playground"):
        if kind == "brax":
            from brax.envs.wrappers.training import wrap
        else:
            from mujoco_playground import wrapper

            wrap = wrapper.wrap_for_brax_training
        env = wrap(env)
        start, advance = env.reset, lambda key, state, action: env.step(state, action)
        seen: Any = lambda state: (state.obs, state.reward, state.done)  # noqa: E731
    elif kind == "jumanji":
        from jumanji.wrappers import VmapAutoResetWrapper

        env = VmapAutoResetWrapper(env)
        start, advance = env.reset, lambda key, both, action: env.step(both[0], action)
        seen = lambda both: (both[1].observation, both[1].reward, both[1].last())  # noqa: E731
    elif kind == "gymnax":
        params = system._params
        start = jax.vmap(lambda key: env.reset(key, params)[::-1])
        both = jax.vmap(lambda k, s, a: env.step(k, s, a, params))

        def advance(key: Any, state: Any, action: Any) -> Any:
            found = both(jax.random.split(key, lanes), state[0], action)
            return found[1], found[0], found[2], found[3]

        seen = lambda state: state[1:]  # noqa: E731
    else:
        start = jax.vmap(lambda key: env.reset(key)[::-1])

        def one(key: Any, state: Any, action: Any) -> Any:
            chosen = {agent: action[at] for at, agent in enumerate(env.agents)}
            found = env.step(key, state, chosen)
            return found[1], found[0], found[2], found[3]

        def advance(key: Any, state: Any, action: Any) -> Any:
            return jax.vmap(one)(jax.random.split(key, lanes), state[0], action)

        seen = lambda state: state[1:]  # noqa: E731

    @jax.jit
    def turn(key: Any, state: Any, action: Any) -> Any:
        key, own = jax.random.split(key)
        state = advance(own, state, action)
        return key, state, seen(state)

    (spec,) = system.declares.action.values()
    actions = [spec.expand(lanes, *spec.shape).rand().numpy() for _ in range(64)]
    held = {"state": jax.jit(start)(keys), "key": jax.random.PRNGKey(1)}
    if kind in ("gymnax", "smax"):  # what a step returns besides, in the carry too
        _, held["state"], _ = jax.jit(lambda k, s, a: (k, advance(k, s, a), None))(
            held["key"], held["state"], actions[0]
        )

    def loop(steps: int) -> None:
        key, state = held["key"], held["state"]
        for at in range(steps):
            key, state, out = turn(key, state, actions[at % 64].copy())
            for leaf in jax.tree.leaves(out):
                np.asarray(leaf)
        held.update(state=state, key=key)

    return loop


def ours(system: Any, steps: int, frames: int) -> Callable[[int], None]:
    collector = SyncCollector(
        system, None, frames_per_batch=steps * system.declares.lanes, total_frames=frames, seed=0
    )
    batches = iter(collector)
    return lambda steps: next(batches)


def best(loops: list[Callable[[int], None]], steps: int, rounds: int) -> list[tuple[float, float]]:
    found = [(float("inf"), float("inf"))] * len(loops)
    for _ in range(rounds):
        for at, loop in enumerate(loops):
            cpu, wall = time.process_time(), time.perf_counter()
            loop(steps)
            took = (time.process_time() - cpu, time.perf_counter() - wall)
            found[at] = tuple(min(o, n * 1e6 / steps) for o, n in zip(found[at], took, strict=True))  # type: ignore[assignment]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':<26}{'lanes':>6}{'raw cpu':>10}{'ours cpu':>10}{'raw':>9}{'ours':>9}{'ratio':>7}")
    for name in args.names:
        found = registry.find(name)
        assert found is not None, name
        for lanes in args.lanes:
            began = time.perf_counter()
            system: Any = found[0].make(found[1], lanes, None, **KWARGS.get(name, {}))
            assert isinstance(system, Functional)
            frames = args.steps * lanes * (args.rounds + 2)
            loops = [raw(name, system, lanes), ours(system, args.steps, frames)]
            for loop in loops:
                loop(args.steps)
            compiled = time.perf_counter() - began
            (a, b), (c, d) = best(loops, args.steps, args.rounds)
            print(
                f"{name:<26}{lanes:>6}{a:>10.0f}{c:>10.0f}{b:>9.0f}{d:>9.0f}{a / c:>7.2f}"
                f"   made and compiled in {compiled:.0f} s, "
                f"{system._turned._cache_size()} program",
                flush=True,
            )


if __name__ == "__main__":
    main()
