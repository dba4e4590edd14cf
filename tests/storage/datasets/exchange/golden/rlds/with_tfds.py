"""Read and write datasets with TensorFlow Datasets alone, where it is installed.

    python with_tfds.py read FOLDER OUT.npz
    python with_tfds.py write KIND FOLDER
    python with_tfds.py both FOLDER KIND...

TensorFlow Datasets wrote the packed datasets beside this file (``KIND.tar.xz``), and ``read.npz``
holds the values that it reads from them. The exception is ``ours``, a Tallyroll export with the
values that TensorFlow Datasets read from it. ``write older FOLDER`` wrote ``of_4_3`` and ``of_4_5``
with versions 4.3.0 and 4.5.2 first on the path (4.5.2 with the current ``*_pb2.py`` files). The
newest version read them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

tfds.core.utils.gcs_utils.gcs_dataset_info_files = lambda *_: None  # no network
features = tfds.features
FLAGS = dict.fromkeys(("is_first", "is_last", "is_terminal"), np.bool_)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries with their paths."""
    if isinstance(value, dict):
        for each, below in value.items():
            yield from flat(below, f"{name}/{each}" if name else each)
    else:
        yield name, value


def read(place: Path) -> dict[str, np.ndarray]:
    """Return all values that it reads: one array per feature, and the length of each episode."""
    builder = tfds.builder_from_directory(place)
    found: dict[str, list[Any]] = {"lengths": []}
    for split in builder.info.splits:
        for episode in tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False)):
            steps = list(episode.pop("steps"))
            found["lengths"].append(len(steps))
            for name, value in flat(episode):
                found.setdefault(name, []).append(value)
            for step in steps:
                for name, value in flat(step):
                    found.setdefault(f"steps/{name}", []).append(value)
    arrays = {}
    for name, values in found.items():
        try:
            array = np.stack([np.asarray(each) for each in values])
        except ValueError:
            continue  # steps have several shapes
        if array.dtype.kind == "O":
            array = array.astype("S")
        arrays[name] = array.view(np.uint16) if str(array.dtype) == "bfloat16" else array
    return arrays


def flags(count: int, *, terminal: bool) -> dict[str, np.ndarray]:
    step = np.arange(count)
    last = step == count - 1
    return {"is_first": step == 0, "is_last": last, "is_terminal": last & terminal}


def walk(seed: int, *shape: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).normal(size=shape), 0).astype(np.float32)


def image(seed: int, step: int, *shape: int) -> np.ndarray:
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    slope = (3 * rows + 2 * columns + 5 * step + 11 * seed) % 256
    return np.repeat(slope[..., None], shape[2], -1).astype(np.uint8)


def of_d4rl() -> tuple[Any, dict[str, list[Any]]]:
    """Return features and episodes as in D4RL: arrays, including rewards of the last step."""
    said = {
        "observation": features.Tensor(shape=(4,), dtype=np.float32),
        "action": features.Tensor(shape=(2,), dtype=np.float32),
        "reward": features.Scalar(dtype=np.float32),
        "discount": features.Scalar(dtype=np.float32),
        **FLAGS,
    }
    episodes = []
    for number, count in enumerate((7, 4, 9, 1)):
        steps = {
            "observation": walk(number, count, 4),
            "action": np.tanh(walk(number + 9, count, 2)),
            "reward": walk(number + 20, count),
            "discount": np.ones(count, np.float32),
            **flags(count, terminal=number % 2 == 0),
        }
        episodes.append({"steps": steps})
    return {"steps": features.Dataset(said)}, {"train": episodes}


