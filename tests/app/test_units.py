from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.units import UNITS, format_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("20GB", 20 * 10**9),
        ("0.1kb", 100),
        (" 2TiB ", 2 * 2**40),
    ],
)
def test_a_size_is_read_as_it_is_written(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "-1MiB", "1e9", "1,5GiB", "1.5", "5%", "0x10", "1GiB1", "nan"])
def test_what_is_no_size_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"MiB|GiB|unit"):
        parse_bytes(text)


def test_a_bare_letter_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="write 20GB or 20GiB"):
        parse_bytes("20G")


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_lose_nothing_in_any_unit(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (720 * 1024, "720 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_below_it(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8192), (" 32K ", 32768), ("1", 1)])
def test_tokens_are_told_as_context_lengths_are(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "0k", "8q", "-1", "1.5k", "8kk"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens; write 8192 or 8k"):
        parse_tokens(text)
