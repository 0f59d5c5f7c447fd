"""Packed fields: little-endian whatever the host, and rows as they were put in."""

import numpy as np
import pytest

from headrace.ipc.packed import (
    float32_view,
    int32_view,
    pack_float32,
    pack_int32,
    pack_uint32,
    rows,
    uint32_view,
    unpack_int32,
)
from tests.ipc.samples import TOKENS


def test_numbers_are_little_endian() -> None:
    assert pack_int32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert pack_uint32([0xFFFFFFFE]) == b"\xfe\xff\xff\xff"
    assert pack_float32([1.0]) == b"\0\0\x80\x3f"


def test_lists_and_arrays_pack_alike() -> None:
    assert pack_int32(np.arange(3)) == pack_int32([0, 1, 2])
    assert pack_uint32(np.arange(3, dtype=np.uint32)) == pack_uint32([0, 1, 2])
    assert pack_int32([]) == b""


@pytest.mark.parametrize(
    ("pack", "value"), [(pack_int32, 1 << 31), (pack_uint32, -1), (pack_uint32, 1 << 32)]
)
def test_a_number_that_does_not_fit_raises(pack: object, value: int) -> None:
    with pytest.raises(OverflowError):
        pack([value])  # type: ignore[operator]


def test_views_read_without_a_copy() -> None:
    data = pack_int32([5, 6, 7])
    assert unpack_int32(data) == [5, 6, 7]
    for view in (int32_view(data), uint32_view(data), float32_view(data)):
        assert len(view) == 3
        assert not view.flags.owndata
        assert not view.flags.writeable


def test_rows_are_streams_with_their_tokens() -> None:
    assert list(rows(TOKENS)) == [(1, 0, [10]), (8, 40, [20, 30])]