def of_robots() -> tuple[Any, dict[str, list[Any]]]:
    """Return features and episodes as in Open X-Embodiment: nested, with images and texts."""
    said = {
        "observation": features.FeaturesDict(
            {
                "image": features.Image(shape=(24, 32, 3), encoding_format="png"),
                "wrist_image": features.Image(shape=(16, 16, 3), encoding_format="jpeg"),
                "state": features.Tensor(shape=(7,), dtype=np.float32),
                "joints": features.Tensor(shape=(2, 3), dtype=np.float64),
            }
        ),
        "action": features.FeaturesDict(
            {
                "world_vector": features.Tensor(shape=(3,), dtype=np.float32),
                "gripper": features.Tensor(shape=(1,), dtype=np.int32),
            }
        ),
        "reward": features.Scalar(dtype=np.float32),
        "discount": features.Scalar(dtype=np.float32),
        "language_instruction": features.Text(),
        "language_embedding": features.Tensor(shape=(8,), dtype=np.float32),
        **FLAGS,
    }
    of_episode = {"file_path": features.Text(), "episode_id": features.Scalar(dtype=np.int64)}
    splits = {}
    for split, counts in (("train", (5, 3, 6, 4)), ("val", (4, 2))):
        episodes = []
        for number, count in enumerate(counts):
            steps = []
            for step in range(count):
                seen = {
                    "image": image(number, step, 24, 32, 3),
                    "wrist_image": image(number, step, 16, 16, 3),
                    "state": walk(number + step, 7),
                    "joints": walk(number + step, 2, 3).astype(np.float64) / 3,
                }
                acted = {"world_vector": walk(step, 3), "gripper": np.array([step % 2], np.int32)}
                steps.append(
                    {
                        "observation": seen,
                        "action": acted,
                        "reward": np.float32(step == count - 1),
                        "discount": np.float32(1),
                        "language_instruction": f"push the block {number}",
                        "language_embedding": walk(number, 8),
                        "is_first": step == 0,
                        "is_last": step == count - 1,
                        "is_terminal": step == count - 1,
                    }
                )
            metadata = {"file_path": f"{split}/{number}.npy", "episode_id": 40 + number}
            episodes.append({"steps": steps, "episode_metadata": metadata})
        splits[split] = episodes
    return {
        "steps": features.Dataset(said),
        "episode_metadata": features.FeaturesDict(of_episode),
    }, splits


def of_kinds() -> tuple[Any, dict[str, list[Any]]]:
    """Return features of all dtypes and encodings, including some that no storage can hold."""
    tensors: dict[str, Any] = {}
    for dtype in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "float32",
    ):
        tensors[f"plain_{dtype}"] = features.Tensor(shape=(2,), dtype=np.dtype(dtype))
    for dtype in ("float16", "float64", "uint8", "int16", "int64", "bool"):
        for encoding in ("bytes", "zlib"):
            name = f"{encoding}_{dtype}"
            dtype_ = np.dtype(dtype)
            tensors[name] = features.Tensor(shape=(2, 3), dtype=dtype_, encoding=encoding)
    said = {
        "observation": features.FeaturesDict(tensors),
        "action": features.ClassLabel(num_classes=5),
        "reward": features.Scalar(dtype=np.float64),
        "discount": features.Scalar(dtype=np.float32),
        "tokens": features.Sequence(np.int32),
        "depth": features.Image(shape=(8, 8, 1), dtype=np.uint16, encoding_format="png"),
        "any_size": features.Image(shape=(None, None, 3), encoding_format="png"),
        "timestamp": features.Scalar(dtype=np.float64),
        **FLAGS,
    }
    episodes = []
    for number, count in enumerate((4, 3, 5)):
        generator = np.random.default_rng(number)
        steps = []
        for step in range(count):
            seen = {}
            for name, each in tensors.items():
                dtype = each.np_dtype
                if dtype.kind in "iu":
                    limits = np.iinfo(dtype)
                    values = generator.integers(limits.min, limits.max, each.shape, dtype)
                elif dtype.kind == "b":
                    values = generator.integers(0, 2, each.shape).astype(bool)
                else:
                    values = generator.normal(size=each.shape).astype(dtype)
                seen[name] = values
            size = 8 + step
            steps.append(
                {
                    "observation": seen,
                    "action": step % 5,
                    "reward": generator.normal(),
                    "discount": np.float32(step != count - 2),
                    "tokens": list(range(step)),
                    "depth": image(number, step, 8, 8, 1).astype(np.uint16) * 200,
                    "any_size": image(number, step, size, size, 3),
                    "timestamp": step / 10,
                    "is_first": step == 0,
                    "is_last": step == count - 1,
                    "is_terminal": step == count - 1,
                }
            )
        episodes.append({"steps": steps, "agent": "random", "score": float(number)})
    return {
        "steps": features.Dataset(said),
        "agent": features.Text(),
        "score": features.Scalar(dtype=np.float32),
    }, {"train": episodes}


KINDS = {"d4rl": of_d4rl, "robots": of_robots, "kinds": of_kinds}


