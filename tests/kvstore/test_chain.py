from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.chain import KEY_BYTES, beyond, common_prefix, extend, last, namespace, pack, unpack

TOKENS = st.lists(st.integers(0, 200_000), max_size=40).map(lambda ids: array("I", ids))
SPACE = namespace(b"model", "tenant", None)


@given(TOKENS, st.integers(1, 8))
def test_a_chain_has_one_key_per_full_block(ids: array[int], block_tokens: int) -> None:
    chain = extend(None, ids, block_tokens, SPACE)
    assert len(chain) == len(ids) // block_tokens
    assert all(len(key) == KEY_BYTES for key in chain)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_extending_a_chain_equals_computing_it_whole(head: array[int], tail: array[int], block_tokens: int) -> None:
    head = head[: len(head) // block_tokens * block_tokens]
    first = extend(None, head, block_tokens, SPACE)
    rest = extend(first[-1] if first else None, tail, block_tokens, SPACE)
    assert first + rest == extend(None, head + tail, block_tokens, SPACE)


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_tokens_from_the_first_on(left: array[int], right: array[int]) -> None:
    for index, (a, b) in enumerate(zip(extend(None, left, 2, SPACE), extend(None, right, 2, SPACE), strict=False)):
        assert (a == b) == (left[: 2 * index + 2] == right[: 2 * index + 2])


@pytest.mark.parametrize(
    "other",
    [
        namespace(b"other", "tenant", None),
        namespace(b"model", "other", None),
        namespace(b"model", "tenant", ""),
        namespace(b"model", "tenant", "salt"),
        namespace(b"modelt", "enant", None),
    ],
    ids=["model", "tenant", "empty salt", "salt", "shifted boundary"],
)
def test_another_namespace_shares_no_key(other: bytes) -> None:
    assert other != SPACE
    ids = array("I", range(8))
    assert not set(extend(None, ids, 4, SPACE)) & set(extend(None, ids, 4, other))  # type: ignore[arg-type]


@given(TOKENS, TOKENS)
def test_common_prefix_is_the_longest(left: array[int], right: array[int]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def test_common_prefix_is_found_past_a_long_equal_start() -> None:
    left, right = array("I", range(10_000)), array("I", range(10_000))
    right[7_777] = 0
    assert common_prefix(left, right) == 7_777


def test_packed_keys_are_what_they_were() -> None:
    keys = extend(None, array("I", range(40)), 4, SPACE)
    packed = pack(keys)
    assert len(packed) == 16 * len(keys)
    assert list(unpack(packed)) == keys
    assert (last(packed), last(b"")) == (keys[-1], None)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_where_one_chain_leaves_another_is_where_their_tokens_part(shared: int, own: int, others: int) -> None:
    mine = array("I", [*range(shared * 4), *[7] * (own * 4)])
    theirs = array("I", [*range(shared * 4), *[8] * (others * 4)])
    keys = extend(None, mine, 4, SPACE)
    left = beyond(pack(keys), pack(extend(None, theirs, 4, SPACE)))
    assert list(left) == keys[shared:]
