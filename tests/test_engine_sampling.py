"""Penalties, biases, forbidden ids, min_tokens and bad_words, from SamplingParams to the chosen id:
against a reference that goes through the ids one by one, and through preemption in the engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.engine.constraints import Constraints
from deltaserve.engine.forward_batch import SampleBatch, sample_columns
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.ops.numpy.ops import NumpyOps
from deltaserve.engine.sampler import Sampler, sampling_state_bytes
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch, ScheduledDecode
from deltaserve.engine.sequence import Sequence
from tests.sampling_cases import empty_outputs

VOCAB, LIMIT, SLOTS = 45, 41, 3
END_IDS = frozenset({7, 40})


def f32(x: float) -> np.float32:
    return np.float32(x)


def reference_id(seq: Sequence, logits: np.ndarray) -> int:
    """The likeliest id that may come next, by the parameters' documented meaning; -2: none may."""
    p, output = seq.params, seq.output_ids
    biases = dict(p.logit_bias)
    best, best_logit = -2, f32(-np.inf)
    for token_id in range(LIMIT):
        x = f32(logits[token_id])
        count = output.count(token_id)
        if count or token_id in seq.prompt_ids:
            r = f32(p.repetition_penalty)
            x = x / r if x > 0 else x * r
        if count:
            x = x - f32(p.frequency_penalty) * f32(count) - f32(p.presence_penalty)
        x = x + f32(biases.get(token_id, 0.0))
        ends = token_id in p.stop_token_ids or (token_id in END_IDS and not p.ignore_eos)
        banned = any(
            word[-1] == token_id
            and len(output) >= len(word) - 1
            and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
            for word in p.bad_words
        )
        allowed = p.allowed_token_ids is None or token_id in p.allowed_token_ids
        if banned or not allowed or (ends and len(output) < p.min_tokens):
            continue
        if x > best_logit:
            best, best_logit = token_id, x
    return best


