"""Headers of slots: what they keep, and that nothing else is taken for one."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from kvstore.codec import FORMAT_VERSION, HEADER_BYTES, HeaderFault, SlotHeader, model_mark, seal, unpack
from kvstore.types import BlockKey

HEADER = SlotHeader(
    model=model_mark(b"m" * 16),
    key=BlockKey(b"k" * 16),
    parent=BlockKey(b"p" * 16),
    first_token=96,
    token_count=32,
    payload_bytes=737_280,
    payload_digest=b"d" * 16,
)


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        pytest.param(replace(HEADER, parent=None, first_token=0), id="first of its chain"),
        pytest.param(replace(HEADER, key=None, parent=None), id="private"),
        pytest.param(replace(HEADER, key=BlockKey(bytes(16)), parent=BlockKey(bytes(16))), id="keys of zeros"),
        pytest.param(replace(HEADER, first_token=2**40, payload_bytes=2**33), id="large"),
    ],
)
def test_a_header_comes_back_as_it_was(header: SlotHeader) -> None:
    page = header.pack()
    assert len(page) == HEADER_BYTES
    assert unpack(memoryview(page)) == header


def test_a_page_of_zeros_is_blank_and_of_anything_else_damaged() -> None:
    assert unpack(bytes(HEADER_BYTES)) is HeaderFault.BLANK
    assert unpack(bytes(HEADER_BYTES - 1) + b"\x01") is HeaderFault.DAMAGED
    assert unpack(random.Random(0).randbytes(HEADER_BYTES)) is HeaderFault.DAMAGED


def test_a_flipped_bit_anywhere_in_a_header_is_noticed() -> None:
    page = HEADER.pack()
    for bit in range(0, 8 * HEADER_BYTES, 3):
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(unpack(bytes(flipped)), HeaderFault)


def test_any_prefix_of_a_header_over_another_is_noticed() -> None:
    fresh, former = HEADER.pack(), replace(HEADER, key=BlockKey(b"x" * 16)).pack()
    found = {unpack(fresh[:torn] + former[torn:]) for torn in range(HEADER_BYTES + 1)}
    assert found == {unpack(fresh), unpack(former), HeaderFault.DAMAGED}


def test_another_versions_header_is_told_from_a_damaged_one_and_not_read() -> None:
    page = bytearray(HEADER.pack())
    struct.pack_into("<I", page, 8, FORMAT_VERSION + 1)
    page = bytearray(seal(bytes(page[:4000])))
    assert unpack(bytes(page)) is HeaderFault.OTHER_FORMAT


def test_a_model_key_of_any_length_leaves_a_mark_of_sixteen_bytes() -> None:
    assert model_mark(b"m" * 32) == b"m" * 16
    assert model_mark(b"m") == b"m" + bytes(15)
