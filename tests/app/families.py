"""Tiny random models with chat templates that behave like those of known families, and what such a model would say.

The templates are our own: in what they do to a history they follow the family's, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.faults import tiny
from tests.models.test_tool_templates import HARMONY, LLAMA, MISTRAL, QWEN, SPECIALS

if TYPE_CHECKING:
    from pathlib import Path

# Qwen3: thoughts of turns before the last question are dropped, and an answer without thinking begins with an empty
# thought that its history does not have (QwenLM/Qwen3 #1826).
QWEN3 = QWEN.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
)

# Mistral 7B v0.3: the tools stand before the last question, and so move with every new one. Newer ones have them in
# front, as MISTRAL has.
MISTRAL_V3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + MISTRAL[MISTRAL.index("{% for m in messages %}{% if") :].replace(
        "[INST]",
        "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST]",
        1,
    )
)

# Gemma 3: no tools and no system of its own, whose text goes before the first question; contents are trimmed, and
# roles must take turns.
GEMMA = (
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if loop.first %}{{ first }}{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)

# gpt-oss: the analysis before a call stays until there is a final answer behind it; final answers keep none.
GPT_OSS = (
    "{% set ns = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    + HARMONY.replace("{% if m.thinking %}", "{% if m.thinking and loop.index0 > ns.final %}")
)


@dataclass(frozen=True)
class Family:
    """`call` and `answer` are what the model says in turn number N, its thought included where it has one."""

    template: str
    call: Callable[[int], str]
    answer: Callable[[int], str]
    specials: tuple[str, ...] = ()
    call_end: str = "<|im_end|>"
    answer_end: str = "<|im_end|>"


def arguments(turn: int) -> str:
    """In an order and with spaces that no client sends back."""
    return f'{{"days":  {turn}, "city": "Paris"}}'


def _hermes(turn: int) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments(turn)}}}\n</tool_call>'


def _said(turn: int) -> str:
    return f"On day {turn} it rains in the morning, and the sun shines later."


def _thought(turn: int) -> str:
    return f"<think>\nThe user asks about day {turn}, so I have to look it up.\n</think>\n\n"


def _analysis(turn: int) -> str:
    return f"<|channel|>analysis<|message|>The user asks about day {turn}.<|end|><|start|>assistant"


def _harmony_call(turn: int) -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{arguments(turn)}"


def _final(turn: int) -> str:
    return f"<|channel|>final<|message|>{_said(turn)}"


def _harmony(thinks: bool) -> Family:
    before: Callable[[int], str] = _analysis if thinks else lambda _turn: ""
    return Family(
        GPT_OSS,
        lambda turn: before(turn) + _harmony_call(turn),
        lambda turn: before(turn) + _final(turn),
        (*SPECIALS[HARMONY], "<|return|>"),
        "<|call|>",
        "<|return|>",
    )


FAMILIES = {
    "qwen3": Family(QWEN3, _hermes, _said),
    "qwen3-thinking": Family(
        QWEN3, lambda turn: _thought(turn) + _hermes(turn), lambda turn: _thought(turn) + _said(turn)
    ),
    "llama3": Family(
        LLAMA,
        lambda turn: f'{{"name": "get_weather", "parameters": {arguments(turn)}}}',
        _said,
        tuple(SPECIALS[LLAMA]),
    ),
    "mistral": Family(
        MISTRAL,
        lambda turn: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {arguments(turn)}}}]',
        _said,
        tuple(SPECIALS[MISTRAL]),
    ),
    "mistral-v3": Family(
        MISTRAL_V3,
        lambda turn: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {arguments(turn)}}}]',
        _said,
        tuple(SPECIALS[MISTRAL]),
    ),
    "gemma": Family(GEMMA, _hermes, _said),
    "gpt-oss": _harmony(thinks=False),
    "gpt-oss-thinking": _harmony(thinks=True),
}


def save(folder: Path, embedded: Path, family: Family) -> Path:
    """A tiny model in `folder` with the family's template and special tokens, and ends of its own."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    ends = {"<|im_end|>", family.call_end, family.answer_end}
    end_ids = sorted(tokenizer.convert_tokens_to_ids(end) for end in ends)
    tiny.save(folder, embedded, vocab_size=len(tokenizer), eos_token_id=end_ids)
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(folder)
    return folder
