"""Detokenizing: whole characters only, stop strings never shown, tokens counted up to the cut."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from models.detokenize import Detokenizer, Kept, StopStrings, special_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

IM_START, IM_END = 1, 2


def run(tokenizer: Tokenizer, ids: Sequence[int], **options: object) -> tuple[list[str], Detokenizer]:
    """Feed `ids` until a stop string; the pieces shown, flush last, and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, special_ids(tokenizer), **options)  # type: ignore[arg-type]
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.step(token_id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()], detokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_a_character_of_several_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    text = "Hi 👋🏽, été 漢字 נסיון 👩‍👩‍👧‍👦!"
    ids = encode(tokenizer, text)
    pieces, detokenizer = run(tokenizer, ids)
    assert len(ids) > len([piece for piece in pieces if piece])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.kept == Kept(len(ids), len(text))


def test_an_answer_cut_in_a_character_shows_and_keeps_what_was_whole(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "ok 👋")
    pieces, detokenizer = run(tokenizer, ids[:-1])
    assert "".join(pieces) == "ok"
    assert detokenizer.kept.num_tokens < len(ids) - 1
    assert detokenizer.kept.text_length == len("ok")


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = [IM_START, *encode(tokenizer, "yes"), IM_END]
    pieces, detokenizer = run(tokenizer, ids)
    assert "".join(pieces) == "yes"
    assert detokenizer.kept == Kept(len(ids), 3)


def test_a_stop_string_split_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "one two") + encode(tokenizer, "\n\n") + encode(tokenizer, "User") + encode(tokenizer, ":")
    pieces, detokenizer = run(tokenizer, ids, stop=["\n\nUser:"])
    assert "".join(pieces) == "one two"
    assert detokenizer.stopped
    assert detokenizer.kept == Kept(len(encode(tokenizer, "one two")), len("one two"))


def test_a_stop_string_inside_a_token_keeps_the_tokens_wholly_before_it(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "The answer")
    assert len(ids) == 2
    pieces, detokenizer = run(tokenizer, ids, stop=["swer"])
    assert "".join(pieces) == "The an"
    assert detokenizer.kept == Kept(1, len("The"))


def test_text_that_only_began_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    pieces, detokenizer = run(tokenizer, encode(tokenizer, "wait for it ST"), stop=["STOP"])
    assert pieces[-1] == "ST"
    assert "".join(pieces) == "wait for it ST"
    assert not detokenizer.stopped


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "a b c a b c")
    assert "".join(run(tokenizer, ids, stop=[" b"])[0]) == "a"
    assert "".join(run(tokenizer, ids, stop=[" b"], min_tokens=3)[0]) == "a b c a"


@given(
    text=st.text(alphabet="ab \n", max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    stops=st.lists(st.text(alphabet="ab \n", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_what_is_shown_ends_where_a_stop_string_begins_however_text_is_cut(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    filter_ = StopStrings(stops)
    shown, taken = "", ""
    bounds = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in itertools.pairwise(bounds):
        taken += text[start:end]
        shown += filter_.feed(text[start:end])
        if filter_.found is not None:
            break
    shown += filter_.flush()
    assert not any(stop in shown for stop in stops)
    if filter_.found is not None:
        assert any(taken.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown == text


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_as_it_went_in(tokenizer: Tokenizer, text: str) -> None:
    ids = [token_id for token_id in encode(tokenizer, text) if token_id not in special_ids(tokenizer)]
    expected = tokenizer.decode(ids)
    pieces, detokenizer = run(tokenizer, ids)
    assert "".join(pieces) == expected.rstrip("\ufffd")
    assert detokenizer.kept.text_length <= len("".join(pieces))


@pytest.fixture
def sentencepiece_like() -> Tokenizer:
    """A tokenizer whose decoder strips the first token's space, as Llama 2's does."""
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "s": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_the_prompts_last_ids_decide_about_a_leading_space(sentencepiece_like: Tokenizer) -> None:
    assert "".join(run(sentencepiece_like, [2, 3])[0]) == "worlds"
    assert "".join(run(sentencepiece_like, [2, 3], prefix_ids=[1])[0]) == " worlds"
