"""From an EngineConfig to a ModelRunner: picks the device, plans memory, reads the weights.

The only place that names concrete backends; they are imported when picked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .cache import allocate_cache
from .config import ConfigError, EngineConfig, ModelConfig
from .device import Device
from .dummy_weights import dummy_weights
from .memory_plan import CPU, CUDA, MemoryPlan, plan_memory
from .memory_sizes import weight_bytes
from .model_runner import LogitsHook, ModelRunner
from .models.buffers import allocate_buffers
from .models.qwen3_5 import Qwen35Model
from .models.weights_layout import ModelWeights
from .ops.base import Ops
from .progress import Progress
from .tracing import Tracer, Tracing
from .weights import load_weights

logger = logging.getLogger(__name__)


def load_model_runner(
    config: EngineConfig,
    vocab_limit: int,
    *,
    progress: Progress | None = None,
    device: Device | None = None,
    logits_hook: LogitsHook | None = None,
) -> ModelRunner:
    """Raises, before the weights are read, ConfigError for a config that cannot be followed and for
    too little memory, CheckpointError for a model that cannot be served. `device` replaces the CPU
    device in tests."""
    model_config = ModelConfig.from_hf(config.model_path)
    backend = create_backend(config, model_config, device)
    weights = _weights(config, model_config, backend, progress)
    if progress is not None:
        progress("allocating", 0, 0)
    return create_model_runner(
        model_config,
        backend,
        weights,
        vocab_limit=vocab_limit,
        cuda_graph=config.cuda_graph,
        logits_hook=logits_hook,
    )


def _weights(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, progress: Progress | None
) -> ModelWeights:
    device, act_dtype = backend.device, backend.act_dtype
    round_bf16 = config.dtype == "bfloat16"
    if config.load_format == "dummy":
        return dummy_weights(
            model_config, device, act_dtype, round_bf16=round_bf16, progress=progress
        )
    return load_weights(
        config.model_path,
        model_config,
        device,
        act_dtype,
        round_bf16=round_bf16,
        progress=progress,
    )


@dataclass(frozen=True)
class Backend:
    """What a model runs on: `act_dtype` is the type of its activations, weights and KV cache;
    `tracer` is told of steps, layers and ops."""

    device: Device
    ops: Ops
    plan: MemoryPlan
    act_dtype: str
    tracer: Tracer | None = None


def create_model_runner(
    model_config: ModelConfig,
    backend: Backend,
    weights: ModelWeights,
    *,
    vocab_limit: int,
    cuda_graph: bool = True,
    logits_hook: LogitsHook | None = None,
) -> ModelRunner:
    """Allocates caches and buffers as the backend's plan says."""
    device, capacity, act_dtype = backend.device, backend.plan.capacity, backend.act_dtype
    cache = allocate_cache(model_config, capacity, device, act_dtype)
    buffers = allocate_buffers(model_config, capacity, device, act_dtype)
    ops = backend.ops
    tracing = None if backend.tracer is None else Tracing(backend.tracer)
    if tracing is not None:
        ops, device = tracing.ops(ops, weights), tracing.device(device)
    model = Qwen35Model(model_config, weights, ops, cache, buffers)
    if tracing is not None:
        model = tracing.model(model)
    return ModelRunner(
        model,
        ops,
        device,
        cache,
        capacity,
        model_config=model_config,
        vocab_limit=vocab_limit,
        cuda_graph=cuda_graph,
        logits_hook=logits_hook,
    )


def create_backend(
    config: EngineConfig, model_config: ModelConfig, device: Device | None = None
) -> Backend:
    """Picks the backend and plans its memory; the same errors as `load_model_runner`."""
    if device is None and _wants_cuda(config):
        backend = _cuda_backend(config, model_config)
    else:
        backend = _cpu_backend(config, model_config, device)
    logger.info("%s, memory plan\n%s", backend.device.name, backend.plan.table())
    return backend


def _wants_cuda(config: EngineConfig) -> bool:
    """Whether a GPU is asked for, or "auto" finds one; float32 is for the CPU alone."""
    if config.device != "auto":
        return config.device == "cuda"
    from .ops.cuda.detect import has_usable_gpu

    return config.dtype != "float32" and has_usable_gpu()


def _cuda_backend(config: EngineConfig, model_config: ModelConfig) -> Backend:
    from .ops.cuda.detect import check_gpu, find_gpus, has_usable_gpu
    from .ops.cuda.shapes import check_shapes

    if not has_usable_gpu():
        raise ConfigError("device: cuda needs CuPy (pip install '.[cuda12]') and an NVIDIA GPU")
    from .ops.cuda.device import CudaDevice
    from .ops.cuda.loader import KernelLibrary, read_manifest
    from .ops.cuda.nvtx import NvtxTracer
    from .ops.cuda.ops import CudaOps, OpsShape, workspace_bytes

    gpus, index = find_gpus(), config.device_ordinal
    if index >= len(gpus):
        raise ConfigError(f"device_ordinal: {index}, but the GPUs here are 0 to {len(gpus) - 1}")
    try:
        check_shapes(model_config, config.block_size, config.max_num_seqs)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        check_gpu(gpus[index], read_manifest())
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"device: cuda: {error}") from error
    device = CudaDevice(index)
    kernels = KernelLibrary()

    def shape(max_rows: int, max_tokens: int) -> OpsShape:
        heads = model_config.num_query_heads, model_config.num_value_heads
        return OpsShape(*heads, max_rows, max_tokens)

    def workspace(max_rows: int, max_tokens: int) -> int:
        return workspace_bytes(shape(max_rows, max_tokens))

    plan = plan_memory(model_config, config, device.mem_info()[0], CUDA, workspace)
    capacity = plan.capacity
    own_shape = shape(capacity.num_state_slots, capacity.max_num_batched_tokens)
    ops = CudaOps(kernels, own_shape, device.empty)
    tracer = NvtxTracer() if config.enable_profiling else None
    return Backend(device, ops, plan, "bfloat16", tracer)


def _cpu_backend(config: EngineConfig, model_config: ModelConfig, device: Device | None) -> Backend:
    from .ops.numpy import NumpyOps
    from .ops.numpy.blas_threads import limit_blas_threads
    from .ops.numpy.device import CpuDevice

    limit_blas_threads(weight_bytes(model_config, CPU.act))
    device = device or CpuDevice()
    plan = plan_memory(model_config, config, device.mem_info()[0], CPU)
    return Backend(device, NumpyOps(round_bf16=config.dtype == "bfloat16"), plan, "float32")
