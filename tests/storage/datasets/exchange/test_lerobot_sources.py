"""Test LeRobot folders that are damaged or malicious."""

from __future__ import annotations

import json
import os
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_kit import pictured, unpacked

from tallyroll.storage import LeRobotOptions, MemmapStorage, import_dataset
from tallyroll.storage.errors import (
    InvalidDataset,
    NotEnoughMemory,
    StorageError,
    StorageFull,
)
from tallyroll.storage.ext.exchange.lerobot import layout
from tallyroll.storage.ext.exchange.pictures import Decoder, Picture
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL")
av = pytest.importorskip("av")

MORE = int(os.environ.get("TALLYROLL_EXCHANGES", "1"))
SIDE = "observation.images.side"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return unpacked("theirs_v30", tmp_path)


def refused(place: Path, match: str | None = None) -> None:
    back = place.parent / "back"
    with pytest.raises((InvalidDataset, StorageFull, NotEnoughMemory), match=match) as caught:
        import_dataset(place, back, "lerobot")
    assert str(caught.value).count("cannot be imported") <= 1
    assert not back.exists()


def change(place: Path, **values: Any) -> None:
    info = json.loads((place / layout.INFO).read_text())
    (place / layout.INFO).write_text(json.dumps({**info, **values}))


def change_feature(place: Path, name: str, **values: Any) -> None:
    features = json.loads((place / layout.INFO).read_text())["features"]
    features[name] |= values
    change(place, features=features)


@pytest.mark.parametrize("name", ["data_path", "video_path"])
@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../theirs_v30/data/chunk-000/file-000.parquet",
        "data/../../x/{chunk_index}",
        "{chunk_index.__class__}",
        "{chunk_index:099999999d}",
        "{chunk_index!r:>99999999}",
        "{0}",
        "{other}/x",
        "{chunk_index:03d",
        "data\0x",
        "",
        3,
        None,
        ["x"],
        "a" * 5000,
    ],
)
def test_paths_that_lead_elsewhere(theirs: Path, name: str, path: Any) -> None:
    change(theirs, **{name: path})
    refused(theirs)


def test_a_name_that_leads_elsewhere(theirs: Path) -> None:
    """No column can have such a name, so no path is made from it."""
    features = json.loads((theirs / layout.INFO).read_text())["features"]
    features["../../x"] = features[SIDE]
    change(theirs, features=features)
    assert import_dataset(theirs, theirs.parent / "back", "lerobot").lost["columns"] == 1


@pytest.mark.parametrize(
    "values",
    [
        {"codebase_version": "v1.6"},
        {"codebase_version": None},
        {"features": []},
        {"features": {}},
        {"features": {"x": 3}},
        {"fps": 0},
        {"fps": float("nan")},
        {"fps": "30"},
        {"codebase_version": "v2.1", "chunks_size": 0},
        {"codebase_version": "v2.1"},
    ],
)
def test_metadata_that_cannot_be(theirs: Path, values: dict[str, Any]) -> None:
    change(theirs, **values)
    refused(theirs)


def test_a_text_that_is_nested_too_deep(theirs: Path) -> None:
    (theirs / layout.INFO).write_text("[" * 100_000)
    refused(theirs, "cannot be read")


@pytest.mark.parametrize(
    "shape", [[2**20, 2**20, 3], [2**40, 2**40, 3], [64, 64], [0, 64, 3], "x", [64.5, 64, 3]]
)
def test_shapes_that_cannot_be(theirs: Path, shape: Any) -> None:
    """Impossible shapes are skipped, and shapes that are too large are refused."""
    change_feature(theirs, SIDE, shape=shape)
    if isinstance(shape, list) and shape[0] == 2**20:
        refused(theirs)
    else:
        report = import_dataset(theirs, theirs.parent / "back", "lerobot")
        assert report.lost["columns"] == 1


