"""The bytes of a stream, chunk by chunk, held against the OpenAI SDK's own types."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletionChunk

from app.errors import ErrorReply
from app.sse import PAD_TO, ChunkFormat, Head, failure

HEAD = Head("chatcmpl-1", 1_700_000_000, 'odd "name"', "fp_1")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def parsed(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    value = json.loads(event[6:])
    ChatCompletionChunk.model_validate(value, strict=True)
    return dict(value)


def events(format: ChunkFormat) -> list[dict[str, object]]:
    return [
        parsed(format.opening({"id": "s"})),
        parsed(format.text("hé\n")),
        parsed(format.closing("stop", {"session": {"id": "s"}, "timings": {"cache_n": 1}})),
    ]


def test_a_stream_opens_with_the_role_and_closes_with_the_reason() -> None:
    first, middle, last = events(ChunkFormat(HEAD))
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert first["session"] == {"id": "s"}
    assert middle["choices"] == [{"index": 0, "delta": {"content": "hé\n"}, "logprobs": None, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert last["timings"] == {"cache_n": 1}


def test_every_chunk_repeats_the_head() -> None:
    for chunk in events(ChunkFormat(HEAD)):
        assert (chunk["id"], chunk["created"], chunk["model"]) == (HEAD.id, HEAD.created, HEAD.model)
        assert "usage" not in chunk


def test_usage_is_null_in_all_chunks_but_its_own() -> None:
    format = ChunkFormat(HEAD, include_usage=True)
    assert all(chunk["usage"] is None for chunk in events(format))
    last = parsed(format.usage(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE)


@pytest.mark.parametrize("text", ["", "\r\n", "\u2028\u2029", "\x00\x1f", "🦦", '"\\', "data: [DONE]\n\n"])
def test_no_text_can_break_the_framing(text: str) -> None:
    choice = json.loads(ChunkFormat(HEAD).text(text)[6:])["choices"][0]
    assert choice["delta"]["content"] == text
    assert parsed(ChunkFormat(HEAD).text(text))


def test_obfuscation_evens_out_the_length_of_deltas() -> None:
    format = ChunkFormat(HEAD, obfuscate=True)
    for length in range(2 * PAD_TO):
        padding = parsed(format.text("x" * length))["obfuscation"]
        assert isinstance(padding, str)
        assert (length + len(padding)) % PAD_TO == 0


def test_a_failure_is_one_event_with_an_error_object() -> None:
    event = failure(ErrorReply(500, "it broke\nbadly", "server_error", "turn_failed"))
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["code"] == "turn_failed"
