"""SamplingParams of the running sequences -> arrays by state slot, which `Ops.sample` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .constraints import StepMasks
from .device import Device, StepInputs
from .forward_batch import SampleParams, SlotFeatures, mask_words
from .logit_adjustments import AdjustmentState, AdjustmentUpdate, adjustment_bytes
from .ops.base import Ops
from .sequence import Sequence

Array = Any


@dataclass(frozen=True)
class ParamsUpdate:
    """The parameters of sequences that just got a slot; arrays as in `SampleParams`, [B]."""

    state_slots: Array
    values: SampleParams
    adjustments: AdjustmentUpdate | None


class Sampler:
    """Owns the parameter arrays. `prepare` runs on the host, `apply` within the step's work."""

    def __init__(
        self, num_state_slots: int, vocab_size: int, device: Device, inputs: StepInputs
    ) -> None:
        self._device = device
        self._inputs = inputs
        self.masks = device.empty((num_state_slots, mask_words(vocab_size)), "uint32")
        """Of the step that is sampled, see `SampleBatch`."""
        self._adjustments = AdjustmentState(num_state_slots, vocab_size, device, inputs)
        shape = (num_state_slots,)
        self.params = SampleParams(
            temperature=device.zeros(shape, "float32"),
            top_p=device.zeros(shape, "float32"),
            min_p=device.zeros(shape, "float32"),
            top_k=device.zeros(shape, "int32"),
            seed=device.zeros(shape, "uint64"),
            num_logprobs=device.zeros(shape, "int32"),
            adjustments=self._adjustments.arrays,
        )

    @property
    def features(self) -> SlotFeatures:
        """After `prepare` of all sequences that hold a slot."""
        return self._adjustments.features

    def prepare(self, admitted: tuple[Sequence, ...]) -> ParamsUpdate | None:
        if not admitted:
            return None
        upload = self._inputs.upload
        params = [sequence.params for sequence in admitted]
        return ParamsUpdate(
            state_slots=upload(np.array([s.state_slot for s in admitted], np.int32)),
            values=SampleParams(
                # the one likeliest id needs no draw
                temperature=upload(
                    np.array([0.0 if p.top_k == 1 else p.temperature for p in params], np.float32)
                ),
                top_p=upload(np.array([p.top_p for p in params], np.float32)),
                min_p=upload(np.array([p.min_p for p in params], np.float32)),
                top_k=upload(np.array([max(p.top_k, 0) for p in params], np.int32)),
                seed=upload(np.array([s.seed % 2**64 for s in admitted], np.uint64)),
                num_logprobs=upload(
                    np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32)
                ),
            ),
            adjustments=self._adjustments.prepare(admitted),
        )

    def apply(self, update: ParamsUpdate, ops: Ops) -> None:
        slots, values = update.state_slots, update.values
        ops.scatter(values.temperature, slots, self.params.temperature)
        ops.scatter(values.top_p, slots, self.params.top_p)
        ops.scatter(values.min_p, slots, self.params.min_p)
        ops.scatter(values.top_k, slots, self.params.top_k)
        ops.scatter(values.seed, slots, self.params.seed)
        ops.scatter(values.num_logprobs, slots, self.params.num_logprobs)
        if update.adjustments is not None:
            self._adjustments.apply(update.adjustments, ops)

    def apply_masks(self, masks: StepMasks) -> None:
        """Within the step's work, before it samples."""
        if len(masks.masks):
            self._device.write_rows(masks.masks, self.masks, 0)


def sampling_state_bytes(num_state_slots: int, vocab_size: int) -> int:
    """Device memory that a `Sampler` takes: its few numbers a slot, masks and adjustments."""
    slot = 5 * 4 + 8 + 4 * mask_words(vocab_size)
    return num_state_slots * slot + adjustment_bytes(num_state_slots, vocab_size)
