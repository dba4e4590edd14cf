"""The simulated GPU behaves as CUDA does where a program could go wrong."""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from devices_kit import SIMULATED, only_simulated

if SIMULATED:
    import fakegpu

pytestmark = only_simulated
DEVICE = "fakegpu"


def on_device(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(DEVICE)


@pytest.fixture
def x() -> torch.Tensor:
    return on_device([1.0, 2.0, 3.0, 4.0])


def counts_of(call: Callable[[], Any]) -> dict[str, int]:
    fakegpu.reset_counts()
    call()
    return fakegpu.counts()


# --- memory ---------------------------------------------------------------------------------------


def in_fork(call: Callable[..., Any], *args: Any) -> int:
    """Return the exit code of a forked process that makes a call."""
    process = mp.get_context("fork").Process(target=call, args=args)
    process.start()
    process.join(30)
    assert process.exitcode is not None
    return process.exitcode


def test_access_by_the_host_ends_the_process(x: torch.Tensor) -> None:
    assert in_fork(ctypes.string_at, x.data_ptr(), 1) == -signal.SIGSEGV


def exit_if_refused() -> None:
    try:
        torch.zeros(1, device=DEVICE)
    except RuntimeError as error:
        os._exit(7 if "forked subprocess" in str(error) else 8)


def test_forked_processes_are_refused(x: torch.Tensor) -> None:
    assert in_fork(exit_if_refused) == 7


@pytest.mark.parametrize("read", [torch.Tensor.numpy, np.asarray])
def test_arrays_are_refused(read: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="to host memory first"):
        read(x)


def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(64, dtype=torch.uint8, device=DEVICE).cpu().ne(0).any()


# --- operators ------------------------------------------------------------------------------------

MIXED: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x + torch.ones(4),
    lambda x: torch.stack([x, torch.ones(4)]),
    lambda x: x.index_select(0, torch.tensor([1])),
    lambda x: torch.where(torch.ones(4, dtype=torch.bool), x, x),
]


@pytest.mark.parametrize("call", MIXED)
def test_two_devices_are_refused(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        call(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_an_index_on_the_device_is_refused_for_a_tensor_of_the_host(
    dtype: torch.dtype, x: torch.Tensor
) -> None:
    with pytest.raises(RuntimeError, match="indices should be either on"):
        torch.ones(4, dtype=dtype)[x > 2]


EQUAL: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x + torch.tensor(1.0),
    lambda x: x[torch.tensor([1, 2])],
    lambda x: x[torch.arange(1, 3).to(x.device)],
    lambda x: x[x > 2],
    lambda x: x.clone().index_put_((torch.tensor([0]).to(x.device),), torch.tensor(9.0)),
    lambda x: torch.where(torch.stack([x, x]) > 2, torch.cat([x, x]).view(2, 4), 0.0),
    lambda x: x.view(2, 2).t()[1],
    lambda x: x.unfold(0, 2, 1)[1],
    lambda x: [(y := x.clone()), y[1:3].add_(1)],
    lambda x: [(x > 2).cumsum(0), x.argmax(), (x > 2).nonzero(), x.sort(descending=True).values],
    lambda x: torch._foreach_add([x, x], 1),
    lambda x: x.view(torch.int32),
    lambda x: copy.deepcopy(x),
    lambda x: TensorDict({"a": x}, [4])[1:]["a"],
]


@pytest.mark.parametrize("call", EQUAL)
def test_operators_compute_as_on_the_cpu(
    call: Callable[[torch.Tensor], Any], x: torch.Tensor
) -> None:
    results = [
        found if isinstance(found, list | tuple) else [found] for found in (call(x), call(x.cpu()))
    ]
    for there, here in zip(*results, strict=True):
        assert there.device.type == DEVICE
        assert torch.equal(there.cpu(), here)


def test_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    there, x = copy.deepcopy(net).to(DEVICE), torch.randn(16, 4)
    net(x).square().mean().backward()
    there(x.to(DEVICE)).square().mean().backward()
    torch.testing.assert_close(there[0].weight.grad.cpu(), net[0].weight.grad)


def test_saved_tensors_return_to_their_device_or_to_another(x: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for where, expected in ((None, DEVICE), ("cpu", "cpu")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["x"]
        assert loaded.device.type == expected
        assert loaded.tolist() == [1, 2, 3, 4]


# --- generators -----------------------------------------------------------------------------------


def test_the_device_has_a_generator_of_its_own() -> None:
    torch.manual_seed(3)
    first = torch.rand(5, device=DEVICE).tolist()
    torch.manual_seed(3)
    torch.rand(9)
    assert torch.rand(5, device=DEVICE).tolist() == first
    own = torch.Generator(DEVICE).manual_seed(1)
    drawn = torch.rand(3, device=DEVICE, generator=own)
    assert torch.equal(drawn, torch.rand(3, device=DEVICE, generator=own.manual_seed(1)))
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())


# --- copies and waits -----------------------------------------------------------------------------


def test_a_copy_to_the_host_without_a_wait_is_read_too_early() -> None:
    there = torch.arange(1000.0).to(DEVICE)
    here = there.to("cpu", non_blocking=True)
    early = here.clone()
    torch.accelerator.synchronize()
    assert here.is_pinned()
    assert early.isnan().all()
    assert torch.equal(here, torch.arange(1000.0))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_source_in_pinned_memory_is_read_late(pinned: bool) -> None:
    """CUDA stages a pageable source before the call returns."""
    here = torch.zeros(10).pin_memory() if pinned else torch.zeros(10)
    there = here.to(DEVICE, non_blocking=True)
    here.fill_(7)
    assert there.cpu().tolist() == [7.0 if pinned else 0.0] * 10


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_needs_an_event(waits: bool) -> None:
    stream, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    here, there = torch.ones(10).pin_memory(), torch.zeros(10, device=DEVICE)
    with stream:
        there.copy_(here, non_blocking=True)
        event.record(stream)
    if waits:
        torch.accelerator.current_stream().wait_event(event)
    total = (there * 1).sum()
    torch.accelerator.synchronize()
    assert total.item() == (10 if waits else 0)


WAITS: list[tuple[int, Callable[[torch.Tensor], Any]]] = [
    (0, lambda x: (x * 2).cumsum(0).where(x > 1, x)),
    (0, lambda x: x.to("cpu", non_blocking=True)),
    (1, lambda x: bool((x > 0).any())),
    (1, lambda x: x.cpu()),
    (1, lambda x: torch.ones(4).to(x.device)),
    (1, lambda x: (x > 2).nonzero()),
    (1, lambda x: x[torch.tensor([1, 2])]),
    (1, lambda x: x[x > 2]),
    (0, lambda x: x[torch.arange(2, device=x.device)]),
]


@pytest.mark.parametrize(("expected", "call"), WAITS)
def test_waits_are_counted(
    expected: int, call: Callable[[torch.Tensor], Any], x: torch.Tensor
) -> None:
    assert counts_of(lambda: call(x)).get("waits", 0) == expected


@pytest.fixture
def reasons() -> Iterator[list[str]]:
    found: list[str] = []
    fakegpu.call_at_waits(found.append)
    yield found
    fakegpu.call_at_waits(None)


def test_a_function_is_called_at_each_wait(reasons: list[str], x: torch.Tensor) -> None:
    x.sum().item()
    x.cpu()
    assert reasons[-2:] == ["item()", "copy to the host"]