def random_params(rng: random.Random) -> SamplingParams:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(LIMIT), rng.randint(1, most)))

    def sometimes(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    words = tuple(tuple(rng.choices(range(12), k=rng.randint(1, 3))) for _ in range(20))
    values = {
        "presence_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "repetition_penalty": sometimes(rng.choice([0.5, 1.2, 3.0]), 1.0),
        "logit_bias": sometimes(tuple((i, rng.uniform(-4, 4)) for i in ids(9)), ()),
        "allowed_token_ids": sometimes(tuple(range(12)) + ids(9), None),
        "bad_words": sometimes(words, ()),
        "min_tokens": sometimes(rng.randint(1, 9), 0),
        "stop_token_ids": sometimes(ids(4), ()),
        "ignore_eos": rng.random() < 0.5,
    }
    return SamplingParams(max_tokens=12, temperature=0.0, **values)  # type: ignore[arg-type]


@dataclass
class ScriptedSteps:
    """Samples a step of sequences that hold slots, as ModelRunner does, with logits of its own."""

    rng: random.Random
    device: CpuDevice = field(default_factory=CpuDevice)

    def __post_init__(self) -> None:
        self.inputs = self.device.step_inputs(1 << 20)
        self.sampler = Sampler(SLOTS, VOCAB, self.device, self.inputs)
        self.constraints = Constraints(VOCAB)
        self.ops = NumpyOps()

    def logits(self, rows: int) -> np.ndarray:
        """Few and small ids are likely, so that they come up again; the padding is likeliest."""
        noise = np.random.default_rng(self.rng.getrandbits(32)).normal(0, 1, (rows, VOCAB))
        logits = (noise + np.where(np.arange(VOCAB) < 12, 3.0, 0.0)).astype(np.float32)
        logits[:, LIMIT:] = 50.0
        return logits

    def step(self, admitted: list[Sequence], running: list[Sequence]) -> list[tuple[int, int]]:
        """(sampled id, expected id) of each running sequence."""
        self.inputs.begin()
        update = self.sampler.prepare(tuple(admitted))
        if update is not None:
            self.sampler.apply(update, self.ops)
        decodes = []
        for seq in running:
            seq.num_sampled = len(seq.output_ids) + 1
            position = seq.num_prompt_tokens + len(seq.output_ids) - 1
            decodes.append(ScheduledDecode(seq, seq.state_slot, position, -1, True))
        batch = ScheduledBatch(tuple(decodes), (), (), ())
        rows, slots, positions, features = sample_columns(
            batch, len(running), self.sampler.features
        )
        masks = self.constraints.masks(batch.sampled)
        self.sampler.apply_masks(masks)
        logits = self.logits(len(running))
        outputs = empty_outputs(SLOTS, len(running))
        self.ops.sample(
            logits,
            SampleBatch(
                rows,
                slots,
                positions,
                self.sampler.params,
                LIMIT,
                features,
                masks.mask_rows,
                self.sampler.masks,
            ),
            *outputs.arrays(),
        )
        expected = [reference_id(seq, row) for seq, row in zip(running, logits, strict=True)]
        return list(zip(outputs.ids.tolist(), expected, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_ids_are_those_of_the_reference(seed: int) -> None:
    """Sequences take slots that others held, and lose them in the middle."""
    rng = random.Random(seed)
    steps = ScriptedSteps(rng)
    waiting = [
        Sequence(str(i), tuple(rng.choices(range(LIMIT), k=5)), random_params(rng), END_IDS)
        for i in range(6)
    ]
    running: list[Sequence] = []
    while waiting or running:
        for seq in [seq for seq in running if rng.random() < 0.15]:
            running.remove(seq)
            waiting.append(seq)
        free = [s for s in range(SLOTS) if s not in {seq.state_slot for seq in running}]
        rng.shuffle(free)
        rng.shuffle(waiting)
        admitted = []
        while waiting and free:
            seq = waiting.pop()
            seq.state_slot = free.pop()
            admitted.append(seq)
        running += admitted
        for seq, (token_id, expected) in zip(
            list(running), steps.step(admitted, running), strict=True
        ):
            assert token_id == expected, (seq.params, seq.output_ids)
            seq.output_ids.append(token_id)
            if token_id < 0 or len(seq.output_ids) == seq.params.max_tokens:
                running.remove(seq)
    steps.device.close()


def test_plain_rows_have_no_feature() -> None:
    """Whoever held their slot before: the sampling op then reads their logits and nothing else."""
    steps = ScriptedSteps(random.Random(1))
    first = SamplingParams(
        presence_penalty=1.0,
        logit_bias=((3, 1.0),),
        allowed_token_ids=(3, 4),
        min_tokens=4,
        stop_token_ids=(5,),
    )
    for params, has_features in ((first, True), (SamplingParams(), False)):
        seq = Sequence("a", (1, 2), params, END_IDS, state_slot=1)
        steps.inputs.begin()
        steps.sampler.prepare((seq,))
        decode = ScheduledDecode(seq, 1, 1, -1, True)
        columns = sample_columns(ScheduledBatch((decode,), (), (), ()), 2, steps.sampler.features)
        assert (columns[3, 0] != 0) == has_features
    steps.device.close()


def test_logprobs_are_of_the_raw_logits_whatever_changed_them() -> None:
    """The chosen id is one that penalties, bias and the allowed ids made the only one."""
    params = SamplingParams(
        logprobs=3, presence_penalty=2.0, logit_bias=((3, -50.0),), allowed_token_ids=(3,)
    )
    seq = Sequence("a", (1,), params, state_slot=0, output_ids=[3, 3], num_sampled=2)
    steps = ScriptedSteps(random.Random(1))
    steps.inputs.begin()
    update = steps.sampler.prepare((seq,))
    assert update is not None
    steps.sampler.apply(update, steps.ops)
    decode = ScheduledDecode(seq, 0, 2, -1, True)
    batch = ScheduledBatch((decode,), (), (), ())
    rows, slots, positions, features = sample_columns(batch, 1, steps.sampler.features)
    sampled = SampleBatch(rows, slots, positions, steps.sampler.params, LIMIT, features)
    logits, outputs = steps.logits(1), empty_outputs(SLOTS, 1)
    steps.ops.sample(logits, sampled, *outputs.arrays())
    raw = logits[0, :LIMIT].astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum())
    assert outputs.ids.tolist() == [3]
    np.testing.assert_allclose(outputs.logprobs, expected[3], atol=2e-6)
    order = np.argsort(-expected, kind="stable")[:20]
    assert outputs.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(outputs.top_logprobs[0], expected[order], atol=2e-6)
    steps.device.close()


def test_counts_saturate_rather_than_wrap() -> None:
    seq = Sequence("a", (1,), SamplingParams(frequency_penalty=0.5), state_slot=0)
    seq.output_ids = [3] * 70_000
    steps = ScriptedSteps(random.Random(1))
    [(token_id, _)] = steps.step([seq], [seq])
    assert token_id != 3
    counts = steps.sampler.params.adjustments.output_counts[0].view(np.uint16)  # type: ignore[union-attr]
    assert counts[3] == 65535
    assert counts.sum(dtype=int) == 65535 + 1
    steps.device.close()


def test_the_stated_memory_is_what_a_sampler_allocates() -> None:
    sizes: list[int] = []

    class CountingDevice(CpuDevice):
        def empty(self, shape: tuple[int, ...], dtype: object) -> np.ndarray:
            array = super().empty(shape, dtype)
            sizes.append(array.nbytes)
            return array

        def zeros(self, shape: tuple[int, ...], dtype: object) -> np.ndarray:
            array = super().zeros(shape, dtype)
            sizes.append(array.nbytes)
            return array

    device = CountingDevice()
    inputs = device.step_inputs(1 << 10)
    sizes.clear()
    Sampler(5, 1001, device, inputs)
    assert sampling_state_bytes(5, 1001) == sum(sizes)
    device.close()
