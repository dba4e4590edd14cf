"""Encode state as values that ``torch.load(weights_only=True)`` reads. Pure functions.

A value of any other type becomes a dict whose key ``"tallyroll"`` names the type. A user's dict
with this key is encoded in the same way, so that decoding never mistakes it for an encoded value.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import numpy as np
import torch
from tensordict import MemoryMappedTensor

from tallyroll.collector.errors import StateError

_KIND: Final = "tallyroll"
_NATIVE: Final = (bool, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_KEYS: Final = (bool, float, str, type(None))
"""Types of dict keys that need no encoding."""
_WORD: Final = range(-(2**63), 2**63)
_DEEPEST: Final = 100
"""Maximum depth of nested containers in a state."""
_DICTS: Final = {
    each.__name__: each
    for each in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
}
_ITEMS: Final = {each.__name__: each for each in (set, frozenset, collections.deque)}
_FACTORIES: Final = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, bytearray, tuple, list, set, frozenset)
} | {name: each for name, each in (_DICTS | _ITEMS).items() if name != "defaultdict"}
"""Default factories of a `defaultdict` that a checkpoint can name."""
_LAYOUTS: Final = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_BITS: Final = {getattr(torch, f"{sign}int{n}", None) for sign in ("", "u") for n in range(1, 8)}
"""Dtypes smaller than a byte, which `torch.save` rejects."""


def to_plain(value: Any, where: str, *, mapped: bool = False) -> Any:
    """Encode ``value`` so that :func:`from_plain` returns an equal value of the same type.

    Args:
        value: a state, as ``state_dict()`` returns it.
        where: the name of the object with this state, for messages.
        mapped: True to accept memory-mapped tensors, which are decoded as plain tensors.

    Raises:
        StateError: a part of the value cannot be restored unchanged. The message names the part.
    """
    return _Encoder(mapped).encode(value, where, 0)


def from_plain(value: Any) -> Any:
    """Decode a result of :func:`to_plain`.

    Raises:
        StateError: the value is not a result of `to_plain`.
    """
    try:
        return _Decoder().decode(value)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise StateError(
            "the checkpoint holds a value that this version of Tallyroll cannot decode "
            f"({error!r:.200}). Use the version that wrote the checkpoint."
        ) from error


class _Encoder:
    """Encoder of one state. A container that occurs twice in the state is encoded once.

    Args:
        mapped: see `to_plain`.
    """

    def __init__(self, mapped: bool) -> None:
        self._mapped = mapped
        self._done: dict[int, Any] = {}
        """Encoded form of each value, by the id of the value. The state keeps the values alive."""
        self._open: set[int] = set()
        """Ids of the containers that enclose the current value."""
        self._in_key = 0

    def encode(self, value: Any, where: str, depth: int) -> Any:
        """Return the encoded form of a value at ``where``, within ``depth`` containers."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        if kind is int:
            return value if value in _WORD else {_KIND: "int", "hex": hex(value)}
        id_of = id(value)
        if id_of in self._open:
            raise StateError(
                f"{where}: expected values without cycles, got one that contains itself"
            )
        if id_of not in self._done:
            if depth > _DEEPEST:
                raise StateError(
                    f"{where}: expected at most {_DEEPEST} nested containers, got more"
                )
            self._open.add(id_of)
            self._done[id_of] = self._encoded(value, where, depth + 1)
            self._open.remove(id_of)
        return self._done[id_of]

    def _encoded(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind(self._each(value, where, depth))
        if kind in _DICTS.values():
            return self._dict(value, where, depth)
        if kind in _ITEMS.values():
            self._in_key += kind is not collections.deque
            found = {_KIND: kind.__name__, "items": list(self._each(value, where, depth))}
            self._in_key -= kind is not collections.deque
            return found | {"maxlen": value.maxlen} if kind is collections.deque else found
        if kind is bytes or kind is bytearray:
            return {_KIND: kind.__name__, "values": _octets(np.frombuffer(value, np.uint8))}
        if isinstance(value, torch.Tensor) and not self._in_key:
            return self._tensor(value, where)
        if kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type):
            return _array(value, where)
        raise _refused(value, where)

    def _each(self, values: Iterable[Any], where: str, depth: int) -> Iterator[Any]:
        return (self.encode(each, f"{where}[{at}]", depth) for at, each in enumerate(values))

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        def inner(key: Any) -> Any:
            return self.encode(value[key], f"{where}[{key!r:.80}]", depth)

        plain = type(value) is dict and _KIND not in value
        if plain and all(type(key) in _KEYS or _is_word(key) for key in value):
            return {key: inner(key) for key in value}
        self._in_key += 1
        keys = [self.encode(key, f"a key of {where}", depth) for key in value]
        self._in_key -= 1
        values = [self.encode(each, f"{where}[{key!r:.80}]", depth) for key, each in value.items()]
        found = {_KIND: type(value).__name__, "keys": keys, "items": values}
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            name = getattr(value.default_factory, "__name__", "")
            if _FACTORIES.get(name) is not value.default_factory:
                raise StateError(
                    f"{where}: expected a defaultdict whose factory is one of "
                    f"{', '.join(_FACTORIES)}, got {value.default_factory!r:.80}"
                )
            found["factory"] = name
        if attributes := getattr(value, "__dict__", None):  # such as module versions
            found["attributes"] = self.encode(attributes, f"attributes of {where}", depth)
        return found

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        kind = type(value)
        if kind is MemoryMappedTensor and self._mapped:
            return value.detach()
        saved = not value.is_nested and not value.is_meta and value.layout in _LAYOUTS
        if not saved or value.dtype in _BITS or kind not in (torch.Tensor, torch.nn.Parameter):
            raise _refused(value, where)
        if kind is torch.nn.Parameter or value.requires_grad:
            plain, grad = value.detach(), value.requires_grad
            return {_KIND: kind.__name__, "values": plain, "requires_grad": grad}
        return value.detach()


