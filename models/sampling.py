"""Logits -> token ids, vectorised over requests with different parameters.

The rules that make a draw repeatable at any load:

1. A row's random number is a pure function of (seed, position): suspension, restart and
   batching cannot shift it, because nothing is consumed from a shared generator.
2. What a row draws depends on its own logits alone. Every operation below works along one row
   (softmax, cumsum, topk), none reduces over rows, and ties are ordered by token id.
3. Greedy ties go to the lowest id.

Logits are first masked and penalised (penalties.py). Filters then apply in transformers' order:
temperature, top_k, top_p, min_p.
In the order (probability descending, id ascending) what each of the last three keeps is a
prefix, so a row's choice is one number: how many candidates it keeps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.penalties import penalised

if TYPE_CHECKING:
    from models.grammar import Grammar, Matcher

CANDIDATES = 1024
"""Candidates looked at before a row falls back to sorting its whole vocabulary."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: fp32 cannot tell the quotients apart from infinity."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens chosen, and when it wants to stop.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the
    other two penalties at 0 are off. `repetition_penalty` looks at prompt and output, `presence_penalty`
    and `frequency_penalty` at the output alone, as at OpenAI and in vLLM. `logit_bias` adds to the
    logits of some ids; those outside the vocabulary are passed over. `top_logprobs` asks for a
    TokenLogprob for every output token, with so many alternatives (None: for none), and
    `prompt_logprobs` for the prompt's tokens, too. Special tokens are no text, but for `visible_ids`.
    Nothing can be drawn that `grammar` does not let through, whatever else is asked.
    No end-of-sequence or stop id can be drawn, and no stop string matches, within the
    first `min_tokens` tokens. With `ignore_eos` the model's own end-of-sequence tokens do not
    end the turn; `stop_token_ids` and `stop` still do.

    Raises:
        ValueError: a value is out of its range; the message begins with the field's name.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    visible_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, fine, rule in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "must be 0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "must be more than 0"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "must be finite"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "must be finite"),
            ("top_logprobs", (self.top_logprobs or 0) >= 0, "must be 0 or more"),
            ("max_new_tokens", self.max_new_tokens >= 0, "must be 0 or more"),
            ("min_tokens", self.min_tokens >= 0, "must be 0 or more"),
            ("stop", all(self.stop), "must not hold an empty string"),
        ):
            if not fine:
                raise ValueError(f"{name} {rule}, not {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        """The most likely token, always."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """Some tokens of the vocabulary may be cut off before drawing."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits and what it belongs to.

    `position` is the number of tokens (prompt and output) before the one drawn now: the
    counter of its random number. `token_ids` are those tokens; only penalties read
    them. `ending_ids` would end the turn: they are masked until `min_tokens` are out. `matcher`
    knows what the grammar lets through.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    ending_ids: frozenset[int] = frozenset()
    matcher: Matcher | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its two arguments only; 53 random bits."""
    return (_mix(_mix(seed & _MASK64) ^ (position & _MASK64)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014): one step of its counter and the finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary], fp32, fp16 or bf16; not written to."""
    assert logits.shape[0] == len(rows)
    if not rows:
        return []
    scores = penalised(logits.float(), rows, is_copy=logits.dtype != torch.float32)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not drawn:
        return _ids(scores.argmax(-1))
    chosen = [0] * len(rows)
    if len(drawn) < len(rows):
        greedy = [index for index, row in enumerate(rows) if row.params.is_greedy]
        _put(chosen, greedy, _ids(scores[greedy].argmax(-1)))
        scores = scores[drawn]
    _put(chosen, drawn, _draw(scores, [rows[index] for index in drawn]))
    return chosen


def _put(target: list[int], places: Sequence[int], values: Sequence[int]) -> None:
    for place, value in zip(places, values, strict=True):
        target[place] = value


def _ids(tensor: Tensor) -> list[int]:
    ids: list[int] = tensor.tolist()
    return ids


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one id per row by inverse CDF; `scores` [rows, vocabulary] fp32."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=scores.device)
    weights = torch.softmax(scores / temperatures[:, None], dim=-1)
    chosen = [0] * len(rows)
    bounded = [i for i, row in enumerate(rows) if row.params.is_filtered and row.params.top_k <= CANDIDATES]
    whole = [i for i, row in enumerate(rows) if not row.params.is_filtered]
    sorting = [i for i, row in enumerate(rows) if row.params.top_k > CANDIDATES]
    if bounded:
        values, ids = _candidates(weights[bounded])
        picked, complete = _pick(values, ids, [rows[i] for i in bounded], weights.shape[1])
        _put(chosen, bounded, picked)
        sorting += [i for i, is_complete in zip(bounded, complete, strict=True) if not is_complete]
    if sorting:
        values, ids = weights[sorting].sort(dim=-1, descending=True, stable=True)
        picked, _ = _pick(values, ids, [rows[i] for i in sorting], weights.shape[1])
        _put(chosen, sorting, picked)
    if whole:
        _put(chosen, whole, _ids(_invert(_cumulated(weights[whole]), [rows[i] for i in whole])))
    return chosen


def _candidates(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens [rows, width] and their ids, by probability descending, then id ascending."""
    width = min(CANDIDATES, weights.shape[1])
    values, ids = weights.topk(width, dim=-1, sorted=False)
    # topk leaves ties in any order. The bits of non-negative floats sort like the floats.
    keys = (values.contiguous().view(torch.int32).long() << 32) | (0xFFFFFFFF - ids)
    order = keys.argsort(dim=-1, descending=True)
    return values.gather(-1, order), ids.gather(-1, order)


def _pick(values: Tensor, ids: Tensor, rows: Sequence[SamplingRow], vocabulary: int) -> tuple[list[int], list[bool]]:
    """Cut sorted candidates [rows, width] as each row asks, and draw.

    The second result says per row whether the candidates sufficed: what the row keeps ends
    among them and no token outside ties with the last one kept, or nothing outside has weight.
    """
    width = values.shape[1]
    device = values.device
    cumulated = _cumulated(values)
    rank = torch.arange(width, device=device)
    top_k = torch.tensor([row.params.top_k or vocabulary for row in rows], device=device)
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)
    min_p = torch.tensor([row.params.min_p for row in rows], device=device)
    at_top_k = cumulated.gather(-1, (top_k.clamp(max=width) - 1)[:, None])
    total = torch.where(top_k[:, None] <= width, at_top_k, torch.ones_like(at_top_k))
    before = cumulated - values
    is_kept = (rank < top_k[:, None]) & (values >= min_p[:, None] * values[:, :1])
    is_kept &= (before < top_p[:, None] * total) | (top_p[:, None] >= 1.0)
    is_kept[:, 0] = True
    # cumprod: rounding must not let a candidate back in behind one that was cut off.
    last = is_kept.long().cumprod(-1).sum(-1, keepdim=True) - 1
    place = _invert(cumulated, rows, last)
    chosen = ids.gather(-1, place[:, None])[:, 0]
    if width == vocabulary:
        return _ids(chosen), [True] * len(rows)
    is_complete = (values.gather(-1, last)[:, 0] > values[:, -1]) | (values[:, -1] == 0)
    return _ids(chosen), is_complete.tolist()


def _cumulated(weights: Tensor) -> Tensor:
    # fp64: in fp32 the tail of 150,000 summands would round away.
    return weights.cumsum(-1, dtype=torch.float64)


def _invert(cumulated: Tensor, rows: Sequence[SamplingRow], last: Tensor | None = None) -> Tensor:
    """Where each row's random number falls in its cumulated weights [rows, width], up to place `last` [rows, 1]."""
    if last is None:
        last = torch.full((len(rows), 1), cumulated.shape[1] - 1, device=cumulated.device)
    drawn = [uniform(row.params.seed, row.position) for row in rows]
    numbers = torch.tensor(drawn, dtype=torch.float64, device=cumulated.device)[:, None]
    total = cumulated.gather(-1, last)
    # Just under the total, else a product rounded up would fall on a token of no weight.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulated, target, right=True)
    return torch.minimum(place, last)[:, 0]
