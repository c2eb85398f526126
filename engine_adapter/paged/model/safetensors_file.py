"""Tensors of safetensors files as float32. The format's library has no bfloat16 without torch; the format is small.

::

    u64 little-endian: length of the header | header, JSON | data
    header: {name: {"dtype", "shape", "data_offsets": [from, to]}, "__metadata__": {...}}
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.proto.errors import InvalidArgument

_HEADER_BYTES_MAX: Final = 100 << 20  # the format's own bound
_HASH_CHUNK_BYTES: Final = 64 << 20
_INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final[dict[str, npt.DTypeLike]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFile:
    """One file, mapped, not read. Raises :class:`InvalidArgument` for one that is not what it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path}: {error}") from error
        size = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if not 2 <= size <= min(_HEADER_BYTES_MAX, len(self._bytes) - 8):
            raise InvalidArgument(f"{path}: not a safetensors file: a header of {size} bytes")
        self._data = self._bytes[8 + size :]
        try:
            header = msgspec.json.decode(self._bytes[8 : 8 + size].tobytes(), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            self._entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"{path}: not a safetensors file: {error}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensor(self, name: str) -> F32:
        """A copy of one tensor, as float32."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise InvalidArgument(f"{self.path}: {name} is {entry.dtype}: expected one of {', '.join(_DTYPES)}")
        start, end = entry.data_offsets
        dtype = np.dtype(_DTYPES[entry.dtype])
        if not 0 <= start <= end <= len(self._data) or end - start != prod(entry.shape) * dtype.itemsize:
            raise InvalidArgument(f"{self.path}: {name} of shape {entry.shape} cannot be at bytes {start} to {end}")
        # A copy first: a tensor may begin at any byte.
        values = np.array(self._data[start:end]).view(dtype).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32, copy=False)

    def update(self, digest: xxhash.xxh3_128) -> None:
        """Feed the file's bytes to a digest."""
        for start in range(0, len(self._bytes), _HASH_CHUNK_BYTES):
            digest.update(self._bytes[start : start + _HASH_CHUNK_BYTES].data)


def open_folder(folder: Path) -> list[SafetensorsFile]:
    """The files of a model, in the order of their names: those of the index, or ``model.safetensors``."""
    index = folder / _INDEX
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise InvalidArgument(f"{folder}: neither model.safetensors nor {_INDEX} is there")
        return [SafetensorsFile(single)]
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"{index}: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument(f"{index}: {name!r} is not a file name in this folder")
    return [SafetensorsFile(folder / name) for name in names]
