"""Public names, stated here alone (`storage/package/public_names.py`). Every error is one."""

from tallyroll.collector.batches.layouts.trajectories import (
    split_trajectories as split_trajectories,
)
from tallyroll.collector.counting.episode_log import Episode as Episode
from tallyroll.collector.counting.ledger import Ledger as Ledger
from tallyroll.collector.envs.fixed_width import FixedWidth as FixedWidth
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv as GymnasiumVectorEnv
from tallyroll.collector.errors import *  # noqa: F403
from tallyroll.collector.ext.checkpoints.checkpoint import Loaded as Loaded
from tallyroll.collector.ext.checkpoints.checkpoint import (
    load_checkpoint as load_checkpoint,
)
from tallyroll.collector.ext.checkpoints.checkpoint import (
    save_checkpoint as save_checkpoint,
)
from tallyroll.collector.ext.episode_batches import EpisodeBatches as EpisodeBatches
from tallyroll.collector.ext.evaluation import Evaluation as Evaluation
from tallyroll.collector.ext.evaluation import evaluate as evaluate
from tallyroll.collector.ext.logs.run_log import LogWarning as LogWarning
from tallyroll.collector.ext.logs.run_log import RunLog as RunLog
from tallyroll.collector.ext.recorder.recorder import Recorder as Recorder
from tallyroll.collector.ext.replay.recovered_env import recover_env as recover_env
from tallyroll.collector.ext.replay.replay import replay as replay
from tallyroll.collector.ext.replay.report import ReplayReport as ReplayReport
from tallyroll.collector.ext.report.report import RunsReport as RunsReport
from tallyroll.collector.ext.report.report import report as report
from tallyroll.collector.multiprocess import MultiprocessCollector as MultiprocessCollector
from tallyroll.collector.multiprocess import RayCollector as RayCollector
from tallyroll.collector.options.draws import choice as choice
from tallyroll.collector.options.draws import uniform as uniform
from tallyroll.collector.options.objects import Checks as Checks
from tallyroll.collector.options.objects import Columns as Columns
from tallyroll.collector.options.objects import Devices as Devices
from tallyroll.collector.options.objects import Layout as Layout
from tallyroll.collector.options.resets import Resets as Resets
from tallyroll.collector.options.sharding import Shard as Shard
from tallyroll.collector.policies.several.entries import OnePolicy as OnePolicy
from tallyroll.collector.slab.info import Info as Info
from tallyroll.collector.sync import SyncCollector as SyncCollector
from tallyroll.collector.workers.worker_options import Actors as Actors
from tallyroll.collector.workers.worker_options import Processes as Processes
from tallyroll.collector.workers.worker_options import Supervision as Supervision
