"""Test `MixedSampler`: exact shares, and equal columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import (
    HindsightSampler,
    MemmapStorage,
    MixedSampler,
    PrioritizedSampler,
    TrajectorySliceSampler,
)
from tallyroll.storage.errors import ColumnsMissing, NoSlices, SchemaMismatch

SOURCE = ("collector", "source")


def filled(part: int, count: int = 20, **columns: torch.Tensor) -> MemmapStorage:
    storage = MemmapStorage()
    number = torch.arange(count)
    rows = {"part": torch.full((count,), part), "number": number, **columns}
    storage.extend(TensorDict(rows, [count]))
    return storage


@pytest.fixture(scope="module")
def three() -> Any:
    with filled(0) as one, filled(1) as two, filled(2) as three:
        yield one, two, three


def counts(batch: TensorDict, parts: int = 3) -> list[int]:
    assert torch.equal(batch[SOURCE], batch["part"])
    assert torch.equal(batch[SOURCE], batch[SOURCE].sort().values)
    found: list[int] = batch[SOURCE].bincount(minlength=parts).tolist()
    return found


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [
        ((1, 1, 2), 8, [2, 2, 4]),
        ((64, 128, 64), 256, [64, 128, 64]),
        ((0.7, 0.2, 0.1), 10, [7, 2, 1]),  # 0.7 + 0.2 is below 0.9 in floats
        ((1 / 3, 1 / 3, 1 / 3), 9, [3, 3, 3]),
        ((1e-9, 1e-9, 2e-9), 4, [1, 1, 2]),
    ],
)
def test_shares_that_are_whole_are_exact(
    three: Any, shares: tuple[float, ...], size: int, expected: list[int]
) -> None:
    mixed = MixedSampler([*zip(three, shares, strict=True)])
    assert all(counts(mixed.sample(size)) == expected for _ in range(10))


def test_other_shares_are_rounded_so_that_their_means_are_exact(three: Any) -> None:
    random = torch.Generator().manual_seed(0)
    mixed = MixedSampler([*zip(three, (0.5, 0.3, 0.2), strict=True)], generator=random)
    drawn = [mixed._counts(4, range(3), random) for _ in range(4000)]
    assert {sum(each) for each in drawn} == {4}
    for part, mean in enumerate((2.0, 1.2, 0.8)):
        seen = [each[part] for each in drawn]
        assert {*seen} == {int(mean), int(mean) + (mean % 1 > 0)}
        assert abs(sum(seen) / 4000 - mean) < 0.03  # four standard deviations
    assert sum(counts(mixed.sample(1))) == 1


def test_rows_are_drawn_uniformly_and_again_by_a_generator(three: Any) -> None:
    mixed = MixedSampler([(three[0], 1), (MixedSampler([(three[1], 1)]), 1)])
    number = mixed.sample(8000, generator=torch.Generator().manual_seed(1))["number"]
    parts = number.reshape(2, -1)
    assert all((part.bincount(minlength=20) - 200).abs().max() < 60 for part in parts)
    assert torch.equal(
        number, mixed.sample(8000, generator=torch.Generator().manual_seed(1))["number"]
    )


def test_samplers_buffers_and_functions_are_parts(three: Any) -> None:
    one, _, three_ = three
    prioritized = PrioritizedSampler(one)
    prioritized.update_priority(range(20), [0.0] * 19 + [1.0])
    kept = three_.get(range(20))
    with filled(1) as two:
        buffer = TensorDictReplayBuffer(storage=two, batch_size=10)
        mixed = MixedSampler(
            [(prioritized, 1), (buffer, 1), (lambda n: kept[:n], 1)],
            fill={"priority_weight": 1.0, ("collector", "row"): -1, "index": -1},
        )
        batch = mixed.sample(30)
    assert counts(batch) == [10, 10, 10]
    assert (batch["number"][:10] == 19).all()
    assert batch["collector", "row"].tolist() == [19] * 10 + [-1] * 20
    assert (batch["priority_weight"][10:] == 1).all()
    assert SOURCE not in kept.keys(True)  # the batch of the function is unchanged
    prioritized.update_priority(batch[batch[SOURCE] == 0], 0.0)


def test_slices_are_mixed_too(three: Any) -> None:
    rows = three[0].get(range(20)).reshape(4, 5)
    batch = MixedSampler([(lambda n: rows[:n], 1), (lambda n: rows[-n:], 3)]).sample(4)
    assert batch.shape == (4, 5)
    assert batch[SOURCE].tolist() == [[0] * 5, [1] * 5, [1] * 5, [1] * 5]


def test_a_part_without_rows_is_an_error_or_left_to_the_others(three: Any) -> None:
    with MemmapStorage() as online:
        parts = [(three[0], 1), (online, 2), (three[1], 1)]
        with pytest.raises(NoSlices, match=r"part 1, .*, has nothing to draw: .* no rows yet"):
            MixedSampler(parts).sample(8)
        mixed = MixedSampler(parts, empty="others")
        assert mixed.sample(8)[SOURCE].bincount().tolist() == [4, 0, 4]
        with pytest.raises(NoSlices, match="nothing to draw"):
            MixedSampler([(online, 1)], empty="others").sample(1)
        online.extend(three[2].get(range(3)))
        assert mixed.sample(8)[SOURCE].bincount().tolist() == [2, 4, 2]


# --- bad input ------------------------------------------------------------------------------------


def test_columns_that_differ_are_named(three: Any) -> None:
    other = {"number": torch.zeros(5, 2), "more": torch.zeros(5)}
    with filled(1, 5, **other) as storage:
        parts = [(three[0], 1), (storage, 1)]
        with pytest.raises(
            SchemaMismatch,
            match=r"number is torch.int64 \[\] in part 0 and torch.float32 \[2\] in part 1; more "
            r"is missing in part 0 and torch.float32 \[\] in part 1. Name the shared",
        ):
            MixedSampler(parts).sample(4)
        batch = MixedSampler(parts, keys=["part"]).sample(4)
        assert {*batch.keys(True, True)} == {"part", SOURCE}
        with pytest.raises(
            ColumnsMissing, match=r"part 0, .*, has no more. In keys=, name only columns"
        ):
            MixedSampler(parts, keys=["more"]).sample(4)


@pytest.mark.parametrize("shares", [(1, 1e-9), (1e-9, 1), (2e6, 1, 1), (1e300, 1e-300)])
def test_a_share_that_is_never_drawn_is_refused(three: Any, shares: tuple[float, ...]) -> None:
    with pytest.raises(
        ValueError, match="expected each share to be at least a millionth of all shares"
    ):
        MixedSampler([*zip(three, shares, strict=False)])
    MixedSampler([(three[0], 1e-9), (three[1], 2e-9)])  # equally small


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_a_share_is_a_number_above_0(three: Any, share: Any) -> None:
    with pytest.raises(ValueError, match="expected a share above 0, got"):
        MixedSampler([(three[0], share)])


def test_other_wrong_arguments_are_refused(three: Any) -> None:
    wrong: list[Any] = [[], three, [three[0]], [(three[0], 1, 2)]]
    for parts in wrong:
        with pytest.raises(
            ValueError, match="parts: expected one or more pairs of a storage or sampler"
        ):
            MixedSampler(parts)
    with pytest.raises(ValueError, match="empty: expected one of 'error', 'others', got 'skip'"):
        MixedSampler([(three[0], 1)], empty="skip")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"objects with sample\(n\), or functions of n, got dict"):
        MixedSampler([({}, 1)])
    with pytest.raises(TypeError, match=r"works only in a replay buffer. Give the function"):
        MixedSampler([(TrajectorySliceSampler(2), 1)])
    for size in (0, 1.5, None):
        with pytest.raises(ValueError, match="batch_size: expected a whole number above 0"):
            MixedSampler([(three[0], 1)]).sample(size)
    for returned in ([1, 2], three[0].get([0])):
        with pytest.raises(
            ValueError, match=r"part 0, function: expected a TensorDict \[2, \.\.\.\] for 2 rows"
        ):
            MixedSampler([(lambda n, found=returned: found, 1)]).sample(2)
    with pytest.raises(TypeError, match=r"a storage of tallyroll.storage"):
        HindsightSampler(three, lambda *_: 0)
