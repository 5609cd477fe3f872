"""Runs the engine's model on the NumPy backend without an engine: prompts in pieces, decode steps,
and the carried state, for tests. Caches start as NaN, so that what must not be read shows."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import numpy as np

from deltaserve.engine.cache import AttentionCache, allocate_cache
from deltaserve.engine.capacity import Capacity
from deltaserve.engine.config import ModelConfig
from deltaserve.engine.forward_batch import build_decode_batch, build_prefill_batch
from deltaserve.engine.models.qwen3_5 import Qwen35Model, allocate_buffers
from deltaserve.engine.models.weights_layout import ModelWeights
from deltaserve.engine.ops.base import CONV_RING, Ops
from deltaserve.engine.ops.numpy import NumpyOps
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledDecode, ScheduledPrefill
from deltaserve.engine.sequence import Sequence
from deltaserve.engine.weights import load_weights
from tests.model_cases import DECODE_START, DECODE_STEPS, Trace

Piece = tuple[int, SequenceOf[int], int, int]
"""(state slot, the sequence's ids, start, end)"""


def load_case(directory: Path, *, round_bf16: bool = False) -> tuple[ModelConfig, ModelWeights]:
    device = CpuDevice()
    config = ModelConfig.from_hf(directory)
    weights = load_weights(directory, config, device, "float32", round_bf16=round_bf16)
    device.close()
    return config, weights


class ModelHarness:
    """A model with caches for `num_slots` sequences of up to `max_len` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops | None = None,
        *,
        num_slots: int = 2,
        max_len: int = 256,
        max_tokens: int = 512,
        block_size: int = 64,
    ) -> None:
        self.config = config
        blocks_each = -(-max_len // block_size)
        capacity = Capacity(
            num_blocks=num_slots * blocks_each,
            block_size=block_size,
            num_state_slots=num_slots,
            max_model_len=max_len,
            max_num_batched_tokens=max_tokens,
            prefill_chunk=max_tokens,
            max_queue=1,
        )
        self._block_size = block_size
        self._device = CpuDevice()
        self.cache = allocate_cache(config, capacity, self._device, "float32")
        self.buffers = allocate_buffers(config, capacity, self._device, "float32")
        for layer in self.cache.layers:
            for array in vars(layer).values():
                array.fill(np.nan)
        shuffled = np.random.default_rng(5).permutation(capacity.num_blocks)
        self.cache.block_tables[...] = shuffled.reshape(num_slots, blocks_each)
        self.model = Qwen35Model(config, weights, ops or NumpyOps(), self.cache, self.buffers)
        self._device.close()

    def prefill(self, *pieces: Piece, rows: SequenceOf[int] | None = None) -> np.ndarray:
        """One pass over pieces of prompts; logits of `rows`, by default of every token."""
        prefills = tuple(
            ScheduledPrefill(self._sequence(slot, ids), slot, start, end, True)
            for slot, ids, start, end in pieces
        )
        batch = build_prefill_batch(prefills, self._block_size, self._device.upload)
        wanted = range(batch.num_tokens) if rows is None else rows
        batch = replace(batch, logits_rows=np.array(wanted, np.int32))
        logits = np.full((len(wanted), self.config.vocab_size), np.nan, np.float32)
        self.model.prefill(batch, logits)
        return logits

    def decode(self, *rows: tuple[int, int, int]) -> np.ndarray:
        """One step over rows (state slot, id, position)."""
        decodes = tuple(
            ScheduledDecode(self._sequence(slot, ()), slot, position, token, True)
            for slot, token, position in rows
        )
        logits = np.full((len(rows), self.config.vocab_size), np.nan, np.float32)
        self.model.decode(build_decode_batch(decodes, self._device.upload), logits)
        return logits

    def states(self, slot: int, length: int) -> dict[str, np.ndarray]:
        """What is carried after `length` tokens, as `Trace.states`."""
        states: dict[str, np.ndarray] = {}
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, AttentionCache):
                positions = np.arange(length)
                blocks = self.cache.block_tables[slot, positions // self._block_size]
                for name in ("k", "v"):
                    cache = getattr(layer, name)
                    rows = cache[blocks, :, positions % self._block_size]
                    states[f"{index}.{name}"] = rows.swapaxes(0, 1)
            else:
                states[f"{index}.recurrent"] = layer.recurrent_state[slot].copy()
                ring = np.arange(length - 3, length) % CONV_RING
                states[f"{index}.conv"] = layer.conv_state[slot, ring]
        return states

    def prefill_in(self, slot: int, ids: SequenceOf[int], sizes: SequenceOf[int]) -> np.ndarray:
        """A prompt in pieces of these sizes; the logits of all its tokens."""
        found, start = [], 0
        for size in sizes:
            found.append(self.prefill((slot, ids, start, start + size)))
            start += size
        return np.concatenate(found)

    def trace(self, ids: list[int]) -> Trace:
        prefill = self.prefill((0, ids, 0, len(ids)))
        self.prefill((1, ids, 0, DECODE_START), rows=[])
        end = DECODE_START + DECODE_STEPS
        decode = [self.decode((1, ids[p], p)) for p in range(DECODE_START, end)]
        return Trace(prefill, np.concatenate(decode), self.states(1, end))

    def _sequence(self, slot: int, ids: SequenceOf[int]) -> Sequence:
        table = self.cache.block_tables[slot].tolist()
        return Sequence("", tuple(ids), SamplingParams(), block_table=table, state_slot=slot)
