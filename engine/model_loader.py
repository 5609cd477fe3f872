"""From an EngineConfig to a ModelRunner: picks the device, plans memory, reads the weights.

The only place that names concrete backends; they are imported when picked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .cache import allocate_cache
from .config import EngineConfig, ModelConfig
from .device import Device
from .memory_plan import plan_memory, weight_bytes
from .model_runner import LogitsHook, ModelRunner
from .models.buffers import allocate_buffers
from .models.qwen3_5 import Qwen35Model
from .ops.base import Ops
from .weights import load_weights

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total) while loading; total 0 where a stage has no measure."""


def load_model_runner(
    config: EngineConfig,
    vocab_limit: int,
    *,
    progress: Progress | None = None,
    device: Device | None = None,
    logits_hook: LogitsHook | None = None,
) -> ModelRunner:
    """Raises ValueError, before the weights are read, for a config or a model that cannot be
    served and for too little memory. `device` replaces the CPU device in tests."""
    model_config = ModelConfig.from_hf(config.model_path)
    device, ops = _create_backend(config, model_config, device)
    plan = plan_memory(model_config, config, device.mem_info()[0])
    logger.info("memory plan\n%s", plan.table())
    round_bf16 = config.dtype == "bfloat16"
    weights = load_weights(
        config.model_path, model_config, device, "float32", round_bf16=round_bf16, progress=progress
    )
    if progress is not None:
        progress("allocating", 0, 0)
    cache = allocate_cache(model_config, plan.capacity, device, "float32")
    buffers = allocate_buffers(model_config, plan.capacity, device, "float32")
    model = Qwen35Model(model_config, weights, ops, cache, buffers)
    return ModelRunner(
        model,
        ops,
        device,
        cache,
        plan.capacity,
        model_config=model_config,
        vocab_limit=vocab_limit,
        logits_hook=logits_hook,
    )


def _create_backend(
    config: EngineConfig, model_config: ModelConfig, device: Device | None
) -> tuple[Device, Ops]:
    if config.device == "cuda":
        raise ValueError("device: cuda is not available in this version; use cpu")
    from .ops.numpy import NumpyOps
    from .ops.numpy.blas_threads import limit_blas_threads
    from .ops.numpy.device import CpuDevice

    limit_blas_threads(weight_bytes(model_config))
    return device or CpuDevice(), NumpyOps(round_bf16=config.dtype == "bfloat16")
