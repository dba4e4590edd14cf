"""Map each column to a feature of RLDS: its name, encoding and JSON description. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from tallyroll.storage.ext.exchange.pictures import Picture
from tallyroll.storage.ext.exchange.roles import Roles, under
from tallyroll.storage.rows.keys import REWARD, Key
from tallyroll.storage.rows.schema import Column, Schema

Kind = Literal["floats", "integers", "bytes", "image"]
"""Encodings of values: 32-bit floats, 64-bit integers, raw bytes, or PNG and JPEG images."""

STEPS: Final = "steps"
FIRST, LAST, TERMINAL, DISCOUNT = "is_first", "is_last", "is_terminal", "discount"
OBSERVATION, ACTION, REWARDS, INFOS = "observation", "action", "reward", "infos"

_CLASS: Final = "tensorflow_datasets.core.features."
_TENSOR, _IMAGE, _DICT, _DATASET = (
    f"{_CLASS}tensor_feature.Tensor",
    f"{_CLASS}image_feature.Image",
    f"{_CLASS}features_dict.FeaturesDict",
    f"{_CLASS}dataset_feature.Dataset",
)
_AS_INTEGERS: Final = {
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
"""Dtypes whose values are stored as 64-bit integers; uint64 is stored by its bits."""


@dataclass(frozen=True)
class RldsFeature:
    """A column as a record stores it: the values of all steps, one after another."""

    name: str
    """The name in a record, such as ``steps/observation/position``."""
    column: Column
    kind: Kind
    picture: Picture | None = None
    observed: bool = False
    """True if the next value of a transition is the value of the next step."""
    zipped: bool = False
    """True if the bytes are compressed with zlib."""
    of_episode: bool = False
    """True if one value applies to all steps."""


def feature_of(name: str, column: Column, *, observed: bool = False) -> RldsFeature:
    """Return the feature that holds a column bit for bit."""
    if (picture := Picture.of(column)) is not None:
        return RldsFeature(name, column, "image", picture, observed)
    kind: Kind = "bytes"
    if column.dtype is torch.float32:
        kind = "floats"
    elif column.dtype in _AS_INTEGERS or (column.dtype is torch.uint8 and not column.shape):
        kind = "integers"
    return RldsFeature(name, column, kind, None, observed)


def features_of(schema: Schema, roles: Roles) -> list[RldsFeature]:
    """Return the features of columns. Next observations have no separate feature."""
    seen = under(OBSERVATION, roles.observations)
    places: dict[Key, Key] = seen | under(ACTION, roles.actions) | {REWARD: (REWARDS,)}
    flags = [roles.terminated, *([roles.truncated] if roles.truncated is not None else [])]
    places |= {each.key: (INFOS, *each.key) for each in (*flags, *roles.others)}
    return [
        feature_of("/".join((STEPS, *places[each.key])), _flat(each), observed=each.key in seen)
        for each in schema.columns
        if each.key in places
    ]


def _flat(column: Column) -> Column:
    """Drop the dimension of a reward column of shape (1,), because RLDS expects scalar rewards."""
    one = column.key == REWARD and column.shape == (1,)
    return Column(column.key, column.dtype, ()) if one else column


# --- the text -------------------------------------------------------------------------------------


def features_json(features: Iterable[RldsFeature]) -> dict[str, Any]:
    """Return the content of ``features.json``: the columns, and the step flags of RLDS."""
    steps: dict[str, Any] = {}
    for each in features:
        *above, last = each.name.split("/")[1:]
        here = steps
        for part in above:
            here = here.setdefault(part, {})
        here[last] = each
    for name in (FIRST, LAST, TERMINAL):
        steps[name] = feature_of(name, Column((name,), torch.bool, ()))
    steps[DISCOUNT] = feature_of(DISCOUNT, Column((DISCOUNT,), torch.float32, ()))
    inner = {"feature": _feature_json(steps), "length": "-1"}
    return _dictionary({STEPS: {"pythonClassName": _DATASET, "sequence": inner}})


def _feature_json(value: RldsFeature | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, RldsFeature):
        return _dictionary({name: _feature_json(each) for name, each in value.items()})
    if value.picture is not None:
        shape = (value.picture.height, value.picture.width, value.picture.channels)
        image = {"shape": _shape(shape), "dtype": "uint8", "encodingFormat": "png"}
        return {"pythonClassName": _IMAGE, "image": image}
    tensor = {
        "shape": _shape(value.column.shape),
        "dtype": value.column.dtype_name,
        "encoding": "bytes" if value.kind == "bytes" else "none",
    }
    return {"pythonClassName": _TENSOR, "tensor": tensor}


def _dictionary(features: Mapping[str, Any]) -> dict[str, Any]:
    return {"pythonClassName": _DICT, "featuresDict": {"features": dict(features)}}


def _shape(shape: Iterable[int]) -> dict[str, Any]:
    sizes = [str(size) for size in shape]
    return {"dimensions": sizes} if sizes else {}
