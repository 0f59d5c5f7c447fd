"""Packed fields: little-endian numbers as bytes, and views of them as numpy arrays or rows.

No Python per token: one conversion per field and one slice per row. Called by both sides of the wire.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.ipc.messages import Tokens

INT32 = np.dtype("<i4")
UINT32 = np.dtype("<u4")
UINT8 = np.dtype("u1")
FLOAT32 = np.dtype("<f4")


def pack_int32(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """int32[N] as little-endian bytes. Raises OverflowError for a value that does not fit."""
    return np.asarray(values, INT32).tobytes()


def pack_uint32(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """uint32[N] as little-endian bytes. Raises OverflowError for a value that does not fit."""
    return np.asarray(values, UINT32).tobytes()


def pack_float32(values: Sequence[float] | NDArray[np.floating]) -> bytes:
    """float32[N] as little-endian bytes."""
    return np.asarray(values, FLOAT32).tobytes()


def int32_view(data: bytes) -> NDArray[np.int32]:
    """int32[N] over `data`, read-only, no copy."""
    return np.frombuffer(data, INT32)


def uint32_view(data: bytes) -> NDArray[np.uint32]:
    """uint32[N] over `data`, read-only, no copy."""
    return np.frombuffer(data, UINT32)


def float32_view(data: bytes) -> NDArray[np.float32]:
    """float32[N] over `data`, read-only, no copy."""
    return np.frombuffer(data, FLOAT32)


def unpack_int32(data: bytes) -> list[int]:
    """The numbers of an int32 field."""
    numbers: list[int] = np.frombuffer(data, INT32).tolist()
    return numbers


def rows(tokens: Tokens) -> Iterator[tuple[int, int, list[int]]]:
    """(stream, index of the first token, token ids) of each row, in order."""
    streams = np.frombuffer(tokens.streams, UINT32).tolist()
    starts = np.frombuffer(tokens.starts, UINT32).tolist()
    ids = np.frombuffer(tokens.token_ids, INT32).tolist()
    at = 0
    for stream, start, count in zip(streams, starts, tokens.counts, strict=True):
        yield stream, start, ids[at : at + count]
        at += count
