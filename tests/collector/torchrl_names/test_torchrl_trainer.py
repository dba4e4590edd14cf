"""TorchRL's trainers drive our collectors: hooks, weights, states, concurrent buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE
from torchrl.trainers import LogScalar, Trainer, UpdateWeights
from torchrl.trainers.algorithms import PPOTrainer, SACTrainer

from tallyroll.collector.torchrl import Collector, MultiSyncCollector
from tallyroll.storage import MemmapStorage

from pairs import in_gate
from worker_kit import in_threads

pytestmark = [  # warnings of trainers
    pytest.mark.filterwarnings("ignore:.*experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .* hook stage:FutureWarning"),
]


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def discrete() -> tuple[Any, Any]:
    """Return an actor and a critic of CartPole."""
    net = TensorDictModule(
        MLP(in_features=4, out_features=2, num_cells=[16]), ["observation"], ["logits"]
    )
    actor = ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    return actor, ValueOperator(MLP(in_features=4, out_features=1, num_cells=[16]))


def ppo(collector: Any, actor: Any, critic: Any, **given: Any) -> PPOTrainer:
    loss = ClipPPOLoss(actor, critic)
    return PPOTrainer(
        collector=collector,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 3e-3),
        **{
            "total_frames": 256,
            "frame_skip": 1,
            "optim_steps_per_batch": 2,
            "num_epochs": 1,
            "progress_bar": False,
            "enable_logging": False,
            **given,
        },
    )


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ppo_trains_here() -> None:
    actor, critic = discrete()
    collector = Collector(
        lambda: GymEnv("CartPole-v1"), actor, frames_per_batch=64, total_frames=256
    )
    trainer, before = ppo(collector, actor, critic), weights(actor)
    trainer.train()
    assert trainer.collected_frames == collector.ledger.stored == 256
    assert differ(before, weights(actor))
    assert collector.closed


def test_ppo_trains_with_workers_that_get_the_weights() -> None:
    with in_threads():
        actor, critic = discrete()
        envs = [lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))]  # threads share a generator
        given: dict[str, Any] = {"frames_per_batch": 64, "total_frames": 256}
        collector = MultiSyncCollector(envs, actor, **given)
        sent = {"weight_update_map": {"policy": "loss_module.actor_network"}}
        trainer = ppo(collector, actor, critic, **sent)
        trainer.train()
        assert trainer.collected_frames == 256
        assert collector.policy_version == 4


def test_a_trainer_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    def made() -> tuple[PPOTrainer, Any]:
        actor, critic = discrete()
        collector = Collector(lambda: GymEnv("CartPole-v1"), actor, frames_per_batch=64)
        return ppo(collector, actor, critic), actor

    first, actor = made()
    first.train()
    torch.save(first.state_dict(), tmp_path / "state")
    second, other = made()
    assert differ(weights(actor), weights(other))
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    assert not differ(weights(actor), weights(other))
    assert second.collected_frames == second.collector.ledger.stored == 256
    second.total_frames = 384
    second.train()
    assert second.collected_frames == second.collector.ledger.stored == 384


def continuous() -> tuple[Any, Any]:
    """Return an actor and a critic of Pendulum."""
    net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[16]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=False,
        spec=GymEnv("Pendulum-v1").action_spec,
    )
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[16]),
        ["action", "observation"],
        ["state_action_value"],
    )
    return actor, critic


# TorchRL's trainer changes the weights of the policy without an update of the collector.
@pytest.mark.filterwarnings("ignore:policy. its parameters changed:UserWarning")
@pytest.mark.parametrize(("meanwhile", "where"), in_gate([False, True], ["lazy", "ours"]))
def test_sac_trains_of_a_buffer_that_is_filled(meanwhile: bool, where: str, tmp_path: Path) -> None:
    actor, critic = continuous()
    storage: Any = LazyTensorStorage(5_000)
    if where == "ours":
        storage = MemmapStorage(tmp_path / "rows", max_size=5_000)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"),
        actor,
        frames_per_batch=50,
        total_frames=-1,
        init_random_frames=100,
        # A synchronous trainer adds the batches itself.
        replay_buffer=buffer if meanwhile else None,
    )
    loss = SACLoss(actor, critic, action_spec=GymEnv("Pendulum-v1").action_spec)
    loss.make_value_estimator(gamma=0.99)
    trainer = SACTrainer(
        collector=collector,
        total_frames=400,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-3),
        progress_bar=False,
        replay_buffer=buffer,
        batch_size=32,
        enable_logging=False,
        target_net_updater=SoftUpdate(loss, eps=0.99),
        async_collection=meanwhile,
    )
    before = weights(actor)
    trainer.train()
    assert collector.ledger.stored >= 400
    assert differ(before, weights(actor))
    # A synchronous trainer omits the last batch: TorchRL's own collector also gives 350.
    assert len(buffer) == (collector.ledger.stored if meanwhile else 350)
    assert collector.ledger.random == 100
    assert not collector.is_running()
    if where == "ours":
        storage.close()


def test_hooks_of_a_plain_trainer() -> None:
    actor, critic = discrete()
    collector = Collector(
        lambda: GymEnv("CartPole-v1"), actor, frames_per_batch=64, total_frames=192
    )
    loss = ClipPPOLoss(actor, critic)
    trainer = Trainer(
        collector=collector,
        total_frames=192,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-3),
        progress_bar=False,
        seed=0,
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    trainer.register_op("batch_process", advantage)
    LogScalar(key=("next", "reward"), logname="reward").register(trainer)
    UpdateWeights(collector, 1).register(trainer)
    trainer.train()
    assert collector.policy_version == 3
    assert trainer._log_dict["reward"] == [1.0, 1.0, 1.0]
