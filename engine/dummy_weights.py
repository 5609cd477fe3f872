"""Random weights of a config's shapes, for benchmarks and tries without a checkpoint's data.

The same for a config and seed on every machine. Values are scaled so that a deep model stays
well-conditioned and its greedy output varies; text from it means nothing.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .config import ModelConfig
from .device import Device
from .models.weights_layout import ModelWeights
from .progress import Progress
from .tensor_names import PackedArray, map_arrays, packed_layout

_SEED = 20260101
_BLOCK = (1 << 22) + 15
"""Values drawn for all matrices together, in which each begins at a place of its own. A prime, so
that it is no multiple of a matrix's width and rows differ."""
_WRITE_VALUES = 1 << 22
_LOGITS_STD = 3.0
_BLOCKS_SHARE = 0.5
"""Variance that all residual blocks add, as a share of the embedding's."""


def dummy_weights(
    config: ModelConfig,
    device: Device,
    act_dtype: str,
    *,
    round_bf16: bool = False,
    progress: Progress | None = None,
) -> ModelWeights:
    """What `load_weights` would give for a checkpoint of such values."""
    layout = packed_layout(config, "")
    packed: list[PackedArray] = []
    map_arrays(layout, packed.append)
    packed = list(dict.fromkeys(packed))  # a tied lm_head is the embedding
    total = sum(math.prod(array.shape) for array in packed)
    done = 0
    rng = np.random.Generator(np.random.Philox(_SEED))
    block = rng.standard_normal(_BLOCK, dtype=np.float32)
    arrays: dict[PackedArray, Any] = {}
    for array in packed:
        dtype = "float32" if array.fp32 else act_dtype
        target = arrays[array] = device.empty(array.shape, dtype)
        rounded = not array.fp32 and (round_bf16 or act_dtype == "bfloat16")
        name = array.pieces[0].name
        if len(array.shape) == 1:
            values = _vector(name, array.shape[0], rng)
        else:
            values = block * np.float32(_scale(name, array.shape[1], config))
        if rounded:
            values = values.astype(ml_dtypes.bfloat16)
        if dtype == "float32":
            values = values.astype(np.float32, copy=False)
        if len(array.shape) == 1:
            device.write_rows(values, target, 0)
        else:
            _fill(target, values, int(rng.integers(_BLOCK)), device)
        done += math.prod(array.shape)
        if progress is not None:
            progress("random weights", done, total)
    weights = map_arrays(layout, arrays.__getitem__)
    assert isinstance(weights, ModelWeights)
    return weights


def _fill(target: Any, values: npt.NDArray[Any], offset: int, device: Device) -> None:
    """Row after row from `values`, which is read as a ring from `offset` on."""
    rows, columns = target.shape
    ring = np.concatenate((values, values[:_WRITE_VALUES]))
    step = max(1, _WRITE_VALUES // columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        part = ring[offset : offset + count * columns].reshape(count, columns)
        device.write_rows(part, target, start)
        offset = (offset + count * columns) % len(values)


def _scale(name: str, columns: int, config: ModelConfig) -> float:
    """Standard deviation of a matrix. Those that write to the residual stream are small: where each
    layer adds as much as its input, depth turns rounding into noise."""
    embed = _LOGITS_STD / math.sqrt(config.hidden_size)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return embed
    if name.endswith("conv1d.weight"):
        return 0.4
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        num_blocks = 2 * config.num_layers
        return 2 * embed * math.sqrt(_BLOCKS_SHARE / num_blocks / columns)
    return 1 / math.sqrt(columns)


def _vector(name: str, size: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """The final norm's factors have random signs, or a tied head would find its input again. Other
    norms multiply by 1 + w, the delta net's own by w."""
    if name.endswith("A_log"):
        values = rng.uniform(-4.0, 1.0, size)
    elif name.endswith("dt_bias"):
        values = rng.uniform(-3.0, 1.0, size)
    else:
        values = 0.2 * rng.standard_normal(size)
        if name.endswith("linear_attn.norm.weight"):
            values += 1.0
        elif name == "norm.weight":
            values = (1.0 + values) * rng.choice((-1.0, 1.0), size) - 1.0
    return values.astype(np.float32)
