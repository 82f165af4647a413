"""Sampling: what may be drawn, that draws repeat, and that company in the batch changes nothing."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from models.penalties import penalised
from models.sampling import CANDIDATES, SamplingParams, SamplingRow, sample, uniform

VOCABULARY = 2500


def row(position: int = 10, *, outputs: int = 5, seen: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(
        SamplingParams(**params),
        position,
        outputs,
        array("I", seen),
        frozenset({2, 3}),
    )


def logits(rows: int, *, seed: int = 0, scale: float = 3.0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def reference(scores: Tensor, which: SamplingRow) -> int:
    """The same rules for one row, by plain sorting in Python."""
    params = which.params
    values = scores.double().tolist()
    for token in set(which.token_ids) if params.repetition_penalty != 1.0 else ():
        penalty = params.repetition_penalty
        values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
    if which.num_output_tokens < params.min_tokens:
        for token in which.ending_ids:
            values[token] = -math.inf
    if params.is_greedy:
        return max(range(len(values)), key=lambda token: (values[token], -token))
    top = max(values)
    weights = [math.exp((value - top) / params.temperature) for value in values]
    order = list(range(len(values)))
    if params.is_filtered:
        order.sort(key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, mass = sum(weights[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * max(weights)] or kept[:1]
    target = uniform(params.seed, which.position) * sum(weights[token] for token in kept)
    for token in kept:
        target -= weights[token]
        if target < 0:
            return token
    return kept[-1]


MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 100, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "top_k": CANDIDATES + 500, "top_p": 0.99},
    {"temperature": 5.0, "top_p": 0.999},  # keeps more than the bounded candidates
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.01, "top_k": 50},  # most weights underflow to zero
    {"temperature": 1.0, "min_tokens": 9, "top_p": 0.5},
    {"temperature": 0.0, "min_tokens": 9},
]


def test_each_row_of_a_mixed_batch_draws_what_the_reference_draws() -> None:
    for seed in range(6):
        rows = [
            row(seed * 31 + index, seed=index * 7 + seed, seen=(1, 5, 5, 9), **params)
            for index, params in enumerate(MIXTURE)
        ]
        scores = logits(len(rows), seed=seed)
        assert sample(scores, rows) == [reference(scores[i], which) for i, which in enumerate(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    rows = [row(40 + index, seed=index, seen=(7, 8), **params) for index, params in enumerate(MIXTURE)]
    scores = logits(len(rows), seed=3).to(dtype)
    together = sample(scores, rows)
    alone = [sample(scores[i : i + 1], [which])[0] for i, which in enumerate(rows)]
    backwards = sample(scores.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_ties_of_bf16_logits_are_ordered_by_token_id_whatever_path_a_row_takes() -> None:
    scores = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
    scores[0, 100:] = 1.0
    for position in range(20):
        which = row(position, top_k=200)
        assert sample(scores, [which]) == [reference(scores[0], which)]
        assert 100 <= sample(scores, [which])[0] < 300


def test_greedy_ties_go_to_the_lowest_id() -> None:
    scores = torch.zeros(3, VOCABULARY, dtype=torch.bfloat16)
    scores[:, 2400] = scores[:, 17] = scores[:, 900] = 2.5
    assert sample(scores, [row(temperature=0.0)] * 3) == [17, 17, 17]


def test_draws_follow_the_distribution() -> None:
    weights = [0.5, 0.25, 0.125, 0.125]
    scores = torch.tensor([weights]).log().expand(4000, 4)
    rows = [SamplingRow(SamplingParams(seed=9), position, 0) for position in range(4000)]
    counts = Counter(sample(scores, rows))
    for token, weight in enumerate(weights):
        assert counts[token] / 4000 == pytest.approx(weight, abs=0.03)


def test_seed_and_position_alone_decide_the_random_number() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500
    assert all(0.0 <= uniform(seed, 7) < 1.0 for seed in (0, -1, 2**63, 2**64 + 5))
    mean = sum(uniform(3, position) for position in range(5000)) / 5000
    assert mean == pytest.approx(0.5, abs=0.02)


def test_ending_tokens_cannot_be_drawn_before_min_tokens() -> None:
    scores = logits(1)
    scores[0, 2] = 50.0
    scores[0, 3] = 49.0
    assert sample(scores, [row(temperature=0.0, outputs=3, min_tokens=4)])[0] not in {2, 3}
    assert sample(scores, [row(temperature=0.0, outputs=4, min_tokens=4)]) == [2]


def test_a_repetition_penalty_touches_only_its_own_row_and_leaves_the_logits_alone() -> None:
    scores = torch.zeros(2, 8)
    scores[:, 4], scores[:, 6] = 3.0, 2.0
    before = scores.clone()
    rows = [row(temperature=0.0, repetition_penalty=2.0, seen=(4,)), row(temperature=0.0, seen=(4,))]
    assert sample(scores, rows) == [6, 4]
    assert torch.equal(scores, before)


def test_an_empty_batch_draws_nothing() -> None:
    assert sample(torch.zeros(0, 10), []) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", -1),
        ("min_tokens", -1),
        ("stop", ("",)),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must"):
        SamplingParams(**{field: value})


def test_presence_and_frequency_penalties_look_at_the_output_alone() -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 3.0), (99, 1.0))
    )
    logits = torch.zeros(1, 10)
    logits[0, 1], logits[0, 2], logits[0, 3] = 1.2, 1.0, 0.8
    prompt, output = [3, 3, 3], [1, 1, 2]
    row = SamplingRow(params, 6, len(output), array("I", prompt + output))
    changed = penalised(logits, [row], is_copy=False)
    assert changed[0].tolist() == pytest.approx([0, 0.2, 0.25, 0.8, 0, 0, 0, 3, 0, 0])
    assert logits[0, 1] == pytest.approx(1.2)
    assert sample(logits, [row]) == [7]
