"""cuda/prepare_decode.cu on the CPU: the work list of decode attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda_on_cpu import CpuKernels

pytestmark = pytest.mark.aot

SPLIT = 128
"""The shortest split, to 32 of them; see cuda/include/decode_work.cuh."""


def test_splits_of_full_length_come_first() -> None:
    contexts, slots = [300, 128, 1, 5000, 7, 256], [3, 0, 1, 2, -1, 4]
    rows, block_size, max_blocks = len(contexts), 64, 80
    positions = np.array(contexts, np.int32) - 1
    items = np.full((200, 4), -7, np.int32)
    first_splits = np.full(rows + 1, -7, np.int32)
    CpuKernels().launch(
        "prepare_decode",
        (1, 1, 1),
        1024,
        np.full(rows, 5, np.int32),
        positions,
        np.array(slots, np.int32),
        np.empty(rows, np.int32),
        np.empty(5, np.int32),
        np.zeros((5, max_blocks), np.int32),
        items,
        first_splits,
        rows,
        max_blocks,
        block_size,
    )
    full, short = [], []
    for row, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        length = SPLIT if context <= 32 * SPLIT else 2 * SPLIT
        for begin in range(0, context if slot >= 0 else 0, length):
            kind = full if begin + length <= context else short
            kind.append([row, begin, context, slot])
    assert items[: len(full) + len(short)].tolist() == full + short
    assert (items[len(full) + len(short) :] == -7).all()
    splits = [3, 1, 1, 20, 0, 2]
    assert first_splits.tolist() == np.cumsum([0, *splits]).tolist()
