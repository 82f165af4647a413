"""One forward pass over a packed batch of sequences; blocking, called from the engine thread only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from models.attention import TILE_TOKENS, Arena, PagedCache, SequenceRows
from models.native.decoder import native_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvstore.types import KVLayout


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [position, position + len(token_ids)) of one sequence, to be computed in this pass.

    `slots` is the block table, covering at least these tokens. `wants_logits` asks for the
    logits after the last of them, `wants_all_logits` for those after each.
    """

    token_ids: array[int]
    position: int
    slots: Sequence[int]
    wants_logits: bool
    wants_all_logits: bool = False

    @property
    def num_logits(self) -> int:
        """Rows of logits it gets."""
        return len(self.token_ids) if self.wants_all_logits else int(self.wants_logits)


class Runner:
    """Runs the model over packed chunks, reading and writing K/V in its arena.

    `exact` takes the attention path whose bits do not depend on chunking or company (attention.py); a model
    that the kernels compute has no other (models/native).
    """

    def __init__(self, model: PreTrainedModel, layout: KVLayout, slots: int, *, exact: bool = True) -> None:
        self.layout = layout
        self.exact = exact
        self._model = model
        self._native = native_of(model)
        self._device = model.device
        self.arena = Arena(layout, slots, model.device, model.dtype)

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots that are about to be filled token by token.

        Attention reads whole blocks and masks what is not written yet; a mask makes 0 of any number,
        but not of what a broken or interrupted copy may have left: NaN times 0 is NaN.
        """
        for slot in slots:
            self.arena.slot(slot).zero_()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks' K/V; return logits [rows that are wanted, vocabulary], in the order given."""
        if self._native is not None:
            return self._native.step(self.arena, chunks, _wanted_rows(chunks))
        order = sorted(range(len(chunks)), key=lambda i: _packing_order(chunks[i]))
        packed = [chunks[i] for i in order]
        batch = self._pack(packed)
        ends = np.cumsum([len(chunk.token_ids) for chunk in packed]) - 1
        rows = {place: int(end) for place, end in zip(order, ends, strict=True)}
        wanted = [row for i, chunk in enumerate(chunks) for row in range(rows[i] + 1 - chunk.num_logits, rows[i] + 1)]
        # A single row would take another matmul kernel than two do (attention.py, rule 4).
        keep = wanted * 2 if len(wanted) == 1 and self.exact else wanted or [0, 0]
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            cache=batch.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(keep, device=self._device),
        )
        logits: Tensor = output.logits[0]
        return logits[: len(wanted)]

    def _pack(self, chunks: Sequence[Chunk]) -> _Batch:
        block = self.layout.block_tokens
        sequences: list[SequenceRows] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        token_ids = array("I")
        for chunk in chunks:
            count = len(chunk.token_ids)
            sequences.append(SequenceRows(len(token_ids), count, chunk.position, chunk.slots))
            token_ids.extend(chunk.token_ids)
            position = np.arange(chunk.position, chunk.position + count)
            positions.append(position)
            slots.append(np.asarray(chunk.slots)[position // block])
        if len(token_ids) == 1 and self.exact:
            # Padding to two rows; the padding token attends to itself alone, in the sink slot.
            sequences.append(SequenceRows(1, 1, 0, (self.arena.sink_slot,)))
            token_ids.append(token_ids[0])
            positions.append(np.zeros(1, dtype=np.int64))
            slots.append(np.array([self.arena.sink_slot]))
        position = np.concatenate(positions)
        cache = PagedCache(
            self.arena,
            sequences,
            write_slots=torch.from_numpy(np.concatenate(slots)).to(self._device),
            write_offsets=torch.from_numpy(position % block).to(self._device),
            exact=self.exact,
        )
        return _Batch(
            token_ids=torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None].to(self._device),
            positions=torch.from_numpy(position)[None].to(self._device),
            cache=cache,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """token_ids and positions [1, tokens]."""

    token_ids: Tensor
    positions: Tensor
    cache: PagedCache


def _wanted_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Rows of the batch, packed in the chunks' order, whose logits are wanted."""
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    return [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]


def _packing_order(chunk: Chunk) -> tuple[bool, int]:
    """Single tokens first, longest context first: attention groups neighbours of like length."""
    tiles = -(-(chunk.position + len(chunk.token_ids)) // TILE_TOKENS)
    return len(chunk.token_ids) > 1, -tiles
