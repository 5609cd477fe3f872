"""The memory plan: what goes where, decided once at start from free memory, and the Capacity of it.

Sizes are computed here from the shapes in `cache` and `models.weights_layout`; nothing is allocated
here. This is the plan of the CPU device: activations are float32 and memory is the host's, which
others use too, so of what the weights and buffers leave the KV blocks get at most half.
"""

from __future__ import annotations

from dataclasses import dataclass

from .capacity import Capacity
from .config import EngineConfig, ModelConfig
from .forward_batch import mask_words
from .logit_adjustments import adjustment_bytes
from .ops.base import CONV_RING, MAX_SEGMENTS

SEQ_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of running sequences to choose from; more than the last only make a CPU step longer."""

BATCHED_TOKENS = 256
PREFILL_CHUNK = 128
"""The budgets of a step where the config has none. The CPU is no faster at larger ones, and a step
is how long an abort, a new request or the next token of a running one waits."""

STATE_SHARE = 0.4
KV_SHARE = 0.5
"""Of what the weights and buffers leave: state slots at most, then of the rest the KV blocks."""

SNAPSHOT_SHARE = 0.1
MAX_SNAPSHOTS = 64
"""Of what the state slots leave, and how many on the CPU unless `snapshot_memory` says more."""

_ITEM = 4  # bytes of a float32 or an int32


@dataclass(frozen=True)
class MemoryPlan:
    """`rows`: (what, bytes), in the order they are allocated."""

    capacity: Capacity
    rows: tuple[tuple[str, int], ...]
    available: int

    def table(self) -> str:
        """The plan for people: one line a row, sizes in MiB."""
        c = self.capacity
        rows = [*self.rows, ("total", sum(size for _, size in self.rows))]
        rows.append(("available", self.available))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {size / 2**20:>10,.1f} MiB" for name, size in rows]
        lines.append(
            f"{c.num_state_slots} sequences at once, {c.num_blocks} blocks of {c.block_size} "
            f"tokens, {c.num_snapshots} snapshots, {c.max_model_len} tokens a sequence, steps of "
            f"{c.max_num_batched_tokens} prompt tokens ({c.prefill_chunk} beside decoding)"
        )
        return "\n".join(lines)


def plan_memory(model: ModelConfig, config: EngineConfig, available: int) -> MemoryPlan:
    """Decides the Capacity for `available` bytes of host memory.

    Raises ValueError, with the numbers, where the model or what the config asks for does not fit.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len: {config.max_model_len} is over the model's {limit} positions"
        )
    wanted_len = config.max_model_len or limit

    weights = weight_bytes(model)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        BATCHED_TOKENS, config.prefill_chunk or 0
    )
    activations = activation_bytes(model, max_num_batched_tokens)
    left = available - weights - activations
    blocks_per_seq = -(-wanted_len // config.block_size)
    slot = sequence_bytes(model, blocks_per_seq)
    num_seqs = config.max_num_seqs or max(
        (n for n in SEQ_BUCKETS if n * slot <= STATE_SHARE * left), default=1
    )
    left -= num_seqs * slot
    block = max(1, block_bytes(model, config.block_size))
    kv_memory = config.kv_cache_memory
    if kv_memory is None:
        num_blocks = min(int(left * KV_SHARE) // block, num_seqs * blocks_per_seq)
    else:
        num_blocks = kv_memory // block
    snapshot = slot_bytes(model)
    num_snapshots = plan_snapshots(config, snapshot, left, num_blocks * block, MAX_SNAPSHOTS)
    if num_blocks < 1 or left < num_blocks * block + num_snapshots * snapshot:
        needed = weights + activations + num_seqs * slot + max(num_blocks, 1) * block
        needed += num_snapshots * snapshot
        what = "available memory" if kv_memory is None or num_blocks else "kv_cache_memory"
        raise ValueError(
            f"{what}: too small. The model needs {_size(needed)} (weights {_size(weights)}, "
            f"activations {_size(activations)}, {num_seqs} sequences {_size(num_seqs * slot)}, "
            f"{num_snapshots} snapshots {_size(num_snapshots * snapshot)}, KV blocks of {block} "
            f"bytes); {_size(available)} is available"
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
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk or min(PREFILL_CHUNK, max_num_batched_tokens),
        max_queue=config.max_queue,
        num_snapshots=num_snapshots,
        snapshot_interval=config.snapshot_interval,
    )
    rows = (
        ("weights", weights),
        ("activations", activations),
        ("sequences", num_seqs * slot),
        ("snapshots", num_snapshots * snapshot),
        ("KV blocks", num_blocks * block),
    )
    return MemoryPlan(capacity, rows, available)


def plan_snapshots(
    config: EngineConfig, snapshot: int, left: int, for_blocks: int, most: int | None = None
) -> int:
    """How many snapshots of so many bytes there are: what `snapshot_memory` says, else up to `most`
    in a share of what is left, but nothing of what the KV blocks must have."""
    if not config.enable_prefix_caching:
        return 0
    if config.snapshot_memory is not None:
        return config.snapshot_memory // snapshot
    found = max(0, min(int(left * SNAPSHOT_SHARE), left - for_blocks)) // snapshot
    return found if most is None else min(found, most)


def weight_bytes(model: ModelConfig) -> int:
    h, mlp = model.hidden_size, 3 * model.hidden_size * model.intermediate_size
    attention = h * (model.attention_in_size + model.num_query_heads * model.head_dim)
    attention += 2 * model.head_dim
    delta_net = h * (model.linear_in_size + model.value_size) + CONV_RING * model.conv_channels
    delta_net += 2 * model.num_value_heads + model.value_head_dim
    num_attention = model.layer_types.count("full_attention")
    elements = num_attention * attention + (model.num_layers - num_attention) * delta_net
    elements += model.num_layers * (mlp + 2 * h) + h
    elements += model.vocab_size * h * (1 if model.tie_word_embeddings else 2)
    return _ITEM * elements


def activation_bytes(model: ModelConfig, num_tokens: int) -> int:
    """What `models.buffers.allocate_buffers` takes for steps of `num_tokens`."""
    query_size = model.num_query_heads * model.head_dim
    delta_net = model.linear_in_size + model.conv_channels + model.value_size
    attention = model.attention_in_size + 2 * query_size
    width = max(delta_net, attention, model.intermediate_size)
    return _ITEM * num_tokens * (3 * model.hidden_size + width)


def sequence_bytes(model: ModelConfig, num_blocks: int) -> int:
    """One running sequence: its state, block table, what sampling keeps for it, and rows of logits
    and of partial sums."""
    row = model.vocab_size + MAX_SEGMENTS * model.hidden_size
    return slot_bytes(model) + sampling_bytes(model, 1) + _ITEM * (num_blocks + row)


def sampling_bytes(model: ModelConfig, num_seqs: int) -> int:
    """Penalty counts, biases and bitmasks."""
    masks = _ITEM * num_seqs * mask_words(model.vocab_size)
    return adjustment_bytes(num_seqs, model.vocab_size) + masks


def slot_bytes(model: ModelConfig) -> int:
    """The recurrent and conv state of one sequence."""
    state = model.num_value_heads * model.key_head_dim * model.value_head_dim
    conv = CONV_RING * model.conv_channels
    return _ITEM * model.layer_types.count("linear_attention") * (state + conv)


def block_bytes(model: ModelConfig, block_size: int) -> int:
    """Keys and values of one block in all full-attention layers."""
    tokens = 2 * model.num_kv_heads * block_size * model.head_dim
    return _ITEM * model.layer_types.count("full_attention") * tokens


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
