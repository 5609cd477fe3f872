"""The sampling op on the GPU with penalties, biases and masks: against the NumPy op, and batches of
each kind to time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from deltaserve.engine.forward_batch import (
    ALLOWED_IDS,
    LISTED_IDS,
    PENALTIES,
    SampleBatch,
    SampleParams,
)
from deltaserve.engine.logit_adjustments import allocate_adjustments
from deltaserve.engine.ops.cuda.ops import CudaOps
from deltaserve.engine.ops.numpy.ops import NumpyOps
from tests.sampling_cases import NUM_FAILING, empty_outputs, random_case
from tools.gpu_arrays import Arrays, relative_error

VOCAB, LIMIT = 248_320, 248_077
REFERENCE = NumpyOps()

Result = Iterator[tuple[str, float, float]]


def on_device(a: Arrays, value: Any) -> Any:
    """A dataclass of arrays, nested ones too, with its arrays on the GPU."""
    if isinstance(value, np.ndarray):
        return a.cupy.asarray(value)
    if not dataclasses.is_dataclass(value):
        return value
    kind: Any = type(value)
    return kind(**{name: on_device(a, item) for name, item in vars(value).items()})


def check_sample_features(ops: CudaOps, a: Arrays) -> Result:
    """expf may round otherwise than NumPy's, so an id may differ where a draw falls on a border;
    greedy ids may not. Sampled twice, so that the counts of the first are read by the second."""
    rows = 40
    logits, batch = random_case(a.rng, rows, VOCAB, LIMIT)
    batch.params.temperature[::2] = 0
    state = batch.params.adjustments
    assert state is not None
    device = on_device(a, batch)
    logits_on_device = a.cupy.asarray(logits)
    greedy = batch.params.temperature[batch.state_slots] == 0
    for turn in ("first", "second"):
        before = copy.deepcopy(state.output_counts)
        expected = empty_outputs(rows, rows)
        actual = on_device(a, expected)
        ops.sample(logits_on_device, device, *actual.arrays())
        REFERENCE.sample(logits, batch, *expected.arrays())
        ids = a.host(actual.ids)
        differ = ids != expected.ids
        yield f"{turn}: greedy ids that differ", float(differ[greedy].sum()), 0.0
        yield f"{turn}: drawn ids that differ / rows", float(differ[~greedy].mean()), 0.05
        failing = ids[-NUM_FAILING:] != [-1, -2, -2]
        yield f"{turn}: failing rows that differ", float(failing.sum()), 0.0
        same_ids = a.host(actual.top_ids) == expected.top_ids
        yield f"{turn}: top ids that differ", float((~same_ids).sum()), 0.0
        logprobs = a.host(actual.logprobs)[~differ]
        yield f"{turn}: logprobs", relative_error(logprobs, expected.logprobs[~differ]), 1e-5
        counts = a.host(device.params.adjustments.output_counts)
        wrong = (counts != state.output_counts).any(axis=1)[batch.state_slots[~differ]]
        yield f"{turn}: slots with wrong counts", float(wrong.sum()), 0.0
        changed = (before != state.output_counts).any(axis=1).sum()
        yield f"{turn}: no count went up", float(changed == 0), 0.0
        device.params.adjustments.output_counts[...] = a.cupy.asarray(state.output_counts)
    yield from _sums_of_masses(ops, a)


def _sums_of_masses(ops: CudaOps, a: Arrays) -> Result:
    """Added up by segment and by digit, in two ways of adding, a row's masses are the same."""
    rows = 8
    logits = a.fp32(rows, VOCAB) * a.fp32(rows, 1) * 3
    outputs = on_device(a, empty_outputs(rows, rows)).arrays()
    work = ops._workspace.sample
    batch = next(batch for kind, batch in sample_batches(a, rows, VOCAB) if kind == "temperature")
    for temperature in (1.0, 0.7):
        batch.params.temperature[...] = temperature
        batch.params.num_logprobs[...] = 0
        batch.params.top_p[...] = 1
        ops.sample(logits, batch, *outputs)
        sums = work.segment_masses[:rows].sum(axis=1)
        raw_differ = float((work.raw_masses[:rows].sum(axis=1) != sums).sum())
        if temperature == 1:
            yield "rows of which the raw sums differ", raw_differ, 0.0
        batch.params.top_p[...] = 0.9
        ops.sample(logits, batch, *outputs)
        differ = float((work.histograms[:rows].sum(axis=1) != sums).sum())
        yield f"temperature {temperature}: histograms that differ", differ, 0.0


def sample_batches(a: Arrays, rows: int, vocab: int) -> Iterator[tuple[str, SampleBatch]]:
    """A batch of each kind of request, on the GPU: what changes the cost of a row."""

    def batch(
        features: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_logprobs: int = -1,
    ) -> SampleBatch:
        params = SampleParams(
            temperature=np.full(rows, temperature, np.float32),
            top_p=np.full(rows, top_p, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.full(rows, top_k, np.int32),
            seed=np.arange(rows, dtype=np.uint64),
            num_logprobs=np.full(rows, num_logprobs, np.int32),
        )
        index = np.arange(rows, dtype=np.int32)
        own = np.full(rows, features, np.int32)
        return on_device(a, SampleBatch(index, index, index, params, vocab, own))

    state = allocate_adjustments(rows, vocab, np.zeros)
    state.presence_penalty[:] = 1.5
    state.repetition_penalty[:] = 1.1
    state.output_counts[:, ::500] = 1
    state.allowed_ids[:] = 0x55555555
    state.num_listed[:] = 100
    state.listed_ids[:, :100] = 2 * np.arange(0, 200_000, 2000)
    adjustments = on_device(a, state)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "top-p": {"temperature": 1.0, "top_p": 0.95},
        "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
        "greedy, logprobs": {"num_logprobs": 5},
        "greedy, penalties": {"features": PENALTIES},
        "greedy, bias": {"features": LISTED_IDS},
        "greedy, allowed ids": {"features": ALLOWED_IDS},
        "top-k, top-p, penalties": {
            "features": PENALTIES,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.95,
        },
    }
    for name, options in kinds.items():
        made = batch(**options)
        params = dataclasses.replace(made.params, adjustments=adjustments)
        yield name, dataclasses.replace(made, params=params)
