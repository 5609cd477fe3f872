"""The engine's model on a device without an engine: prompts and decode steps by slot, for checks.

Backends are made by `cpu_parts` and `cuda_parts`; the rest does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from deltaserve.engine.cache import allocate_cache
from deltaserve.engine.capacity import Capacity
from deltaserve.engine.config import ModelConfig
from deltaserve.engine.device import Device
from deltaserve.engine.forward_batch import build_decode_batch, build_prefill_batch
from deltaserve.engine.models.qwen3_5 import Qwen35Model, allocate_buffers
from deltaserve.engine.models.weights_layout import ModelWeights
from deltaserve.engine.ops.base import Ops
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledDecode, ScheduledPrefill
from deltaserve.engine.sequence import Sequence

BLOCK_SIZE = 64
Array = Any


@dataclass(frozen=True)
class Parts:
    """A backend for steps of limited size."""

    device: Device
    ops: Ops
    act_dtype: str
    max_rows: int
    max_tokens: int


def cpu_parts(max_rows: int, max_tokens: int, *, round_bf16: bool = True) -> Parts:
    """The NumPy ops; `round_bf16` rounds where CUDA rounds."""
    from deltaserve.engine.ops.numpy import NumpyOps
    from deltaserve.engine.ops.numpy.device import CpuDevice

    return Parts(CpuDevice(), NumpyOps(round_bf16=round_bf16), "float32", max_rows, max_tokens)


def cuda_parts(config: ModelConfig, max_rows: int, max_tokens: int) -> Parts:
    from deltaserve.engine.ops.cuda.device import CudaDevice
    from deltaserve.engine.ops.cuda.loader import KernelLibrary
    from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
    from deltaserve.engine.ops.cuda.shapes import check_shapes

    check_shapes(config, BLOCK_SIZE, max_rows)
    device = CudaDevice()
    heads = config.num_query_heads, config.num_value_heads
    shape = OpsShape(*heads, max_rows, max_tokens)
    ops = CudaOps(KernelLibrary(), shape, device.empty)
    return Parts(device, ops, "bfloat16", max_rows, max_tokens)


class EngineModel:
    """`parts.max_rows` slots of up to `max_len` tokens, in shuffled blocks."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, parts: Parts, max_len: int
    ) -> None:
        self.config = config
        self._device = parts.device
        slots, blocks_each = parts.max_rows, -(-max_len // BLOCK_SIZE)
        capacity = Capacity(
            num_blocks=slots * blocks_each,
            block_size=BLOCK_SIZE,
            num_state_slots=slots,
            max_model_len=max_len,
            max_num_batched_tokens=parts.max_tokens,
            prefill_chunk=parts.max_tokens,
            max_queue=1,
        )
        cache = allocate_cache(config, capacity, self._device, parts.act_dtype)
        buffers = allocate_buffers(config, capacity, self._device, parts.act_dtype)
        shuffled = np.random.default_rng(5).permutation(capacity.num_blocks).astype(np.int32)
        self._tables = shuffled.reshape(slots, blocks_each)
        self._device.write_rows(self._tables, cache.block_tables, 0)
        self._model = Qwen35Model(config, weights, parts.ops, cache, buffers)

    def prefill(
        self, slot: int, ids: SequenceOf[int], start: int, end: int, rows: SequenceOf[int]
    ) -> Array:
        """Runs ids[start:end]; fp32 logits [len(rows), vocab] of `rows`, counted from `start`."""
        piece = ScheduledPrefill(self._sequence(slot, ids), slot, start, end, True)
        batch = build_prefill_batch((piece,), BLOCK_SIZE, self._device.upload)
        batch = replace(batch, logits_rows=self._device.upload(np.array(rows, np.int32)))
        logits = self._device.empty((len(rows), self.config.vocab_size), "float32")
        self._model.prefill(batch, logits)
        return logits

    def decode(self, rows: SequenceOf[tuple[int, int, int]]) -> Array:
        """One step over rows (slot, id, position); fp32 logits [len(rows), vocab]."""
        launch, logits = self.decode_step(rows)
        launch()
        return logits

    def decode_step(
        self, rows: SequenceOf[tuple[int, int, int]]
    ) -> tuple[Callable[[], None], Array]:
        """(launch, logits) of such a step; `launch` uploads and allocates nothing."""
        decodes = tuple(
            ScheduledDecode(self._sequence(slot, ()), slot, position, token, True)
            for slot, token, position in rows
        )
        logits = self._device.empty((len(rows), self.config.vocab_size), "float32")
        batch = build_decode_batch(decodes, self._device.upload)
        return partial(self._model.decode, batch, logits), logits

    def _sequence(self, slot: int, ids: SequenceOf[int]) -> Sequence:
        table = self._tables[slot].tolist()
        return Sequence("", tuple(ids), SamplingParams(), block_table=table, state_slot=slot)
