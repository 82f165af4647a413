"""How likely the model found a token, and what it would have said instead.

Probabilities are the model's own: of its logits as they are, before temperature, penalties, biases
and filters, so that they mean the same whatever a request asks of sampling. They are computed only
for rows that ask, since a softmax over the vocabulary is not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 32
"""Rows normalised together: a prompt's logits in fp32 would take hundreds of megabytes."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, the natural logarithm of its probability, and the likeliest alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """Of each row of `logits` [rows, vocabulary] its token's logprob and its `top` alternatives."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        found += _some(logits[start:stop], token_ids[start:stop], top[start:stop])
    return found


def _some(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    # Row by row along the vocabulary: a row's numbers do not depend on its company.
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(top, default=0), logits.shape[1])
    values, ids = logprobs.topk(most, dim=-1)
    return [
        TokenLogprob(token_id, logprob, _alternatives(own_ids[:count], own_values[:count]))
        for token_id, logprob, own_ids, own_values, count in zip(
            token_ids, chosen, ids.tolist(), values.tolist(), top, strict=True
        )
    ]


def _alternatives(ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Likeliest first, ties by id."""
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))