def test_a_feature_that_is_another(theirs: Path) -> None:
    change_feature(theirs, "action", dtype="int64")
    refused(theirs, "action: expected 2 x int64 per row, got rows of float")
    change_feature(theirs, "action", dtype="float32", shape=[3])
    refused(theirs, "expected 3 x float32")


@pytest.mark.parametrize("fault", ["link", "folder", "smaller", "short", "playlist", "text"])
def test_videos(theirs: Path, fault: str) -> None:
    (film,) = theirs.glob("videos/*/*/*.mp4")
    if fault == "link":
        film.rename(theirs.parent / "film.mp4")
        film.symlink_to(theirs.parent / "film.mp4")
    if fault == "folder":
        film.parent.rename(theirs.parent / "films")
        film.parent.symlink_to(theirs.parent / "films")
    if fault == "smaller":
        written(film, [(32, 32, 12)])
    if fault == "short":
        written(film, [(64, 64, 9)])
    if fault == "playlist":
        film.write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n")
    if fault == "text":
        film.write_bytes(b"text")
    said = {"smaller": "32 x 32 pixels", "short": r"has no frame of episode \d+ at 0.9"}
    refused(theirs, said.get(fault))


def written(place: Path, parts: list[tuple[int, int, int]], codec: str = "mpeg4") -> None:
    """Write a video whose frames have these heights and widths."""
    with av.open(str(place), "w") as file:
        height, width, _ = parts[0]
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        number = 0
        for height, width, count in parts:
            for _ in range(count):
                frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8), "rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 10)
                file.mux(stream.encode(frame))
                number += 1
        file.mux(stream.encode(None))


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_frames_that_are_larger_than_the_header_says(theirs: Path, codec: str) -> None:
    """The decoder sees the size in the frames and allocates no memory for larger ones."""
    (film,) = theirs.glob("videos/*/*/*.mp4")
    with av.open(str(film), "w") as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for packet in [*packets(codec, 64, 6, 0), *packets(codec, 1024, 6, 6)]:
            packet.stream = stream
            file.mux(packet)
    refused(theirs, "cannot be decoded")


def packets(codec: str, side: int, count: int, first: int) -> list[Any]:
    """Return encoded frames of a size, with their own headers."""
    context = av.CodecContext.create(codec, "w")
    context.width, context.height, context.pix_fmt = side, side, "yuv420p"
    context.time_base, context.framerate = Fraction(1, 10), 10
    found = []
    for number in range(first, first + count):
        frame = av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8), "rgb24")
        frame.pts, frame.time_base = number, Fraction(1, 10)
        found += context.encode(frame)
    return found + context.encode(None)


