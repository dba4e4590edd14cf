"""Read and write ``tf.train.Example`` messages: named lists of numbers or of bytes."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.formats.optional_libraries import needed

_PACKAGE: Final = "tallyroll.rlds"
_MESSAGES: Final = {
    "BytesList": (("value", 1, "TYPE_BYTES", True),),
    # Floats are declared as 32-bit integers: a Python float loses the bits of a signalling NaN.
    "FloatList": (("value", 1, "TYPE_FIXED32", True),),
    "Int64List": (("value", 1, "TYPE_INT64", True),),
    "Feature": (
        ("bytes_list", 1, "BytesList", False),
        ("float_list", 2, "FloatList", False),
        ("int64_list", 3, "Int64List", False),
    ),
    "Entry": (("key", 1, "TYPE_STRING", False), ("value", 2, "Feature", False)),
    # A map is a list of entries. For a repeated key, the last entry counts.
    "Features": (("feature", 1, "Entry", True),),
    "Example": (("features", 1, "Features", False),),
}
"""The fields of each message: name, number, type, and whether the field is a list."""
LISTS: Final = ("bytes_list", "float_list", "int64_list")


def descriptors() -> Any:
    """Return the protobuf module that declares messages."""
    return needed("google.protobuf.descriptor_pb2", "rlds", "RLDS needs protobuf, of")


@cache
def _example_class(declared: Any) -> Any:
    from importlib import import_module

    pools = import_module("google.protobuf.descriptor_pool")
    factory = import_module("google.protobuf.message_factory")
    file = declared.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    kinds = declared.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, several in fields:
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if several else kinds.LABEL_OPTIONAL
            if kind in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = getattr(kinds, kind)
    pool = pools.DescriptorPool()
    pool.Add(file)
    return factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def new_example() -> Any:
    """Return an empty message."""
    return _example_class(descriptors())()


def add_feature(example: Any, name: str) -> Any:
    """Add a feature to a message and return the feature."""
    entry = example.features.feature.add(key=name)
    entry.value.SetInParent()
    return entry.value


def features_in(content: bytes) -> dict[str, Any]:
    """Return the features of a record, by name.

    Raises:
        InvalidDataset: the record is not a ``tf.train.Example``.
    """
    errors = needed("google.protobuf.message", "rlds", "RLDS needs protobuf, of")
    example = new_example()
    try:
        example.ParseFromString(content)
    except errors.DecodeError as error:
        raise InvalidDataset(f"a record is not a tf.train.Example ({error!s:.200})") from error
    return {entry.key: entry.value for entry in example.features.feature}
