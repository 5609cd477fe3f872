"""The chunked delta rule in Triton's interpreter, against the NumPy op."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.forward_batch import PrefillBatch
from deltaserve.engine.ops.numpy.ops import NumpyOps

from .batches import prefill_batch
from .triton_interpreter import load_kernels

delta_rule = load_kernels("delta_rule_prefill")
import torch  # noqa: E402

pytestmark = pytest.mark.aot

K, V, SLICE = 32, 64, 32
CHUNK = 64
SLOTS = 4


class Problem:
    """Fresh random inputs for `tokens` tokens of HK key heads with `rep` value heads each."""

    def __init__(self, tokens: int, key_heads: int, rep: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.key_heads, self.value_heads = key_heads, key_heads * rep
        self.channels = 2 * key_heads * K + self.value_heads * V

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        self.qkv = random(tokens, self.channels)
        self.qkvzba = random(tokens, self.channels + self.value_heads * (V + 2))
        self.a_log = random(self.value_heads)
        self.dt_bias = random(self.value_heads)
        self.state = random(SLOTS, self.value_heads, K, V)

    def reference(self, batch: PrefillBatch, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        state = self.state.copy()
        qkv = self.qkv[rows]
        out = np.empty((len(qkv), self.value_heads * V), np.float32)
        NumpyOps().delta_rule_prefill(
            qkv, self.qkvzba[rows], self.a_log, self.dt_bias, batch, state, out
        )
        return out, state

    def run(
        self, batch: PrefillBatch, rows: slice, state: np.ndarray, columns: int = SLICE
    ) -> tuple[np.ndarray, np.ndarray]:
        """(out, state) of the four kernels; the given state stays as it is. `columns` of the values
        in a program of the last one."""
        qkv, qkvzba = torch.from_numpy(self.qkv[rows]), torch.from_numpy(self.qkvzba[rows])
        tokens, heads = len(qkv), self.value_heads
        result = torch.from_numpy(state.copy())

        def poisoned(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"))

        out = poisoned(tokens, heads * V)
        w, u = poisoned(heads, tokens, K), poisoned(heads, tokens, V)
        p, a = poisoned(heads, tokens, CHUNK), poisoned(heads, tokens, CHUNK)
        g, beta, q_scale, w_scale, carried = (poisoned(heads, tokens) for _ in range(5))
        cu_seqlens, starts = map(torch.from_numpy, (batch.cu_seqlens, batch.start_positions))
        slots = (batch.state_slots, batch.initial_slots)
        snapshots = (batch.snapshot_starts, batch.snapshot_positions, batch.snapshot_slots)
        num_seqs = batch.num_seqs
        chunks = tokens // CHUNK + 2 * num_seqs
        delta_rule.delta_rule_scores_kernel[(chunks, heads)](
            qkv,
            qkvzba,
            torch.from_numpy(self.a_log),
            torch.from_numpy(self.dt_bias),
            cu_seqlens,
            starts,
            a,
            p,
            g,
            beta,
            q_scale,
            w_scale,
            carried,
            num_seqs,
            tokens,
            self.key_heads,
            heads,
            qkv.shape[1],
            qkvzba.shape[1],
            K=K,
        )
        delta_rule.delta_rule_solve_kernel[(chunks, heads)](a, cu_seqlens, starts, num_seqs, tokens)
        delta_rule.delta_rule_products_kernel[(chunks, heads)](
            qkv,
            a,
            beta,
            w_scale,
            cu_seqlens,
            starts,
            w,
            u,
            num_seqs,
            tokens,
            self.key_heads,
            heads,
            qkv.shape[1],
            K=K,
            V=V,
        )
        delta_rule.delta_rule_states_kernel[(V // columns, heads, num_seqs)](
            qkv,
            w,
            u,
            p,
            g,
            q_scale,
            carried,
            cu_seqlens,
            starts,
            *map(torch.from_numpy, slots + snapshots),
            result,
            out,
            tokens,
            self.key_heads,
            heads,
            qkv.shape[1],
            K=K,
            V=V,
            SLICE=columns,
        )
        return out.numpy(), result.numpy()


@pytest.mark.parametrize(
    ("spans", "rep"),
    [
        ([(0, 1)], 1),
        ([(0, 100)], 2),
        ([(64, 100)], 3),
        ([(37, 75)], 2),
        ([(0, 5), (128, 129), (10, 90)], 2),
    ],
    ids=["one token", "from zero", "carried state", "within chunks", "three sequences"],
)
def test_delta_rule_prefill(spans: list[tuple[int, int]], rep: int) -> None:
    batch = prefill_batch(spans, slots=[2, 0, 3][: len(spans)])
    problem = Problem(batch.num_tokens, 2, rep, seed=5)
    expected_out, expected_state = problem.reference(batch, slice(None))
    out, state = problem.run(batch, slice(None), problem.state)
    np.testing.assert_allclose(out, expected_out, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(state, expected_state, rtol=2e-3, atol=2e-4)


def test_cuts_at_chunk_borders_and_company_leave_the_bits_alone() -> None:
    problem = Problem(150, 1, 1, seed=6)
    whole, state = problem.run(prefill_batch([(0, 150)], [1]), slice(None), problem.state)
    in_company = prefill_batch([(0, 64), (0, 5)], [1, 2])
    head, carried = problem.run(in_company, slice(0, 69), problem.state)
    tail, final = problem.run(prefill_batch([(64, 150)], [1]), slice(64, 150), carried)
    np.testing.assert_array_equal(np.concatenate([head[:64], tail]), whole)
    np.testing.assert_array_equal(final[1], state[1])


def test_snapshots_and_where_the_state_comes_from() -> None:
    """A snapshot has the bits of a prompt cut there, and a sequence that starts from it goes on as
    the one that made it."""
    problem = Problem(150, 2, 2, seed=8)
    state = problem.state.copy()
    state[[1, 2]] = np.nan
    whole = prefill_batch([(0, 150)], [1], snapshots=[[(64, 3), (128, 2)]])
    out, final = problem.run(whole, slice(None), state)
    for position, slot in ((64, 3), (128, 2)):
        _, cut = problem.run(prefill_batch([(0, position)], [1]), slice(0, position), state)
        np.testing.assert_array_equal(final[slot], cut[1])
    np.testing.assert_array_equal(final[0], state[0])
    resumed = prefill_batch([(64, 150)], [0], [3], [[(128, 1)]])
    tail, after = problem.run(resumed, slice(64, 150), final)
    np.testing.assert_array_equal(tail, out[64:])
    np.testing.assert_array_equal(after[0], final[1])
    np.testing.assert_array_equal(after[1], final[2])
    np.testing.assert_array_equal(after[3], final[3])


def test_wide_slices_leave_the_bits_alone() -> None:
    """Which of the two is used depends on how many sequences there are."""
    problem = Problem(129, 2, 2, seed=9)
    batch = prefill_batch([(0, 70), (10, 69)], [1, 0], snapshots=[[(64, 3)], []])
    narrow, narrow_state = problem.run(batch, slice(None), problem.state, columns=32)
    wide, wide_state = problem.run(batch, slice(None), problem.state, columns=64)
    np.testing.assert_array_equal(wide, narrow)
    np.testing.assert_array_equal(wide_state, narrow_state)


def test_similar_keys_with_slow_decay_are_solved_accurately() -> None:
    """Where powers of A lose all digits: keys almost alike, beta near 1, g near 0."""
    problem = Problem(64, 1, 1, seed=7)
    problem.qkv[:, K : 2 * K] = 1 + 0.1 * problem.qkv[:, K : 2 * K]
    problem.qkvzba[:, -2] = 5.0
    problem.qkvzba[:, -1] = -5.0
    batch = prefill_batch([(0, 64)], [1])
    expected_out, expected_state = problem.reference(batch, slice(None))
    out, state = problem.run(batch, slice(None), problem.state)
    np.testing.assert_allclose(out, expected_out, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(state, expected_state, rtol=1e-2, atol=1e-3)
