"""Graph passes: which graph a step launches, and what its arrays hold by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.constraints import StepMasks
from deltaserve.engine.forward_batch import PENALTIES, DecodeBatch, SampleBatch
from deltaserve.engine.ops.numpy.device import CpuDevice, CpuStepInputs
from deltaserve.engine.sampler import Sampler
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch, ScheduledDecode, ScheduledPrefill
from deltaserve.engine.sequence import Sequence
from deltaserve.engine.step_passes import GraphPasses, row_buckets


class Graph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.launch = work


class GraphDevice(CpuDevice):
    def capture(self, work: Callable[[], None]) -> Graph:
        return Graph(work)


class FixedInputs(CpuStepInputs):
    """Reserved arrays change when the step's work flushes, no sooner."""

    def __init__(self) -> None:
        self._filled: list[tuple[Any, Any]] = []

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(shape, 99, dtype)

    def fill(self, reserved: Any, host: Any) -> None:
        self._filled.append((reserved, host.copy()))

    def flush(self) -> None:
        for reserved, host in self._filled:
            reserved[...] = host
        self._filled.clear()


class Recorder:
    """The passes' work: keeps what each run reads."""

    def __init__(self) -> None:
        self.decodes: list[list[list[int]]] = []
        self.samples: list[list[list[int]]] = []
        self.masks: tuple[Any, Any] | None = None

    def decode(self, batch: DecodeBatch) -> None:
        assert len(batch.slot_mapping) == batch.num_rows
        columns = (batch.input_ids, batch.positions, batch.state_slots)
        self.decodes.append([column.tolist() for column in columns])

    def sample(self, batch: SampleBatch) -> None:
        assert batch.features is not None
        columns = (batch.rows, batch.state_slots, batch.positions, batch.features)
        self.samples.append([column.tolist() for column in columns])
        self.masks = None if batch.masks is None else (batch.mask_rows, batch.masks)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 31, 64, 65, 100, 256, 700])
def test_buckets_hold_every_number_of_rows(max_rows: int) -> None:
    buckets = row_buckets(max_rows)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == max_rows
    for rows in range(1, max_rows + 1):
        bucket = next(b for b in buckets if b >= rows)
        assert bucket - rows <= max(rows, 7) if rows < 8 else bucket - rows < max(8, rows / 4)


def test_a_step_launches_its_bucket_on_padded_arrays() -> None:
    inputs, work, device = FixedInputs(), Recorder(), GraphDevice()
    sampler = Sampler(6, 50, device, inputs)
    passes = GraphPasses(inputs, work.decode, work.sample, sampler, 50, device, device, 6)
    assert [len(run[0]) for run in work.decodes] == [6, 4, 2, 1]
    for run in (*work.decodes, *work.samples):
        assert set(run[2 if run in work.decodes else 0]) == {-1}  # nothing but padding
    work.decodes.clear(), work.samples.clear()

    sequences = [Sequence(f"{i}", (1,), SamplingParams(), state_slot=i) for i in range(4)]
    sequences[2].params = SamplingParams(presence_penalty=1.0)
    sampler.prepare(tuple(sequences))
    decodes = tuple(
        ScheduledDecode(sequence, slot, 10 + slot, -1, slot != 1)
        for slot, sequence in enumerate(sequences[:3])
    )
    prompt = ScheduledPrefill(sequences[3], 3, 0, 7, True)
    batch = ScheduledBatch(decodes, (prompt,), (), ())
    inputs.begin()
    decode, sample = passes.decode(batch.decodes), passes.sample(batch)
    assert work.decodes == []
    inputs.flush()
    decode(), sample()
    assert work.decodes == [[[-1, -1, -1, 0], [10, 11, 12, 0], [0, 1, 2, -1]]]
    # rows of decodes 0 and 2, then the prompt's behind all decode rows
    columns = [[0, 2, 3, -1], [0, 2, 3, -1], [11, 13, 7, -1], [0, PENALTIES, 0, -1]]
    assert work.samples == [columns]
    assert work.masks is None


def test_an_unpadded_decode_pass_has_no_row_but_its_own() -> None:
    inputs, work, device = FixedInputs(), Recorder(), GraphDevice()
    sampler = Sampler(6, 50, device, inputs)
    passes = GraphPasses(inputs, work.decode, work.sample, sampler, 50, device, device, 6)
    sequences = [Sequence(f"{i}", (1,), SamplingParams(), state_slot=i) for i in range(3)]
    decodes = tuple(ScheduledDecode(s, s.state_slot, 10, -1, True) for s in sequences)
    inputs.begin()
    passes.decode(decodes)
    assert passes.decode_graph_rows == 4
    decode = passes.unpadded_decode(decodes)
    assert passes.decode_graph_rows == 0
    inputs.flush()
    work.decodes.clear()
    decode()
    assert work.decodes == [[[-1, -1, -1], [10, 10, 10], [0, 1, 2]]]


def test_a_masked_step_is_sampled_without_a_graph_when_its_masks_are_known() -> None:
    inputs, work, device = FixedInputs(), Recorder(), GraphDevice()
    sampler = Sampler(6, 50, device, inputs)
    passes = GraphPasses(inputs, work.decode, work.sample, sampler, 50, device, device, 6)
    sequences = [Sequence(f"{i}", (1,), SamplingParams(), state_slot=i) for i in range(3)]
    sampler.prepare(tuple(sequences))
    decodes = tuple(ScheduledDecode(s, s.state_slot, 10, -1, True) for s in sequences)
    batch = ScheduledBatch(decodes, (), (), ())
    inputs.begin()
    passes.decode(batch.decodes)
    inputs.flush()
    work.samples.clear()
    masks = StepMasks(np.array([-1, 0, -1], np.int32), np.array([[6, 7]], np.uint32))
    sample = passes.masked_sample(batch, masks)
    assert work.samples == []
    sample()
    assert work.samples == [[[0, 1, 2], [0, 1, 2], [11, 11, 11], [0, 0, 0]]]
    assert work.masks is not None
    np.testing.assert_array_equal(work.masks[0], [-1, 0, -1])
    np.testing.assert_array_equal(work.masks[1][0], [6, 7])