class _Decoder:
    """Decoder of one state."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def decode(self, value: Any) -> Any:
        """Decode a value. The caller must keep it alive, because results are cached by its id."""
        if type(value) not in (dict, list, tuple):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._decoded(value)
        return self._done[id(value)]

    def _decoded(self, value: Any) -> Any:
        if type(value) is not dict:
            return type(value)(map(self.decode, value))
        kind = value.get(_KIND)
        if kind is None:
            return {key: self.decode(each) for key, each in value.items()}
        match kind:
            case "mapping":  # from format 1
                return {key: self.decode(each) for key, each in value["values"].items()}
            case "int":
                return int(value["hex"], 16)
            case "bytes" | "bytearray":
                octets = value["values"].numpy().tobytes()
                return octets if kind == "bytes" else bytearray(octets)
            case "array" if "dtype" not in value:  # from format 1
                return value["values"].numpy()
            case "array" | "scalar":
                return _array_of(value)
            case "str_" | "bytes_":
                return (np.str_ if kind == "str_" else np.bytes_)(self.decode(value["value"]))
            case "Tensor":
                tensor: torch.Tensor = value["values"]
                return tensor.requires_grad_(value["requires_grad"])
            case "Parameter":
                return torch.nn.Parameter(value["values"], value["requires_grad"])
            case "deque":
                return collections.deque(map(self.decode, value["items"]), value["maxlen"])
            case "set" | "frozenset":
                return _ITEMS[kind](map(self.decode, value["items"]))
        return self._dict(_DICTS[kind], value)

    def _dict(self, kind: type, value: dict[str, Any]) -> Any:
        found = kind()
        keys, items = (map(self.decode, value[name]) for name in ("keys", "items"))
        for key, each in zip(keys, items, strict=True):
            found[key] = each
        if "factory" in value:
            found.default_factory = _FACTORIES[value["factory"]]
        if "attributes" in value:
            vars(found).update(self.decode(value["attributes"]))
        return found


def _is_word(key: Any) -> bool:
    return type(key) is int and key in _WORD


def _octets(values: np.ndarray) -> torch.Tensor:
    """Copy bytes [n], which may be read-only, to a tensor."""
    return torch.from_numpy(values.copy())


# --- arrays ---------------------------------------------------------------------------------------


def _array(value: Any, where: str) -> dict[str, Any]:
    """Encode an array or scalar of NumPy as its bytes."""
    if isinstance(value, (np.str_, np.bytes_)):  # an array would drop trailing NULs
        of = "".join(value) if isinstance(value, np.str_) else to_plain(b"".join([value]), where)
        return {_KIND: type(value).__name__, "value": of}
    dtype = value.dtype
    described = _description(dtype)
    if described is None:
        raise _refused(value, f"{where} (dtype {dtype!r:.80})")
    array = np.asarray(value)
    order: Literal["C", "F"] = (
        "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    )
    raw = np.frombuffer(array.tobytes(order), np.uint8)
    return {
        _KIND: "scalar" if isinstance(value, np.generic) else "array",
        "values": _octets(raw),
        "dtype": described,
        "shape": tuple(array.shape),
        "order": order,
    }


def _array_of(value: dict[str, Any]) -> Any:
    dtype = _dtype_of(value["dtype"])
    if dtype.hasobject:
        raise TypeError("expected an array of numbers, got an array of objects")
    raw, shape = value["values"].numpy(), value["shape"]
    if raw.nbytes != dtype.itemsize * np.prod(shape, dtype=object):
        raise ValueError("the size of an array does not match its shape")
    buffer = raw if raw.nbytes else None
    array: np.ndarray = np.ndarray(shape, dtype, buffer, order=value["order"])
    return array[()] if value[_KIND] == "scalar" else array


def _description(dtype: np.dtype[Any]) -> Any:
    """Return plain values from which `_dtype_of` restores a dtype, or None if there are none."""
    if dtype.hasobject or dtype.metadata is not None:
        return None
    found: Any
    if dtype.subdtype is not None:
        base = _description(dtype.subdtype[0])
        found = None if base is None else {"base": base, "shape": tuple(dtype.subdtype[1])}
    elif dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names or ()]
        found = {
            "names": list(dtype.names or ()),
            "formats": [_description(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": [field[2] if len(field) > 2 else None for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
        if None in found["formats"] or not all(type(t) in _KEYS for t in found["titles"]):
            found = None
    elif dtype.kind in "biufc":  # char distinguishes long from long long
        found = dtype.str[0] + dtype.char
    else:
        found = dtype.str if dtype.kind in "mMSUV" else None
    if found is None:
        return None
    try:
        same = _dtype_of(found)
    except (TypeError, ValueError):
        return None
    alike = same == dtype and same.type is dtype.type and same.char == dtype.char
    return found if alike and same.itemsize == dtype.itemsize else None


def _dtype_of(described: Any) -> np.dtype[Any]:
    if isinstance(described, str):
        return np.dtype(described)
    if "base" in described:
        return np.dtype((_dtype_of(described["base"]), described["shape"]))
    of: Any = {name: described[name] for name in ("names", "offsets", "titles", "itemsize")}
    of["formats"] = [_dtype_of(each) for each in described["formats"]]
    found: np.dtype[Any] = np.dtype(of, align=described["aligned"])
    return found


def _refused(value: Any, where: str) -> StateError:
    kind = type(value)
    return StateError(
        f"{where}: expected tensors, arrays, numbers, text, bytes, and lists, sets and dicts of "
        f"these, got {kind.__module__}.{kind.__qualname__}. A checkpoint is read without running "
        "code, so it can hold nothing else. Give the part a state_dict() of such values."
    )