def write(kind: str, place: Path) -> None:
    """Write a dataset to a folder with a builder made for it."""
    said, splits = KINDS[kind]()

    class Walk(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self, features=features.FeaturesDict(said), disable_shuffling=True
            )

        def _split_generators(self, manager: Any) -> Any:
            return {name: self._generate_examples(name) for name in splits}

        def _generate_examples(self, split: str) -> Any:
            yield from enumerate(splits[split])

    config = tfds.download.DownloadConfig(num_shards=2, try_download_gcs=False)
    builder = Walk(data_dir=place / "aside")
    builder.download_and_prepare(download_config=config, file_format="tfrecord")
    Path(builder.data_dir).rename(place / kind)


def append(place: Path, *, killed: bool) -> None:
    """Write a dataset as EnvLogger does, with two episodes per file.

    Optionally, the process kills itself in the third file.
    """
    from tensorflow_datasets.rlds import rlds_base

    config = rlds_base.DatasetConfig(
        name="catch",
        observation_info=features.Tensor(shape=(3,), dtype=np.float32),
        action_info=np.int64,
        reward_info=np.float64,
        discount_info=np.float64,
        step_metadata_info={"when": np.float32},
        episode_metadata_info={"agent_id": np.int64},
    )
    place.mkdir()
    identity = tfds.core.DatasetIdentity(
        name="catch", version=tfds.core.Version("1.0.0"), data_dir=str(place), module_name=""
    )
    writer = tfds.core.SequentialWriter(rlds_base.build_info(config, identity), 2)
    writer.initialize_splits(["train"])
    for number in range(5):
        count = 4 + number
        said = flags(count, terminal=number % 2 == 0)
        steps = [
            {
                "observation": walk(number + step, 3),
                "action": step % 4,
                "reward": step / 7,
                "discount": 0.9,
                "when": float(step),
                **{name: each[step] for name, each in said.items()},
            }
            for step in range(count)
        ]
        writer.add_examples({"train": [{"steps": steps, "agent_id": number}]})
    if killed:
        os._exit(0)
    writer.close_all()


def older(place: Path) -> None:
    """Write a dataset with features that versions 4.3 and 4.5 also support."""
    known = {"encoding": "bytes"} if hasattr(features, "Encoding") else {}
    seen = {
        "image": features.Image(shape=(16, 12, 3), encoding_format="png"),
        "state": features.Tensor(shape=(3,), dtype=tf.float32),
        "joints": features.Tensor(shape=(2, 3), dtype=tf.float32, **known),
        "words": features.Text(),
    }
    said = {
        "observation": features.FeaturesDict(seen),
        "action": features.ClassLabel(num_classes=5),
        "reward": tf.float32,
        "discount": tf.float32,
        **dict.fromkeys(FLAGS, tf.bool),
    }

    def examples() -> Iterator[Any]:
        for number, count in enumerate((4, 3, 5)):
            steps = []
            for step in range(count):
                found = {
                    "image": image(number, step, 16, 12, 3),
                    "state": walk(number + step, 3),
                    "joints": walk(number + step, 2, 3),
                    "words": "push",
                }
                rest = {
                    name: each[step] for name, each in flags(count, terminal=number < 2).items()
                }
                rest |= {"action": step % 5, "reward": step / 4, "discount": 1.0}
                steps.append({"observation": found, **rest})
            yield number, {"steps": steps, "episode_id": 40 + number}

    class Walk(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            every = {"steps": features.Dataset(said), "episode_id": tf.int64}
            return tfds.core.DatasetInfo(builder=self, features=features.FeaturesDict(every))

        def _split_generators(self, manager: Any) -> Any:
            return {"train": examples()}

        def _generate_examples(self) -> Any:
            raise NotImplementedError

    builder = Walk(data_dir=place / "aside")
    builder.download_and_prepare()
    (place / "aside" / "walk" / "1.0.0").rename(place / "older")


def write_or_append(kind: str, place: Path) -> None:
    """Write a dataset to a folder with the writer for its kind."""
    if kind in ("appended", "killed"):
        append(place / kind, killed=kind == "killed")
    elif kind == "older":
        older(place)
    else:
        write(kind, place)


if __name__ == "__main__":
    if sys.argv[1] == "read":
        np.savez_compressed(sys.argv[3], **read(Path(sys.argv[2])))
    elif sys.argv[1] == "write":
        write_or_append(sys.argv[2], Path(sys.argv[3]))
    else:
        folder = Path(sys.argv[2])
        for each in sys.argv[3:]:
            write_or_append(each, folder)
            np.savez_compressed(folder / f"{each}.npz", **read(folder / each))
