"""Which feature of RLDS each column is: its name, how it is kept, and how a text names it. Pure."""

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
"""Ways to keep values: 32-bit floats, 64-bit integers, their own bytes, PNG or JPEG."""

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
"""Dtypes whose every value is a 64-bit integer; one of uint64 is it by its bits."""


@dataclass(frozen=True)
class RldsFeature:
    """A column as a record has it: its values of all steps, one after the other."""

    name: str
    """Its name in a record, as ``steps/observation/position``."""
    column: Column
    kind: Kind
    picture: Picture | None = None
    observed: bool = False
    """The value that comes next is that of the next step."""
    zipped: bool = False
    """Bytes are compressed by zlib."""
    of_episode: bool = False
    """There is one value for all steps."""


def feature_of(name: str, column: Column, *, observed: bool = False) -> RldsFeature:
    """Return the feature that holds a column of ours, bit for bit."""
    if (picture := Picture.of(column)) is not None:
        return RldsFeature(name, column, "image", picture, observed)
    kind: Kind = "bytes"
    if column.dtype is torch.float32:
        kind = "floats"
    elif column.dtype in _AS_INTEGERS or (column.dtype is torch.uint8 and not column.shape):
        kind = "integers"
    return RldsFeature(name, column, kind, None, observed)


def features_of(schema: Schema, roles: Roles) -> list[RldsFeature]:
    """Return the features of columns; next observations have none of their own."""
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
    """Return a reward of one number a row as RLDS has it: without a dimension."""
    one = column.key == REWARD and column.shape == (1,)
    return Column(column.key, column.dtype, ()) if one else column


# --- the text -------------------------------------------------------------------------------------


def features_json(features: Iterable[RldsFeature]) -> dict[str, Any]:
    """Return ``features.json`` of an export: the columns, and what RLDS says of each step."""
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
    inner = {"feature": _said(steps), "length": "-1"}
    return _dictionary({STEPS: {"pythonClassName": _DATASET, "sequence": inner}})


def _said(value: RldsFeature | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, RldsFeature):
        return _dictionary({name: _said(each) for name, each in value.items()})
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
