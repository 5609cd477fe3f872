"""The memory plan: what goes where, decided once at start from free memory, and the Capacity of it.

    weights, activations, workspace, logits, penalties and masks, block tables    by the budgets
    state slots     the largest number of sequences in at most STATE_SHARE of what those leave
    snapshots       at most SNAPSHOT_SHARE of what is left then
    KV blocks       the rest (on the CPU half of it: host memory is others' too)

Nothing is allocated here; `memory_sizes` says what each thing takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .capacity import Capacity
from .config import ConfigError, EngineConfig, ModelConfig
from .memory_sizes import (
    activation_bytes,
    block_bytes,
    sampling_bytes,
    slot_bytes,
    weight_bytes,
)

STATE_SHARE = 0.4
SNAPSHOT_SHARE = 0.1

WorkspaceBytes = Callable[[int, int], int]
"""(decode rows, prompt tokens of a step) -> bytes of the ops' own buffers."""


@dataclass(frozen=True)
class DeviceKind:
    """What planning depends on besides the model: `act` as in `memory_sizes`; the numbers of
    sequences to choose from; the token budgets of a step where the config has none; the share of
    free memory to use, None where `gpu_memory_utilization` says it; the share of what all else
    leaves that KV blocks get; the most snapshots unless `snapshot_memory` says more."""

    act: int
    num_seqs: tuple[int, ...]
    batched_tokens: int
    prefill_chunk: int
    memory_share: float | None
    kv_share: float
    max_snapshots: int


# The CPU is no faster at larger budgets, and a step is how long an abort, a new request or the next
# token of a running one waits; more sequences only make a step longer.
CPU = DeviceKind(
    act=4,
    num_seqs=(1, 2, 4, 8, 16, 32, 64),
    batched_tokens=256,
    prefill_chunk=128,
    memory_share=1.0,
    kv_share=0.5,
    max_snapshots=64,
)
CUDA = DeviceKind(
    act=2,
    num_seqs=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    batched_tokens=8192,
    prefill_chunk=1024,
    memory_share=None,  # what utilization leaves is for the CUDA context and loaded kernels
    kv_share=1.0,
    max_snapshots=1 << 20,
)

_SETTINGS = (
    "kv_cache_memory",
    "snapshot_memory",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
)
"""What a config may ask too much of, in the order in which a smaller value is proposed."""


class _TooSmallError(ConfigError):
    """The plan does not fit what is available."""


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


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    free: int,
    kind: DeviceKind = CPU,
    workspace_bytes: WorkspaceBytes = lambda rows, tokens: 0,
) -> MemoryPlan:
    """Decides the Capacity for `free` bytes of memory, before the weights are loaded.

    Raises ConfigError where the model or what the config asks for does not fit: with the numbers,
    and the largest value of a setting that does.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is over the model's {limit} positions"
        )
    try:
        return _plan(model, config, free, kind, workspace_bytes)
    except _TooSmallError as error:
        proposals = [
            f"{name} {largest} would fit"
            for name in _SETTINGS
            if (largest := _largest(name, model, config, free, kind, workspace_bytes))
        ]
        raise ConfigError("; ".join([str(error), *proposals])) from None


def _plan(
    model: ModelConfig,
    config: EngineConfig,
    free: int,
    kind: DeviceKind,
    workspace_bytes: WorkspaceBytes,
) -> MemoryPlan:
    wanted_len = config.max_model_len or model.max_position_embeddings
    blocks_per_seq = -(-wanted_len // config.block_size)
    batched_tokens = config.max_num_batched_tokens or max(
        kind.batched_tokens, config.prefill_chunk or 0
    )
    kv_memory = config.kv_cache_memory
    share = config.gpu_memory_utilization if kind.memory_share is None else kind.memory_share
    available = free if kv_memory is not None else int(free * share)
    slot = slot_bytes(model, kind.act)
    block = max(1, block_bytes(model, config.block_size, kind.act))

    def fixed_rows(num_seqs: int) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", weight_bytes(model, kind.act)),
            ("activations", activation_bytes(model, batched_tokens, num_seqs, kind.act)),
            ("workspace", workspace_bytes(num_seqs, max(batched_tokens, num_seqs))),
            ("logits", 4 * num_seqs * model.vocab_size),
            ("penalties and masks", sampling_bytes(model, num_seqs)),
            ("block tables", 4 * num_seqs * blocks_per_seq),
        )

    def left(num_seqs: int) -> int:
        return available - sum(size for _, size in fixed_rows(num_seqs))

    num_seqs = config.max_num_seqs or max(
        (n for n in kind.num_seqs if n * slot <= STATE_SHARE * left(n)), default=1
    )
    rest = left(num_seqs) - num_seqs * slot
    least_blocks = blocks_per_seq if config.max_model_len is not None else 1
    least = least_blocks * block if kv_memory is None else kv_memory
    num_snapshots = _num_snapshots(config, slot, rest, least, kind.max_snapshots)
    rest -= num_snapshots * slot
    if kv_memory is None:
        usable = max(int(rest * kind.kv_share), min(rest, least))
        num_blocks = min(usable // block, num_seqs * blocks_per_seq)
    else:
        num_blocks = kv_memory // block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory: must be at least {block}, the bytes of a block of "
                f"{config.block_size} tokens, got {kv_memory}"
            )
    states = ("state slots", num_seqs * slot), ("snapshots", num_snapshots * slot)
    rows = (*fixed_rows(num_seqs), *states)
    if num_blocks < 1 or rest < num_blocks * block:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in rows)
        raise _TooSmallError(
            f"memory: too small. {_size(available)} may be used; {num_seqs} sequences need {parts}"
            f" and {max(num_blocks, 1)} KV blocks of {_size(block)}"
        )
    if config.max_model_len is not None and num_blocks < blocks_per_seq:
        raise ConfigError(
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
        prefill_chunk=config.prefill_chunk or min(kind.prefill_chunk, batched_tokens),
        max_queue=config.max_queue,
        num_snapshots=num_snapshots,
        snapshot_interval=config.snapshot_interval,
    )
    return MemoryPlan(capacity, (*rows, ("KV blocks", num_blocks * block)), available)


def _num_snapshots(config: EngineConfig, slot: int, rest: int, for_blocks: int, most: int) -> int:
    """What `snapshot_memory` says, else a share of the rest, but nothing of what the KV blocks must
    have."""
    if not config.enable_prefix_caching:
        return 0
    if config.snapshot_memory is not None:
        return config.snapshot_memory // slot
    return min(max(0, min(int(rest * SNAPSHOT_SHARE), rest - for_blocks)) // slot, most)


def _largest(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    free: int,
    kind: DeviceKind,
    workspace_bytes: WorkspaceBytes,
) -> int | None:
    """The largest value below the config's with which the plan fits; None if there is none. A
    prefill chunk above a smaller budget shrinks with it."""
    asked: int | None = getattr(config, name)
    if asked is None:
        return None
    grid = 64 if name in ("max_num_batched_tokens", "prefill_chunk") else 1

    def fits(value: int) -> bool:
        try:
            changed: dict[str, Any] = {name: value * grid}
            if name == "max_num_batched_tokens" and config.prefill_chunk is not None:
                changed["prefill_chunk"] = min(config.prefill_chunk, value * grid)
            smaller = dataclasses.replace(config, **changed)
            _plan(model, smaller, free, kind, workspace_bytes)
        except ValueError:
            return False
        return True

    low, high = 0, asked // grid  # what fits, as far as known; what does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * grid or None


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
