"""Convert ``features.json`` of TensorFlow Datasets 4.2 to 4.5 to the current form. Pure.

Up to version 4.4, a feature is described by the name of its class and a dictionary. Version 4.5
stores the current message inside a JSON string. Class names are only compared with known names.
Nothing is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tallyroll.storage.errors import InvalidDataset

_CLASSES: Final = "tensorflow_datasets.core.features."
_LEAVES: Final = {"Tensor": "tensor", "Image": "image", "ClassLabel": "classLabel"}
_DEEPEST: Final = 64


def as_today(said: Any, deep: int = 0) -> Any:
    """Convert a feature to its current form. A feature in the current form is returned unchanged.

    Raises:
        InvalidDataset: a string in the feature is not JSON, or the feature is nested too deep.
    """
    if not isinstance(said, dict):
        return said
    if deep > _DEEPEST:
        raise InvalidDataset("its features are nested too deep")
    if isinstance(inner := said.get("featuresDict"), dict):
        return _dictionary(inner.get("features"), deep)
    if isinstance(text := said.get("jsonFeature"), dict):
        return _of_class(said.get("pythonClassName"), _parsed(text.get("json")), said, deep)
    if "type" not in said:
        return said
    content = _parsed(said.get("content"))
    if said.get("proto_cls") and isinstance(content, dict):
        content = content.get("features")
    return _of_class(said["type"], content, said, deep)


def _of_class(name: Any, content: Any, said: Mapping[str, Any], deep: int) -> Any:
    """Return the feature of a class, or ``said`` if no storage can hold it."""
    kind = name.rpartition(".")[2] if str(name).startswith(_CLASSES) else ""
    if not isinstance(content, dict):
        return said
    if kind == "FeaturesDict":
        return _dictionary(content, deep)
    if kind == "Dataset":
        return {"sequence": {"feature": as_today(content.get("feature"), deep + 1)}}
    if kind in _LEAVES:
        return {_LEAVES[kind]: {**content, "shape": {"dimensions": content.get("shape", [])}}}
    return said


def _dictionary(features: Any, deep: int) -> Any:
    if isinstance(features, dict):
        features = {name: as_today(each, deep + 1) for name, each in features.items()}
    return {"featuresDict": {"features": features}}


def _parsed(content: Any) -> Any:
    """Parse a JSON string. Other values are returned unchanged."""
    if not isinstance(content, str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(f"a text in its features cannot be read ({error})") from error
