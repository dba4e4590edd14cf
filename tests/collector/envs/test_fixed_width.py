"""TorchRL environments with strings, tensors of any length, action masks and recorders."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import (
    ActionMask,
    ChessEnv,
    Compose,
    EnvBase,
    ExcludeTransform,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from torchrl.record import TensorDictRecorder, VideoRecorder

from tallyroll.collector import FixedWidth
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError

from collect_kit import collect, joined

SIZES = {"said": 12, "var": (6, 2)}


class Odd(EnvBase):
    """Environment that encodes lane, episode and step in each of `shows`.

    Episodes have 2 + lane steps.
    """

    def __init__(self, *shows: str, lanes: int | None = None, first: int = 0) -> None:
        super().__init__(batch_size=() if lanes is None else (lanes,))
        self.shows, shape = shows, self.batch_size
        specs = {
            "observation": Unbounded((*shape, 3)),
            "said": NonTensor(shape, example_data="words"),
            "any": NonTensor(shape, example_data=object()),
            "var": Unbounded((*shape, -1, 2)),
            "pixels": Unbounded((*shape, 8, 8, 3), dtype=torch.uint8),
            "action_mask": Binary(4, (*shape, 4), dtype=torch.bool),
        }
        shown = {name: specs[name] for name in ("observation", *shows)}
        self.observation_spec = Composite(shown, shape=shape)
        self.action_spec = Categorical(4, shape=shape)
        self.reward_spec = Unbounded((*shape, 1))
        lane = torch.arange(first, first + (lanes or 1)).reshape(shape)
        self.at = torch.stack([lane, lane * 0 - 1, lane * 0], -1)

    def _seen(self) -> TensorDict:
        td = TensorDict({"observation": self.at.float()}, self.batch_size)
        step = self.at[..., 2]
        for name in self.shows:
            value: Any
            if name in ("said", "any"):
                made = self.at.tolist() if self.batch_size else [self.at.tolist()]
                texts = [told(each) if name == "said" else object() for each in made]
                value = NonTensorStack(*texts) if self.batch_size else texts[0]
                td.set_non_tensor(name, value) if not self.batch_size else td.set(name, value)
                continue
            if name == "var":
                value = torch.ones(*self.batch_size, int(step.max()) + 1, 2)
            elif name == "pixels":
                value = (self.at[..., 1] * 10 + step).to(torch.uint8)[..., None, None, None]
                value = value.expand(*self.batch_size, 8, 8, 3).clone()
            else:
                value = (torch.arange(4) // 2) == (step % 2)[..., None]
            td.set(name, value)
        return td

    def _reset(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if td is None else td.get("_reset", None)
        mask = torch.ones_like(self.at[..., 0]).bool() if mask is None else mask[..., 0]
        new = torch.stack([self.at[..., 0], self.at[..., 1] + 1, self.at[..., 2] * 0], -1)
        self.at = torch.where(mask[..., None], new, self.at)
        return self._seen()

    def _step(self, td: TensorDictBase) -> TensorDict:
        if "action_mask" in self.shows:
            legal = self._seen()["action_mask"].gather(-1, td["action"][..., None])
            assert legal.all(), "an illegal action"
        self.at = self.at + torch.tensor([0, 0, 1])
        ended = (self.at[..., 2] >= 2 + self.at[..., 0])[..., None]
        return self._seen().update(
            {"reward": torch.ones(*ended.shape), "done": ended, "terminated": ended.clone()}
        )

    def _set_seed(self, seed: int | None) -> None:
        """Ignore the seed, because nothing is random."""


def told(numbers: Any) -> str:
    lane, episode, step = map(int, numbers)
    return f"é{lane} e{episode} s{step}"


def fixed(*shows: str, lane: int = 0, lanes: int | None = None) -> TransformedEnv:
    sizes = {name: SIZES[name] for name in shows}
    return TransformedEnv(Odd(*shows, lanes=lanes, first=lane), FixedWidth(sizes))


def run(env: Any, **kwargs: Any) -> TensorDictBase:
    kwargs = {"frames_per_batch": 16, "total_frames": 40, "seed": 0, **kwargs}
    return joined(collect(env, **kwargs)[0])


BOTH = [partial(fixed, "said", "var", lane=lane) for lane in range(2)]
ENVS: dict[str, Any] = {
    "one": BOTH[0],
    "lanes": partial(fixed, "said", "var", lanes=2),
    "serial": lambda: SerialEnv(2, BOTH),
    "parallel": lambda: ParallelEnv(2, BOTH, mp_start_method="fork"),
    "outside": lambda: TransformedEnv(
        SerialEnv(2, [partial(Odd, "said", first=lane) for lane in range(2)]),
        FixedWidth({"said": 12}),
    ),
}


@pytest.mark.parametrize("name", list(ENVS))
def test_strings_and_lengths_become_columns(name: str) -> None:
    rows = run(ENVS[name])
    assert rows.numel() == 40
    assert rows["next", "done"].sum() > 8
    for at in ((), ("next",)):
        said, seen = rows[(*at, "said")], rows[(*at, "observation")]
        assert said.dtype is torch.uint8
        words = [bytes(each.tolist()).rstrip(b"\0").decode() for each in said]
        assert words == [told(each) for each in seen.tolist()]
        if name != "outside":
            var = rows[(*at, "var")]
            assert var.shape[1:] == (6, 2)
            if name != "lanes":  # the longest lane determines the length of all lanes there
                assert torch.equal(var.sum((1, 2)), 2 * (seen[:, 2] + 1))


def test_torchrl_checks_the_specs() -> None:
    check_env_specs(fixed("said", "var"))


def test_chess_keeps_its_positions() -> None:
    env = ChessEnv(include_fen=True, stateful=True)
    env.append_transform(FixedWidth({"fen": 92}))
    rows = run(env, total_frames=12)
    fens = [bytes(each.tolist()).rstrip(b"\0").decode() for each in rows["fen"]]
    assert fens[0].startswith("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w")
    assert len(set(fens)) == 12


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(Odd, "said"), r'said is NonTensor, .*FixedWidth\({"said": bytes}\)'),
        (partial(Odd, "any"), r'any is NonTensor, .*ExcludeTransform\("any"\)'),
        (
            partial(Odd, "var"),
            r'var: expected a fixed shape, got \[-1, 2\].*FixedWidth\({"var": shape}\)',
        ),
    ],
)
def test_without_it_they_are_refused(make: Any, match: str) -> None:
    with pytest.raises(EnvironmentRefused, match=match):
        run(make)


def test_what_does_not_fit() -> None:
    small = TransformedEnv(Odd("said"), FixedWidth({"said": 3}))
    with pytest.raises(TransitionError, match=r"said: expected at most \[3\], got \[9\]"):
        run(small)
    other = TransformedEnv(Odd("any"), FixedWidth({"any": 3}))
    with pytest.raises(TransitionError, match="any: expected a string or a tensor, got object"):
        run(other)
    assert run(TransformedEnv(Odd("any"), ExcludeTransform("any"))).numel() == 40
    for size in (0, (), (3, -1)):
        with pytest.raises(ArgumentError, match="expected a number of bytes or a shape for 'said'"):
            FixedWidth({"said": size})


# --- masks and recorders --------------------------------------------------------------------------


def masked(lane: int = 0, lanes: int | None = None) -> TransformedEnv:
    return TransformedEnv(Odd("action_mask", first=lane, lanes=lanes), ActionMask())


@pytest.mark.parametrize(
    "make",
    [
        partial(Odd, "action_mask"),
        partial(Odd, "action_mask", lanes=3),
        masked,
        partial(masked, lanes=3),
        lambda: SerialEnv(2, [partial(masked, lane) for lane in range(2)]),
        lambda: TransformedEnv(
            SerialEnv(2, [partial(Odd, "action_mask", first=lane) for lane in range(2)]),
            ActionMask(),
        ),
    ],
)
def test_masks_are_honoured(make: Any) -> None:
    """The environment raises at illegal actions."""
    rows = run(make)
    assert rows["action_mask"].gather(-1, rows["action"][:, None]).all()


@pytest.mark.parametrize("lanes", [None, 2])
def test_recorders_record_what_torchrls_rollout_lets_them_record(lanes: int | None) -> None:
    seen = []
    for ours in (True, False):
        video = VideoRecorder(None, "tag", skip=1, make_grid=False)
        tds = TensorDictRecorder("file", skip=1, skip_reset=False)
        env = TransformedEnv(Odd("pixels", lanes=lanes), Compose(video, tds))
        if ours:
            rows = run(env)
        else:
            env.rollout(40 // (lanes or 1), break_when_any_done=False)
        pictures = [int(picture.flatten()[0]) for picture in video.obs]
        seen.append((pictures, [td["observation"].tolist() for td in tds.td]))
    for one, other in zip(*seen, strict=True):  # TorchRL's rollout ends before the last reset
        assert len(other) <= len(one) <= len(other) + (lanes or 1)
        assert one[: len(other)] == other
    assert len(seen[0][0]) > 40
    want = rows["next", "observation"][:, 1] * 10 + rows["next", "observation"][:, 2]
    assert torch.equal(rows["next", "pixels"][:, 0, 0, 0].float(), want)


def test_a_recorder_dumps_each_episode() -> None:
    class Logger:
        videos: list[Any] = []  # noqa: RUF012

        def log_video(self, *, video: torch.Tensor, **kwargs: Any) -> None:
            self.videos.append(video)

    recorder = VideoRecorder(Logger(), "tag", skip=1, dump_on_done=True)  # type: ignore[arg-type]
    rows = run(TransformedEnv(Odd("pixels"), recorder))
    ends = int(rows["next", "done"].sum())
    assert len(Logger.videos) == ends == 20
    for episode, video in enumerate(Logger.videos):  # first observation and two steps
        assert video[0, :, 0, 0, 0].tolist() == [episode * 10 + step for step in range(3)]
