"""TorchRL's own protocol over a system, for code that steps an environment by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector.counting.numbering import lane_seed
from tallyroll.collector.envs.arrays import as_flags, as_tensor, fitting, whole
from tallyroll.collector.envs.checked_env import CheckedEnv
from tallyroll.collector.envs.system import Array, Step
from tallyroll.collector.errors import EnvironmentRefused, TransitionError, ValueRefused
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import NEXT, NEXT_VALID, VALID, spell

_FLAGS = ("terminated", "truncated", "done")


class ProtocolEnv(CheckedEnv):
    """``step`` and ``reset``, as transforms and batched environments call them."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        d = self._declares
        out = self._stepped([self._action(tensordict.get(key)) for key in d.action])
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        values = [self._tensor(index, value) for index, value in enumerate(out.obs)]
        terminated, truncated = (as_flags(each) for each in (out.terminated, out.truncated))
        ended = terminated | truncated
        valid = np.ones(d.lanes, np.bool_)
        if d.at_end == "first" and ended.any():
            self._fresh, self._fresh_lanes = [value.clone() for value in values], ended
            at = torch.from_numpy(ended).to(self.device)
            for index, value in enumerate(values):
                if out.final is not None:
                    value[at] = self._tensor(index, out.final[index])[at]
            if out.final is None and d.finals == "extra":
                raise self._lost_finals(ended)
            if d.finals == "some":
                given = out.final is not None and out.final_valid is not None
                valid[ended] = as_flags(out.final_valid)[ended] if given else False
            self._draw_contexts(ended)
        self._require_skipped(out.skipped, self._pending)
        transitions = ~self._pending
        if d.at_end == "reset_slot":
            self._draw_contexts(self._pending)
            self._pending = ended.copy()
        td = self._td(values)
        for key, given in zip(d.reward, out.reward, strict=True):
            spec, reward = self.full_reward_spec[key], given
            if self.fills:
                row = np.empty(tuple(spec.shape), NUMPY[spec.dtype])
                row = row if np.shape(given) == row.shape else row[..., 0]
                try:
                    reward = fitting(given, row, (NEXT, *key))
                except (TypeError, ValueError, ValueRefused) as error:
                    raise self._unfit(out, error) from error
            td.set(key, as_tensor(reward, self.device).to(spec.dtype).reshape(spec.shape))
        flags = {"terminated": terminated, "truncated": truncated, "done": ended}
        for name in _FLAGS:
            td.set(name, torch.from_numpy(flags[name]).to(self.device)[:, None])
        for group in d.groups:
            ends = [as_flags(each) for each in out.agents[group]]
            for name, flag in zip(_FLAGS, [*ends, ends[0] | ends[1]], strict=True):
                td.set((group, name), torch.from_numpy(flag).to(self.device)[..., None])
        if self.marks_transitions:
            td.set(VALID, torch.from_numpy(transitions).to(self.device)[:, None])
        if d.finals == "some":
            td.set(NEXT_VALID, torch.from_numpy(valid).to(self.device))
        return td

    def _stepped(self, action: Sequence[Array]) -> Step:
        """A step of all lanes, also where lanes come back in any order."""
        d = self._declares
        if not d.arrivals:
            return self.system.step(action)
        if d.lanes % d.arrivals:
            raise EnvironmentRefused(
                f"{self.kind}: {d.lanes} lanes that are stepped together, as through a transform, "
                f"have to be a multiple of the {d.arrivals} that come a call; make more or fewer"
            )
        lanes = np.arange(d.lanes, dtype=np.int32)
        for part in np.split(lanes, range(d.arrivals, d.lanes, d.arrivals)):
            self.system.send([each[part] for each in action], part)
        return whole(self.system, d.lanes)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        lanes = None if mask is None else mask.reshape(-1).cpu().numpy()
        if lanes is None or (lanes.all() and not self._fresh_lanes.any()):
            return self._reset_all(kwargs)
        asked = lanes & ~self._fresh_lanes
        values = self._fresh
        if asked.any():
            if not self.resets_by_mask:
                raise EnvironmentRefused(
                    f"{self.kind} ignores reset masks and would reset every lane; do not wrap it "
                    "in TransformedEnv or reset a part of it: apply wrappers of its own "
                    "underneath, or use one that resets by mask"
                )
            reset = self._values(self.system.reset(asked, None, **kwargs))
            self._draw_contexts(asked)
            kept = torch.from_numpy(self._fresh_lanes).to(self.device)
            for new, old in zip(reset, values, strict=bool(values)):
                new[kept] = old[kept]
            values = reset
        elif not values:
            values = [
                torch.zeros_like(self.observation_spec[k].zero()) for k in self.observation_keys
            ]
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = self._pending & ~lanes
        return self._with_flags(self._td(values))

    def _reset_all(self, kwargs: Mapping[str, Any]) -> TensorDictBase:
        kwargs = dict(kwargs)
        seeds = kwargs.pop("seed", self._seeds)
        if isinstance(seeds, int):
            seeds = [seeds + lane for lane in range(self.batch_size[0])]
        self._seeds = None
        how = self._declares.seeds
        again = self._declares.resets == "none" and self._started
        if seeds is not None:
            self._last, self._remade = list(seeds), 0
        elif again and self._last:
            self._remade += 1
            seeds = [lane_seed(each, 0, self._remade) for each in self._last]
        if (how == "make" and seeds is not None) or again:
            if self._make is not None:
                first_lane = self.first_lane
                self.system.close()
                self.system = self._make(seeds)
                self.first_lane = first_lane
            elif again:
                raise EnvironmentRefused(
                    f"{self.kind} cannot be reset, and nothing says how it is made again; pass a "
                    "factory that takes seeds (def make(seeds): …)"
                )
        self._seed_contexts(seeds)
        given = seeds if how in ("reset", "shared") else None
        observation = self.system.reset(None, given, **kwargs)
        self._started = True
        self._draw_contexts()
        if self.system.declares is not self._declares:
            self._declare()
            self.empty_cache()
        values = self._values(observation)
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = np.zeros_like(self._pending)
        return self._with_flags(self._td(values))

    def _action(self, action: torch.Tensor) -> Array:
        return action.clone() if self.device.type != "cpu" else action.numpy().copy()

    def _values(self, values: Sequence[Array]) -> list[torch.Tensor]:
        return [self._tensor(index, value) for index, value in enumerate(values)]

    def _tensor(self, index: int, value: Array) -> torch.Tensor:
        if self.fills:
            return torch.from_numpy(np.array(self._array(index, value)))
        key = self.observation_keys[index]
        found, spec = as_tensor(value, self.device), self.observation_spec[key]
        if (found.shape, found.dtype) != (spec.shape, spec.dtype):
            raise TransitionError(
                f"{spell(key)}: the space declares {spec.dtype} {list(spec.shape)}, the "
                f"environment returned {found.dtype} {list(found.shape)}"
            )
        return found

    def _td(self, values: Sequence[torch.Tensor]) -> TensorDict:
        td = TensorDict({}, self.batch_size, device=self.device)
        for group, size in self.groups.items():
            td.set(group, TensorDict({}, (*self.batch_size, size), device=self.device))
        for key, value in zip(self.observation_keys, values, strict=True):
            td.set(key, value)
        return td

    def _with_flags(self, td: TensorDict) -> TensorDict:
        if self.marks_transitions:
            td.set(VALID, torch.ones((*self.batch_size, 1), dtype=torch.bool, device=self.device))
        if self._declares.finals == "some":
            td.set(NEXT_VALID, torch.ones(self.batch_size, dtype=torch.bool, device=self.device))
        self._set_flags(td)
        return td

    def _set_flags(self, td: TensorDictBase) -> TensorDictBase:
        for key in self.done_spec.keys(True, True):
            td.set(key, torch.zeros_like(self.full_done_spec[key].zero()))
        return td
