"""What changes a row's logits before anything is drawn from them: biases, penalties, masks.

Each works on single places of single rows, so a row's outcome never depends on its company.
Order: bias, repetition, presence and frequency, then what is forbidden outright.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.sampling import SamplingRow


def penalised(scores: Tensor, rows: Sequence[SamplingRow], *, is_copy: bool) -> Tensor:
    """`scores` [rows, vocabulary] fp32 as the rows' parameters change them; copied first unless `is_copy`."""
    changed = [(index, row) for index, row in enumerate(rows) if _changes(row)]
    if not changed:
        return scores
    scores = scores if is_copy else scores.clone()
    repeating = [(index, row) for index, row in changed if row.params.repetition_penalty != 1.0 and row.token_ids]
    for index, row in changed:
        if row.params.logit_bias:
            _bias(scores[index], row.params.logit_bias)
    if repeating:
        _repetition(scores, repeating)
    for index, row in changed:
        if row.params.presence_penalty or row.params.frequency_penalty:
            _occurrence(scores[index], row)
        _mask(scores[index], row)
    return scores


def _changes(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or row.matcher is not None
        or _is_early(row)
    )


def _is_early(row: SamplingRow) -> bool:
    """Too few tokens are out for the turn to end."""
    return bool(row.ending_ids) and row.num_output_tokens < row.params.min_tokens


def _bias(scores: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    known = [(token_id, value) for token_id, value in bias if token_id < len(scores)]
    ids = torch.tensor([token_id for token_id, _ in known], dtype=torch.long, device=scores.device)
    scores[ids] += torch.tensor([value for _, value in known], device=scores.device)


def _repetition(scores: Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
    flat, vocabulary = scores.view(-1), scores.shape[1]
    # Ids seen twice are written twice with the same value, so they need not be made unique.
    seen = [_ids(row.token_ids) + index * vocabulary for index, row in rows]
    places = torch.cat(seen).to(flat.device)
    counts = torch.tensor([len(ids) for ids in seen])
    penalties = torch.tensor([row.params.repetition_penalty for _, row in rows])
    penalty = penalties.repeat_interleave(counts).to(flat.device)
    found = flat[places]
    flat[places] = torch.where(found < 0, found * penalty, found / penalty)


def _occurrence(scores: Tensor, row: SamplingRow) -> None:
    output = row.token_ids[len(row.token_ids) - row.num_output_tokens :]
    if not output:
        return
    counts = torch.bincount(_ids(output))
    ids = counts.nonzero()[:, 0]
    change = row.params.presence_penalty + row.params.frequency_penalty * counts[ids].float()
    scores[ids.to(scores.device)] -= change.to(scores.device)


def _mask(scores: Tensor, row: SamplingRow) -> None:
    """Endings that come too early, and what the grammar does not let through.

    Where it lets through endings alone it wins: an answer that is over has nothing else to say.
    """
    if row.matcher is None:
        if _is_early(row):
            _forbid(scores, row.ending_ids)
        return
    allowed = row.matcher.allowed(len(scores))
    if _is_early(row):
        later = allowed.copy()
        later[[token_id for token_id in row.ending_ids if token_id < len(later)]] = False
        allowed = later if later.any() else allowed
    scores[~torch.from_numpy(allowed).to(scores.device)] = float("-inf")


def _forbid(scores: Tensor, ids: frozenset[int]) -> None:
    known = [token_id for token_id in ids if token_id < len(scores)]
    scores[torch.tensor(known, dtype=torch.long, device=scores.device)] = float("-inf")


def _ids(ids: array[int]) -> Tensor:
    return torch.frombuffer(ids, dtype=torch.int32).long()
