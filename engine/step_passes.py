"""The two passes of a step that graphs can replay: decode rows forward, and sampling.

Each takes what the scheduler said, puts the index arrays on their way, and returns the work that
runs later in stream order:

    StepPasses    launches every kernel of a pass, on arrays of this step; the CPU, and
                  --no-cuda-graph
    GraphPasses   launches a captured graph on reserved arrays, padded to its bucket of rows; the
                  same kernels, so the same bits
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .constraints import StepMasks
from .device import Device, FixedInputs, Graph, Graphs, StepInputs
from .forward_batch import (
    DecodeBatch,
    SampleBatch,
    build_decode_batch,
    decode_columns,
    sample_columns,
)
from .sampler import Sampler
from .scheduled_batch import ScheduledBatch, ScheduledDecode

logger = logging.getLogger(__name__)

Array = Any
Work = Callable[[], None]


class StepPasses:
    """`decode` and `sample` launch the kernels of a batch. `decode_graph_rows`: rows of the graph
    that the last decode pass was, padding included; 0 without graphs."""

    decode_graph_rows = 0

    def __init__(
        self,
        inputs: StepInputs,
        decode: Callable[[DecodeBatch], None],
        sample: Callable[[SampleBatch], None],
        sampler: Sampler,
        vocab_limit: int,
    ) -> None:
        self._inputs = inputs
        self._run_decode = decode
        self._run_sample = sample
        self._sampler = sampler
        self._vocab_limit = vocab_limit

    def decode(self, decodes: tuple[ScheduledDecode, ...]) -> Work:
        """The forward pass of generated tokens. May write rows of logits beyond theirs."""
        return self.unpadded_decode(decodes)

    def unpadded_decode(self, decodes: tuple[ScheduledDecode, ...]) -> Work:
        """The same, for where rows of logits beyond theirs are in use. Never a graph."""
        self.decode_graph_rows = 0
        batch = build_decode_batch(decodes, self._inputs.upload)
        return lambda: self._run_decode(batch)

    def sample(self, batch: ScheduledBatch) -> Work:
        """Of the rows of logits that the step samples; there is at least one."""
        columns = sample_columns(batch, len(batch.sampled), self._sampler.features)
        sampled = self._sample_batch(map(self._inputs.upload, columns))
        return lambda: self._run_sample(sampled)

    def masked_sample(self, batch: ScheduledBatch, masks: StepMasks) -> Work:
        """As `sample`, with masks that came after the step's other arrays. Never a graph."""
        columns = sample_columns(batch, len(batch.sampled), self._sampler.features)
        sampled = self._sample_batch(map(self._inputs.upload, columns))
        mask_rows = self._inputs.upload(masks.mask_rows)
        masked = replace(sampled, mask_rows=mask_rows, masks=self._sampler.masks)

        def work() -> None:
            self._sampler.apply_masks(masks)
            self._run_sample(masked)

        return work

    def _sample_batch(self, columns: Iterable[Array]) -> SampleBatch:
        """`columns` as `sample_columns` orders them."""
        rows, slots, positions, features = columns
        params, limit = self._sampler.params, self._vocab_limit
        return SampleBatch(rows, slots, positions, params, limit, features)


class GraphPasses(StepPasses):
    """Both passes as graphs for each bucket of rows up to `max_rows`. Capturing runs each once on
    padding alone, which loads the kernels and writes nothing but outputs."""

    def __init__(
        self,
        inputs: FixedInputs,
        decode: Callable[[DecodeBatch], None],
        sample: Callable[[SampleBatch], None],
        sampler: Sampler,
        vocab_limit: int,
        device: Device,
        graphs: Graphs,
        max_rows: int,
    ) -> None:
        super().__init__(inputs, decode, sample, sampler, vocab_limit)
        self._fixed_inputs = inputs
        self._buckets = row_buckets(max_rows)
        self._decode_inputs = inputs.reserve((3, max_rows), np.int32)
        self._sample_inputs = inputs.reserve((4, max_rows), np.int32)
        slot_mapping = device.empty((max_rows,), "int32")
        self._decode_graphs: dict[int, Graph] = {}
        self._sample_graphs: dict[int, Graph] = {}
        inputs.begin()
        inputs.fill(self._decode_inputs, decode_columns((), max_rows))
        inputs.fill(self._sample_inputs, np.full((4, max_rows), -1, np.int32))
        inputs.flush()
        began, free = time.perf_counter(), device.mem_info()[0]
        for rows in reversed(self._buckets):
            ids, positions, slots = (column[:rows] for column in self._decode_inputs)
            decodes = DecodeBatch(ids, positions, slots, slot_mapping[:rows])
            sampled = self._sample_batch(column[:rows] for column in self._sample_inputs)
            decode(decodes)
            self._decode_graphs[rows] = graphs.capture(partial(decode, decodes))
            sample(sampled)
            self._sample_graphs[rows] = graphs.capture(partial(sample, sampled))
        logger.info(
            "graphs of %d numbers of rows: %.2f s, %.0f MiB with their kernels",
            len(self._buckets),
            time.perf_counter() - began,
            (free - device.mem_info()[0]) / 2**20,
        )

    def decode(self, decodes: tuple[ScheduledDecode, ...]) -> Work:
        max_rows = self._decode_inputs.shape[1]
        self._fixed_inputs.fill(self._decode_inputs, decode_columns(decodes, max_rows))
        self.decode_graph_rows = self._bucket(len(decodes))
        return self._decode_graphs[self.decode_graph_rows].launch

    def sample(self, batch: ScheduledBatch) -> Work:
        max_rows = self._sample_inputs.shape[1]
        self._fixed_inputs.fill(
            self._sample_inputs, sample_columns(batch, max_rows, self._sampler.features)
        )
        return self._sample_graphs[self._bucket(len(batch.sampled))].launch

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= rows)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: padding is at most an eighth beyond 64 rows, and below
    that no more than a GEMM tile has anyway. The last one is `max_rows`."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_rows, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)
