"""Paged attention, registered with transformers' AttentionInterface.

Transformers' model code does the arithmetic of a layer; this module owns what lies between
the projections: new K and V are scattered into the arena's slots (`PagedCache.update`),
then every sequence attends through its own block table (`paged_attention`).

Exactness (docs/decisions/003-exact-attention.md): the bits of a token's output must not depend on how its
sequence was cut into chunks, nor on what else was in the batch. Four rules give that, where
the machine's matmul is invariant to the number of rows (models/exactness.py checks it):

1. one path for every query length: the query folded by KV head to [kv_heads, group * tokens,
   head_dim], plain matmul;
2. keys padded to a multiple of 64 and masked with -inf. Softmax runs over the padded row: its
   lanes see the same numbers in the same order, and trailing zeros add nothing;
3. P @ V is summed in tiles of 256 keys, in fp32, in order (groups of 16 tiles, then the groups),
   since a matmul's blocking over its inner dimension depends on the number of keys;
4. no matmul sees a single row (the runner pads a step of one token to two; a query of one row
   is doubled here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from models.pages import huge

if TYPE_CHECKING:
    from kvstore.types import KVLayout, LayerKV

ATTENTION_NAME = "dormouse_paged"
TILE_TOKENS = 256
PAD_TOKENS = 64
"""Keys are padded to a multiple of this: two vectors of 32 bf16, what softmax takes at a time."""

QUERY_TILE_TOKENS = 128
"""Prefill queries are attended this many at a time, so that a tile of scores stays in cache."""

SUMMED_TILES = 16
"""Tiles are summed in groups of this many: so many addends `torch.sum` takes one after the other (its cascade begins
beyond), and one call costs a twentieth of sixteen additions."""

BATCHED_ROWS_MAX = 64
"""Up to this many query rows all key tiles go through one batched matmul; beyond, one after the other."""


class Arena:
    """The device tier's memory: `slots` equal slots, and two more that no planner knows.

    `zero_slot` stays zero and pads block tables to whole tiles; `sink_slot` takes the K/V of
    padding tokens. Zero-filled, so that masked positions are finite.
    """

    def __init__(self, layout: KVLayout, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layout = layout
        self.slots = slots
        self.zero_slot = slots
        self.sink_slot = slots + 1
        self.slot_elements = layout.slot_bytes // layout.itemsize
        elements = (slots + 2) * self.slot_elements
        # In huge pages on a CPU: heads of blocks lie far apart, each in a page of its own otherwise.
        on_cpu = device.type == "cpu"
        self.data = huge(elements, dtype) if on_cpu else torch.zeros(elements, dtype=dtype, device=device)
        self._workspaces: dict[str, Tensor] = {}
        self._views = {shape: self._view(shape) for shape in set(layout.layers)}

    def _view(self, shape: LayerKV) -> tuple[Tensor, Tensor]:
        row = self.layout.block_tokens * shape.head_dim
        return self.data.view(-1, row), self.data.view(-1, shape.head_dim)

    def block_rows(self, shape: LayerKV) -> Tensor:
        """The arena as rows of one head's block, [rows, block_tokens * head_dim]."""
        return self._views[shape][0]

    def token_rows(self, shape: LayerKV) -> Tensor:
        """The arena as rows of one head's token, [rows, head_dim]."""
        return self._views[shape][1]

    def workspace(self, name: str, *shape: int) -> Tensor:
        """A reused buffer of `shape`: fresh buffers of megabytes cost page faults on every layer."""
        size = math.prod(shape)
        buffer = self._workspaces.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(size, dtype=self.data.dtype, device=self.data.device)
            self._workspaces[name] = buffer
        return buffer[:size].view(shape)

    def slot(self, index: int) -> Tensor:
        """One slot's elements, a view."""
        return self.data[index * self.slot_elements : (index + 1) * self.slot_elements]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a packed step: tokens [start, start + count) of the batch.

    `position` is the first of these tokens' position; `slots` the block table that covers
    everything up to position + count.
    """

    start: int
    count: int
    position: int
    slots: Sequence[int]


@dataclass(slots=True)
class _Group:
    """`sequences` x `count` tokens of the batch that attend together, over `keys` padded keys.

    blocks: [sequences, key blocks] slot indices, padded with the zero slot.
    last_position: [sequences] position of each sequence's last token.
    """

    start: int
    sequences: int
    count: int
    position: int
    keys: int
    blocks: Tensor
    last_position: Tensor


class PagedCache:
    """What transformers sees as the cache during one step over a packed batch.

    Lives for one forward pass. `update` writes K/V into the arena and passes itself on to
    `paged_attention` through the attention keyword arguments.
    """

    is_compileable = False

    def __init__(
        self,
        arena: Arena,
        sequences: Sequence[SequenceRows],
        write_slots: Tensor,
        write_offsets: Tensor,
        *,
        exact: bool = True,
    ) -> None:
        self._exact = exact
        self._arena = arena
        self._layout = arena.layout
        self._write_slots = write_slots
        self._write_offsets = write_offsets
        self._groups = [self._group(members) for members in _alike(sequences, self._layout.block_tokens)]
        self._write_rows: dict[LayerKV, Tensor] = {}
        self._gather_rows: dict[LayerKV, list[Tensor]] = {}
        self._masks: dict[tuple[int, int, int | None], tuple[int, Tensor]] = {}
        for shape in set(self._layout.layers):
            self._index(shape)

    def _group(self, members: Sequence[SequenceRows]) -> _Group:
        device = self._arena.data.device
        first = members[0]
        pad_blocks = max(1, PAD_TOKENS // self._layout.block_tokens)
        used = [self._layout.blocks_for(m.position + m.count) for m in members]
        width = -(-max(used) // pad_blocks) * pad_blocks
        zero = self._arena.zero_slot
        table = [[*m.slots[:n], *([zero] * (width - n))] for m, n in zip(members, used, strict=True)]
        return _Group(
            start=first.start,
            sequences=len(members),
            count=first.count,
            position=first.position,
            keys=width * self._layout.block_tokens,
            blocks=torch.tensor(table, dtype=torch.long, device=device),
            last_position=torch.tensor([m.position + m.count - 1 for m in members], device=device),
        )

    def _index(self, shape: LayerKV) -> None:
        """Row numbers of `shape`'s layers at layer offset 0; each layer adds a constant."""
        block = self._layout.block_tokens
        device = self._arena.data.device
        heads = torch.arange(2 * shape.kv_heads, device=device).view(2, shape.kv_heads, 1)
        per_slot = self._arena.slot_elements // shape.head_dim
        token = self._write_slots * per_slot + self._write_offsets
        self._write_rows[shape] = heads * block + token
        per_slot = self._arena.slot_elements // (block * shape.head_dim)
        heads = heads.view(2, 1, shape.kv_heads, 1)
        self._gather_rows[shape] = [heads + (g.blocks * per_slot)[None, :, None, :] for g in self._groups]

    # --- the two names transformers' models ask of a cache --------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by packed batches: positions are passed explicitly."""
        return 0

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, kwargs: dict[str, Any] | None = None, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `keys`, `values` [1, kv_heads, tokens, head_dim] of one layer into the arena."""
        shape = self._layout.layers[layer_idx]
        rows = self._write_rows[shape] + self._layout.layer_offset(layer_idx) // shape.head_dim
        self._arena.token_rows(shape)[rows] = torch.cat((keys, values))
        if kwargs is not None:
            kwargs["paged_cache"] = self
        return keys, values

    # --- attention ------------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of every token over its own sequence; query and result [tokens, heads, head_dim]."""
        shape = self._layout.layers[layer]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        rows = self._arena.block_rows(shape)
        offset = self._layout.layer_offset(layer) // (self._layout.block_tokens * shape.head_dim)
        group_heads = query.shape[1] // shape.kv_heads
        if options.sinks is not None:
            options.sinks = options.sinks.to(query.dtype).view(shape.kv_heads, group_heads)
        for number, group in enumerate(self._groups):
            index = self._gather_rows[shape][number] + offset
            gathered = self._arena.workspace("gathered", index.numel(), rows.shape[1])
            torch.index_select(rows, 0, index.view(-1), out=gathered)
            kv = gathered.view(2, group.sequences, shape.kv_heads, group.keys, shape.head_dim)
            for first in range(0, group.count, QUERY_TILE_TOKENS):
                count = min(QUERY_TILE_TOKENS, group.count - first)
                start, stop = group.start + first, group.start + first + group.sequences * count
                queries = query[start:stop].view(group.sequences, count, shape.kv_heads, group_heads, -1)
                result = self._attend(number, group, first, queries, kv, options)
                out[start:stop].view(queries.shape).copy_(result)
        return out

    def _attend(
        self, number: int, group: _Group, first: int, queries: Tensor, kv: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Tokens [first, first + count) of every sequence of a group.

        queries [sequences, count, kv_heads, group_heads, head_dim]; kv [2, sequences,
        kv_heads, keys, head_dim]. Keys past the last query are in everyone's future.
        """
        sequences, count, kv_heads, group_heads, head_dim = queries.shape
        keys = group.keys
        if sequences == 1:
            keys = min(keys, -(-(group.position + first + count) // PAD_TOKENS) * PAD_TOKENS)
        heads, rows = sequences * kv_heads, group_heads * count
        folded = queries.permute(0, 2, 3, 1, 4).reshape(heads, rows, head_dim)
        scales_exactly = math.frexp(options.scaling)[0] == 0.5
        if scales_exactly:
            # A power of two changes exponents only, so it may as well scale the query: fewer numbers than scores.
            folded = folded * options.scaling
        if rows == 1 and self._exact:
            folded = folded.expand(-1, 2, -1)
        k, v = kv.view(2, heads, group.keys, head_dim)[:, :, :keys]
        scores = self._arena.workspace("scores", heads, folded.shape[1], keys)
        torch.bmm(folded, k.transpose(1, 2), out=scores)
        if not scales_exactly:
            scores.mul_(options.scaling)
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        column, mask = self._mask(number, group, first, count, keys, options.sliding_window, scores.dtype)
        scores.view(sequences, kv_heads, -1, count, keys)[..., column:].add_(mask)
        probabilities = self._arena.workspace("probabilities", *scores.shape)
        _softmax(scores, options.sinks, probabilities)
        context = self._times_values(probabilities, v)[:, :rows]
        return context.view(sequences, kv_heads, group_heads, count, head_dim).permute(0, 3, 1, 2, 4)

    def _times_values(self, probabilities: Tensor, values: Tensor) -> Tensor:
        if self._exact:
            return tiles_times_values(probabilities, values).to(values.dtype)
        return torch.bmm(probabilities, values)

    def _mask(
        self, number: int, group: _Group, first: int, count: int, keys: int, window: int | None, dtype: torch.dtype
    ) -> tuple[int, Tensor]:
        """Additive mask for columns from `column` on, [sequences, 1, 1, count, keys - column]; same for all layers."""
        cached = self._masks.get((number, first, window))
        if cached is not None:
            return cached
        device = group.last_position.device
        position = group.last_position.view(-1, 1, 1) - (group.count - 1 - first)
        position = position + torch.arange(count, device=device).view(1, -1, 1)
        column = int(position.min()) + 1 if window is None else 0
        key = torch.arange(column, keys, device=device)
        hidden = key > position
        if window is not None:
            hidden = hidden | (key <= position - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        entry = (column, mask.view(group.sequences, 1, 1, count, -1))
        self._masks[number, first, window] = entry
        return entry


@dataclass(slots=True)
class AttentionOptions:
    """What a layer asks of attention besides its query: kept as transformers passes it."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def _alike(sequences: Sequence[SequenceRows], block_tokens: int) -> list[list[SequenceRows]]:
    """Split a batch into runs that attend together: single tokens of like length, or one prefill chunk.

    Neighbours only, so that a run is one slice of the batch; the runner orders decoding
    sequences by length. A run's shortest member has at least two thirds of its tiles.
    """
    runs: list[list[SequenceRows]] = []
    longest = 0
    for sequence in sequences:
        tiles = -(-(sequence.position + sequence.count) // PAD_TOKENS)
        if runs and sequence.count == 1 and runs[-1][0].count == 1 and tiles * 3 >= longest * 2:
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
            longest = tiles
    return runs


def _softmax(scores: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Softmax of [heads, rows, keys] in fp32 inside, rounded to `out`'s dtype.

    A sink ([kv_heads, group_heads]) is one more key of its query head, whose value is zero.
    """
    if sinks is None:
        torch.softmax(scores, -1, out=out)
        return
    heads, rows, _ = scores.shape
    kv_heads, group_heads = sinks.shape
    column = scores.new_full((heads, rows, TILE_TOKENS), float("-inf"))
    column.view(-1, kv_heads, group_heads, rows // group_heads, TILE_TOKENS)[..., 0] = sinks[..., None]
    out.copy_(torch.softmax(torch.cat((column, scores), -1), -1)[..., TILE_TOKENS:])


def tiles_times_values(probabilities: Tensor, values: Tensor) -> Tensor:
    """P @ V in fp32, tile by tile in order: [heads, rows, keys] x [heads, keys, head_dim]."""
    heads, rows, keys = probabilities.shape
    tiles = -(-keys // TILE_TOKENS)
    batched = keys // TILE_TOKENS if rows <= BATCHED_ROWS_MAX and keys >= 2 * TILE_TOKENS else 0
    if batched:
        cut = batched * TILE_TOKENS
        p = probabilities[..., :cut].view(heads, rows, batched, TILE_TOKENS).transpose(1, 2)
        parts = torch.matmul(p, values[:, :cut].reshape(heads, batched, TILE_TOKENS, -1))
    total = torch.zeros((heads, rows, values.shape[-1]), dtype=torch.float32, device=values.device)
    for first in range(0, tiles, SUMMED_TILES):
        end = min(first + SUMMED_TILES, tiles)
        known = min(end, batched)
        if known > first:
            group = parts[:, first:known].sum(1, dtype=torch.float32)
        else:
            group, known = torch.zeros_like(total), first
        for tile in range(known, end):
            part = slice(tile * TILE_TOKENS, min((tile + 1) * TILE_TOKENS, keys))
            group += torch.bmm(probabilities[..., part], values[:, part])
        total += group
    return total


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_cache: PagedCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    if paged_cache is None:
        raise RuntimeError(f"{type(module).__name__} did not hand its attention arguments to cache.update")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged_cache.attend(layer, query[0].transpose(0, 1), options)[None], None


def register() -> None:
    """Make `attn_implementation="dormouse_paged"` known to transformers; no mask is registered, so none is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
