"""Reads the pickles of CIFAR without running anything that is in them.

A pickle may call any function it can name. Here a name is looked up in a list of seven, all of
them steps in rebuilding a NumPy array; any other is refused. And a listed name is not NumPy's
function either (its `__setstate__` trusts what it is given), but a note of the call, from which
this module builds the array itself, of plain numbers only.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakgauge.errors import DataError

ALLOWED = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
}


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in a pickle of Python 2 or 3: keys as text, arrays as NumPy arrays."""
    try:
        raw = path.read_bytes()
        _check_indices(raw)
        # Python 2 wrote bytes for text; "bytes" leaves them as they are.
        tree = _Reader(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(tree, dict):
            raise TypeError(f"it holds a {type(tree).__name__}")
        return {as_text(key): _value(value) for key, value in tree.items()}
    except _Refused as refused:
        raise DataError(
            f"{path}: this pickle asks for {refused}, which no data needs; it was not run. "
            "Do not trust the file; get it from its public home."
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path}: expected a pickled dict of arrays and lists, got {error!r}; "
            "the file is truncated or another kind of file, get it again."
        ) from error


def as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _Refused(Exception):
    """A pickle named something outside the list."""


class _Name:
    """An allowed name: called, it only notes the call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> _Call:
        return _Call(self.name, args)


class _Call:
    """A noted call, with the state that was to be set on its result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _Name(name)


def _check_indices(raw: bytes) -> None:
    """The reader sets memory aside up to the largest index: a few bytes could ask for all of it."""
    for opcode, index, _ in pickletools.genops(raw):
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(index or 0) <= len(raw):
            raise ValueError(f"index {index} in a file of {len(raw)} bytes")


def _value(node: Any) -> Any:
    """What a noted call stands for; anything else is itself."""
    if not isinstance(node, _Call):
        return node
    if node.name == "encode":
        text, codec = node.args
        if codec not in ("latin1", b"latin1"):
            raise ValueError(f"text encoded as {codec!r}")
        return text.encode("latin1")
    if node.name == "_reconstruct":
        _, shape, dtype, fortran, raw = node.state
        return _array(raw, dtype, shape, "F" if fortran else "C")
    if node.name == "_frombuffer":
        raw, dtype, shape, order = node.args
        return _array(raw, dtype, shape, as_text(order))
    raise ValueError(f"a {node.name} where data was expected")


def _array(raw: Any, dtype: _Call, shape: Any, order: str) -> NDArray[Any]:
    code, byte_order = as_text(dtype.args[0]), as_text(dtype.state[1])
    if not re.fullmatch("[biuf][1248]", code) or byte_order not in ("|", "<", ">"):
        raise ValueError(f"an array of dtype {byte_order}{code}")
    flat = np.frombuffer(_value(raw), byte_order + code)
    return flat.reshape(shape, order="F" if order == "F" else "C")
