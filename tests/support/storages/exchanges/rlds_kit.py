"""RLDS datasets, written byte by byte, without our writer and without third-party libraries."""

from __future__ import annotations

import json
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[3] / "storage/datasets/exchange/golden/rlds"
"""Datasets that TensorFlow Datasets wrote or read. `with_tfds.py` in this folder shows how."""
CLASS = "tensorflow_datasets.core.features"
TABLE = np.zeros(256, np.uint32)
for _byte in range(256):
    _value = _byte
    for _ in range(8):
        _value = _value >> 1 ^ (0x82F63B78 if _value & 1 else 0)
    TABLE[_byte] = _value
_TABLE = TABLE.tolist()

Episode = dict[str, Any]
"""Arrays of floats or integers, or lists of bytes, by feature name."""


def unpacked(name: str, place: Path) -> Path:
    """Unpack a dataset and return its folder."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as packed:
        packed.extractall(place, filter="data")
    return place / name


# --- files of records -----------------------------------------------------------------------------


def masked(content: bytes) -> bytes:
    """Return the checksum of TFRecord, computed bit by bit according to its specification."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(content: bytes, length: int | None = None) -> bytes:
    """Return a record with its checksums and its length, which may be a wrong one."""
    size = struct.pack("<Q", len(content) if length is None else length)
    return size + masked(size) + content + masked(content)


def varint(number: int) -> bytes:
    """Encode a number in groups of 7 bits."""
    number %= 2**64
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def part(number: int, content: bytes) -> bytes:
    """Return a field of a message that contains bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def values(found: Any) -> bytes:
    """Return a message ``Feature``."""
    if isinstance(found, list):
        return part(1, b"".join(part(1, each) for each in found))
    if found.dtype.kind == "f":
        return part(2, part(1, found.astype("<f4").tobytes()))
    return part(3, part(1, b"".join(varint(each) for each in found.reshape(-1).tolist())))


def example(episode: Mapping[str, Any]) -> bytes:
    """Return a message ``Example``."""
    entries = (part(1, name.encode()) + part(2, values(each)) for name, each in episode.items())
    return part(1, b"".join(part(1, entry) for entry in entries))


def png(image: np.ndarray) -> bytes:
    """Return an image [height, width, 3] as PNG."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    height, width, _ = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines, 1)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# --- folders --------------------------------------------------------------------------------------


def shape(*sizes: int) -> dict[str, Any]:
    return {"dimensions": [str(size) for size in sizes]} if sizes else {}


def tensor(dtype: str, *sizes: int, encoding: str = "none") -> dict[str, Any]:
    """Return the entry of a tensor in ``features.json``."""
    said = {"shape": shape(*sizes), "dtype": dtype, "encoding": encoding}
    return {"pythonClassName": f"{CLASS}.tensor_feature.Tensor", "tensor": said}


def picture(*sizes: int) -> dict[str, Any]:
    said = {"shape": shape(*sizes), "dtype": "uint8", "encodingFormat": "png"}
    return {"pythonClassName": f"{CLASS}.image_feature.Image", "image": said}


def text() -> dict[str, Any]:
    return {"pythonClassName": f"{CLASS}.text_feature.Text", "text": {}}


def dictionary(**features: Any) -> dict[str, Any]:
    name = f"{CLASS}.features_dict.FeaturesDict"
    return {"pythonClassName": name, "featuresDict": {"features": features}}


def dataset(step: dict[str, Any]) -> dict[str, Any]:
    name = f"{CLASS}.dataset_feature.Dataset"
    return {"pythonClassName": name, "sequence": {"feature": step, "length": "-1"}}


FLAGS = {name: tensor("bool") for name in ("is_first", "is_last", "is_terminal")}


def flags(steps: int, *, terminal: bool) -> Episode:
    """Return the flags of an episode."""
    step = np.arange(steps)
    return {
        "steps/is_first": (step == 0).astype(int),
        "steps/is_last": (step == steps - 1).astype(int),
        "steps/is_terminal": ((step == steps - 1) & terminal).astype(int),
    }


def write(
    place: Path,
    shards: Iterable[Iterable[Episode]],
    features: dict[str, Any],
    name: str = "walk",
    split: str = "train",
) -> None:
    """Write a folder with correct metadata."""
    place.mkdir(parents=True, exist_ok=True)
    records = [[example(each) for each in shard] for shard in shards]
    for number, shard in enumerate(records):
        path = place / f"{name}-{split}.tfrecord-{number:05d}-of-{len(records):05d}"
        path.write_bytes(b"".join(map(framed, shard)))
    said = {
        "name": split,
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        "numBytes": str(sum(len(each) for shard in records for each in shard)),
        "shardLengths": [str(len(shard)) for shard in records],
    }
    info = {"name": name, "version": "1.0.0", "fileFormat": "tfrecord", "splits": [said]}
    (place / "dataset_info.json").write_text(json.dumps(info))
    (place / "features.json").write_text(json.dumps(features))
