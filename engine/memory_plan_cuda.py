"""The memory plan of a GPU: weights and activations in bf16, state in fp32, the rest KV blocks.

Its sizes follow `memory_plan`, which is the CPU's; nothing is allocated here. The share of the
device that `gpu_memory_utilization` leaves is for the CUDA context, loaded kernels and uploads.
"""

from __future__ import annotations

from collections.abc import Callable

from .capacity import Capacity
from .config import EngineConfig, ModelConfig
from .memory_plan import MemoryPlan, plan_snapshots, sampling_bytes
from .memory_plan import activation_bytes as float32_activation_bytes
from .memory_plan import block_bytes as float32_block_bytes
from .memory_plan import weight_bytes as float32_weight_bytes
from .ops.base import CONV_RING, MAX_SEGMENTS

SEQ_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_NUM_BATCHED_TOKENS = 8192
PREFILL_CHUNK = 1024
"""What None in the config means here."""

STATE_SHARE = 0.4
"""Of what the fixed rows leave: state slots at most."""

WorkspaceBytes = Callable[[int, int], int]
"""(decode rows, prompt tokens of a step) -> bytes of the ops' own buffers."""


def plan_cuda_memory(
    model: ModelConfig, config: EngineConfig, free: int, workspace_bytes: WorkspaceBytes
) -> MemoryPlan:
    """Decides the Capacity for `free` bytes of device memory, before the weights are loaded.

    Raises ValueError, with the numbers, where the model or what the config asks for does not fit.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len: {config.max_model_len} is over the model's {limit} positions"
        )
    wanted_len = config.max_model_len or limit
    blocks_per_seq = -(-wanted_len // config.block_size)
    batched_tokens = config.max_num_batched_tokens or max(
        MAX_NUM_BATCHED_TOKENS, config.prefill_chunk or 0
    )
    prefill_chunk = config.prefill_chunk or min(PREFILL_CHUNK, batched_tokens)
    kv_memory = config.kv_cache_memory
    available = free if kv_memory is not None else int(free * config.gpu_memory_utilization)
    slot, block = slot_bytes(model), max(1, block_bytes(model, config.block_size))

    def fixed_rows(num_seqs: int) -> tuple[tuple[str, int], ...]:
        tokens = max(batched_tokens, num_seqs)
        return (
            ("weights", weight_bytes(model)),
            ("activations", activation_bytes(model, tokens, num_seqs)),
            ("workspace", workspace_bytes(num_seqs, tokens)),
            ("logits", 4 * num_seqs * model.vocab_size),
            ("penalties and masks", sampling_bytes(model, num_seqs)),
            ("block tables", 4 * num_seqs * blocks_per_seq),
        )

    def left(num_seqs: int) -> int:
        return available - sum(size for _, size in fixed_rows(num_seqs))

    num_seqs = config.max_num_seqs or max(
        (n for n in SEQ_BUCKETS if n * slot <= STATE_SHARE * left(n)), default=1
    )
    for_blocks = left(num_seqs) - num_seqs * slot
    least = kv_memory or (blocks_per_seq if config.max_model_len is not None else 1) * block
    num_snapshots = plan_snapshots(config, slot, for_blocks, least)
    for_blocks -= num_snapshots * slot
    num_blocks = (
        min(for_blocks // block, num_seqs * blocks_per_seq)
        if kv_memory is None
        else kv_memory // block
    )
    states = ("state slots", num_seqs * slot), ("snapshots", num_snapshots * slot)
    rows = (*fixed_rows(num_seqs), *states)
    if num_blocks < 1 or for_blocks < num_blocks * block:
        what = "device memory" if kv_memory is None or num_blocks >= 1 else "kv_cache_memory"
        parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in rows)
        raise ValueError(
            f"{what}: too small. {available / 2**30:.2f} GiB may be used; {num_seqs} sequences"
            f" need {parts} and KV blocks of {block / 2**20:.2f} MiB"
            f" ({max(num_blocks, 1)} of them)"
        )
    if config.max_model_len is not None and num_blocks < blocks_per_seq:
        raise ValueError(
            f"max_model_len: {config.max_model_len} tokens take {blocks_per_seq} blocks of "
            f"{config.block_size} and there is room for {num_blocks}; the limit is "
            f"{num_blocks * config.block_size}"
        )
    capacity = Capacity(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_state_slots=num_seqs,
        max_model_len=min(wanted_len, num_blocks * config.block_size),
        max_num_batched_tokens=batched_tokens,
        prefill_chunk=prefill_chunk,
        max_queue=config.max_queue,
        num_snapshots=num_snapshots,
        snapshot_interval=config.snapshot_interval,
    )
    return MemoryPlan(capacity, (*rows, ("KV blocks", num_blocks * block)), available)


def weight_bytes(model: ModelConfig) -> int:
    """bf16, and the few fp32 vectors of the linear layers."""
    num_linear = model.layer_types.count("linear_attention")
    vectors = 2 * num_linear * (2 * model.num_value_heads + model.value_head_dim)
    return float32_weight_bytes(model) // 2 + vectors


def activation_bytes(model: ModelConfig, num_tokens: int, num_seqs: int) -> int:
    """What `models.buffers.allocate_buffers` takes, bf16 but for the partial sums."""
    partials = 4 * MAX_SEGMENTS * num_seqs * model.hidden_size
    return float32_activation_bytes(model, num_tokens) // 2 + partials


def slot_bytes(model: ModelConfig) -> int:
    """One sequence's recurrent state, fp32, and conv state, bf16."""
    state = 4 * model.num_value_heads * model.key_head_dim * model.value_head_dim
    conv = 2 * CONV_RING * model.conv_channels
    return model.layer_types.count("linear_attention") * (state + conv)


def block_bytes(model: ModelConfig, block_size: int) -> int:
    """Keys and values of one block in all full-attention layers."""
    return float32_block_bytes(model, block_size) // 2