def png(width: int, height: int, kind: int = 2, content: bytes = b"") -> bytes:
    """Return a PNG that claims this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(content)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "content",
    [
        png(50_000, 50_000),
        png(2**31 - 1, 2**31 - 1),
        png(64, 65, content=bytes(65 * 193)),
        png(64, 64, kind=0, content=bytes(64 * 65)),
        png(64, 64, content=bytes(100)),
        png(64, 64)[:40],
        b"GIF89a" + bytes(100),
        b"",
        None,
    ],
)
def test_images(theirs: Path, content: bytes | None) -> None:
    (file,) = theirs.glob("data/*/*.parquet")
    table = parquet.read_table(file)
    images = table["observation.images.top"].to_pylist()
    images[5] = {"bytes": content, "path": "/etc/passwd"}
    at = table.schema.get_field_index("observation.images.top")
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(
        table.set_column(at, "observation.images.top", arrow.array(images, kind)), file
    )
    refused(theirs, "image")


@pytest.mark.parametrize(("width", "height", "kind"), [(64, 65, 2), (3000, 3000, 2), (64, 64, 0)])
def test_images_of_another_size_are_not_decoded(width: int, height: int, kind: int) -> None:
    decoder = Decoder(Picture(64, 64, 3, first=False), "lerobot")
    with pytest.raises(InvalidDataset, match=r"pixels of \w+, expected \(64, 64\) of RGB"):
        decoder.decoded(png(width, height, kind))  # the PNG contains no pixels


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("length", [4, 3, 6]),
        ("length", [4, -3, 11]),
        ("length", [0, 7, 5]),
        ("length", [2**62, 2**62, 2**62]),
        ("episode_index", [0, 2, 3]),
        ("data/file_index", [0, 0, 1]),
        ("data/file_index", [0, -1, 0]),
        (f"videos/{SIDE}/from_timestamp", [0.0, 0.1, 0.7]),
        (f"videos/{SIDE}/from_timestamp", [0.0, float("nan"), 0.7]),
        (f"videos/{SIDE}/from_timestamp", [0.0, float("inf"), 0.7]),
        ("length", ["4", "3", "5"]),
        ("length", [4, None, 5]),
    ],
)
def test_episodes(theirs: Path, name: str, values: list[Any]) -> None:
    (file,) = theirs.glob("meta/episodes/*/*.parquet")
    table = parquet.read_table(file)
    at = table.schema.get_field_index(name)
    parquet.write_table(table.set_column(at, name, arrow.array(values)), file)
    refused(theirs)


def test_rows_of_another_episode(theirs: Path) -> None:
    (file,) = theirs.glob("data/*/*.parquet")
    table = parquet.read_table(file)
    at = table.schema.get_field_index("episode_index")
    other = arrow.array([0] * 3 + [1] * 4 + [2] * 5)
    parquet.write_table(table.set_column(at, "episode_index", other), file)
    refused(theirs, "expected the episode index")


@pytest.mark.parametrize(
    "lines",
    [
        [{"episode_index": 1, "length": 4}],
        [{"episode_index": 0}],
        [{"episode_index": 0, "length": "4"}],
        [{"episode_index": 0, "length": 2**70}],
        [3],
        ["[" * 100_000],
    ],
)
def test_lines_of_v2(tmp_path: Path, lines: list[Any]) -> None:
    place = unpacked("theirs_v21", tmp_path)
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    (place / "meta/episodes.jsonl").write_text("\n".join(texts))
    refused(place)


@pytest.mark.parametrize("name", ["theirs_v21", "theirs_v30", "filmed"])
def test_damage(tmp_path: Path, name: str) -> None:
    """Any damage to the files raises only Tallyroll errors, and nothing is left."""
    if name == "filmed":
        with MemmapStorage(tmp_path / "rows") as storage:
            storage.extend(pictured(9, 4, pixels=(16, 16, 3)))
            storage.export(tmp_path / name, "lerobot", options=LeRobotOptions(video="ffv1"))
        place = tmp_path / name
    else:
        place = unpacked(name, tmp_path)
    generator = np.random.default_rng(1)
    files = sorted(each for each in place.rglob("*") if each.is_file())
    damaged = 0
    for number in range(2 * len(files) * MORE):
        file = files[number % len(files)]
        content = file.read_bytes()
        broken = bytearray(content)
        if number // len(files) % 2:
            del broken[generator.integers(len(broken)) :]
        else:
            for at in generator.integers(0, len(broken), 8):
                broken[at] = generator.integers(256)
        file.write_bytes(broken)
        back = tmp_path / f"back{number}"
        try:
            import_dataset(place, back, "lerobot")
        except (StorageError, NotEnoughMemory):
            damaged += 1
            assert not back.exists()
        file.write_bytes(content)
    assert damaged >= 3
    import_dataset(place, tmp_path / "back", "lerobot")


def test_a_full_disk_under_a_video(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(pictured(60, 20, pixels=(64, 64, 3)))
        options = LeRobotOptions(video="h264-lossless")
        with file_size_limit(30_000), pytest.raises(StorageFull):
            storage.export(tmp_path / "out", "lerobot", options=options)
    assert {each.name for each in tmp_path.iterdir()} == {"rows"}
