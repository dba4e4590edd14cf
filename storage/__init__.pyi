"""The public names, which only this file lists: see `package/public_names.py`.

Every error class is public.
"""

from tallyroll.storage.engine.frame_pools import PoolUsage as PoolUsage
from tallyroll.storage.errors import *  # noqa: F403
from tallyroll.storage.ext.card.page import Card as Card
from tallyroll.storage.ext.card.storage_card import export_card as export_card
from tallyroll.storage.ext.dataset_checks.verify_dataset import verify_dataset as verify_dataset
from tallyroll.storage.ext.device.device_storage import DeviceStorage as DeviceStorage
from tallyroll.storage.ext.exchange.dataset_export import ExportReport as ExportReport
from tallyroll.storage.ext.exchange.dataset_import import ImportReport as ImportReport
from tallyroll.storage.ext.exchange.dataset_import import import_dataset as import_dataset
from tallyroll.storage.ext.exchange.followed_export import Follow as Follow
from tallyroll.storage.ext.exchange.lerobot.options import (
    LeRobotOptions as LeRobotOptions,
)
from tallyroll.storage.ext.notebook.film import Video as Video
from tallyroll.storage.ext.overlays.overlay import Overlay as Overlay
from tallyroll.storage.ext.packed.pack import PackReport as PackReport
from tallyroll.storage.ext.remote.options import S3Options as S3Options
from tallyroll.storage.ext.remote.pull import PullReport as PullReport
from tallyroll.storage.ext.remote.pull import pull as pull
from tallyroll.storage.ext.remote.push import PushReport as PushReport
from tallyroll.storage.ext.remote.push import push as push
from tallyroll.storage.ext.repair.repair import (
    RepairReport as RepairReport,
)
from tallyroll.storage.ext.repair.repair import repair as repair
from tallyroll.storage.ext.sampling.hindsight import HindsightSampler as HindsightSampler
from tallyroll.storage.ext.sampling.mixed import MixedSampler as MixedSampler
from tallyroll.storage.ext.sampling.prioritized import PrioritizedSampler as PrioritizedSampler
from tallyroll.storage.ext.sampling.rate_limit import RateLimit as RateLimit
from tallyroll.storage.ext.sharded.sharded_storage import ShardedStorage as ShardedStorage
from tallyroll.storage.ext.statistics.normaliser import Normaliser as Normaliser
from tallyroll.storage.ext.statistics.statistics import (
    ColumnStatistics as ColumnStatistics,
)
from tallyroll.storage.ext.statistics.statistics import Statistics as Statistics
from tallyroll.storage.ext.storage_copy import CopyReport as CopyReport
from tallyroll.storage.ext.training.epoch_batches import EpochBatches as EpochBatches
from tallyroll.storage.ext.training.row_dataset import RowDataset as RowDataset
from tallyroll.storage.ext.verification.content import content_hash as content_hash
from tallyroll.storage.ext.verification.differences import Differences as Differences
from tallyroll.storage.ext.verification.differences import DifferentRow as DifferentRow
from tallyroll.storage.ext.verification.differences import diff as diff
from tallyroll.storage.ext.verification.findings import Finding as Finding
from tallyroll.storage.ext.verification.findings import Report as Report
from tallyroll.storage.ext.verification.storage_checks import verify as verify
from tallyroll.storage.ext.views.trajectories import (
    StoredTrajectories as StoredTrajectories,
)
from tallyroll.storage.readers.row_reader import ReusedRows as ReusedRows
from tallyroll.storage.readers.row_reader import RowReader as RowReader
from tallyroll.storage.replay.loader import Loader as Loader
from tallyroll.storage.rows.frame_stacks import FrameStack as FrameStack
from tallyroll.storage.rows.schema import Schema as Schema
from tallyroll.storage.sampling.frame_windows import FrameWindows as FrameWindows
from tallyroll.storage.sampling.frame_windows import frame_windows as frame_windows
from tallyroll.storage.sampling.n_steps import n_step as n_step
from tallyroll.storage.sampling.trajectory_slices import (
    TrajectorySliceSampler as TrajectorySliceSampler,
)
from tallyroll.storage.storages import DiskStorage as DiskStorage
from tallyroll.storage.storages import H5Storage as H5Storage
from tallyroll.storage.storages import MemmapStorage as MemmapStorage
from tallyroll.storage.storages import ZarrStorage as ZarrStorage
from tallyroll.storage.storages import open_storage as open_storage
from tallyroll.storage.stores.row_sink import RowSink as RowSink
from tallyroll.storage.trajectories.mapping import Trajectories as Trajectories
