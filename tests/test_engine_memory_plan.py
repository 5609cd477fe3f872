"""The memory plan: fits what is available, is what gets allocated, and refuses with numbers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.config import ConfigError, ModelConfig
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.memory_plan import CPU, plan_memory
from deltaserve.engine.memory_sizes import block_bytes, slot_bytes
from deltaserve.engine.ops.numpy.device import CpuDevice
from tests.tiny_engine import engine_config, write_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_plan_fits_what_is_available(directory: Path) -> None:
    model = ModelConfig.from_hf(directory)
    config = dataclasses.replace(
        engine_config(directory), kv_cache_memory=None, max_num_seqs=None, max_model_len=None
    )
    for available in (16 << 20, 64 << 20, 1 << 30):
        plan = plan_memory(model, config, available)
        assert sum(size for _, size in plan.rows) <= available
        assert plan.capacity.max_model_len <= plan.capacity.num_blocks * plan.capacity.block_size
    assert plan.capacity.num_state_slots == 64
    assert plan.capacity.max_model_len == 1024
    assert plan.capacity.num_blocks == 64 * 16  # no more than all sequences can fill
    assert "KV blocks" in plan.table()


class CountingDevice(CpuDevice):
    """Adds up what it hands out."""

    num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        self.num_bytes += array.nbytes
        return array

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = super().zeros(shape, dtype)
        self.num_bytes += array.nbytes
        return array


@pytest.mark.parametrize("tied", [True, False])
def test_plan_is_what_is_allocated(tmp_path: Path, tied: bool) -> None:
    """Within 4 KiB and 1 %: the plan leaves out a few arrays of a number a sequence."""
    write_tiny_model(tmp_path, tie_word_embeddings=tied)
    config, device = engine_config(tmp_path), CountingDevice()
    plan = plan_memory(ModelConfig.from_hf(tmp_path), config, 1 << 30)
    LLMEngine(config, device=device).close()
    planned = sum(size for _, size in plan.rows)
    assert abs(planned - device.num_bytes) <= 4096 + planned / 100


def test_plan_refuses_with_numbers(directory: Path) -> None:
    model = ModelConfig.from_hf(directory)
    config = engine_config(directory)
    with pytest.raises(ConfigError, match=r"memory: too small.*MiB"):
        plan_memory(model, config, 1 << 20)
    block = block_bytes(model, 64, CPU.act)
    with pytest.raises(ConfigError, match=f"kv_cache_memory: must be at least {block}, .*got 100"):
        small = dataclasses.replace(config, kv_cache_memory=100)
        plan_memory(model, small, 1 << 30)
    with pytest.raises(ConfigError, match="max_model_len: 1025 is over the model's 1024 positions"):
        plan_memory(model, dataclasses.replace(config, max_model_len=1025), 1 << 30)
    with pytest.raises(ConfigError, match="take 16 blocks of 64 and there is room for 3"):
        three = dataclasses.replace(config, kv_cache_memory=3 * block)
        plan_memory(model, three, 1 << 30)


@pytest.mark.parametrize(
    ("name", "asked", "others"),
    [
        ("max_num_seqs", 10_000, {}),
        ("kv_cache_memory", 1 << 30, {}),
        ("snapshot_memory", 1 << 30, {}),
        ("max_num_batched_tokens", 1 << 20, {}),
        ("prefill_chunk", 1 << 20, {"max_num_batched_tokens": None}),
    ],
)
def test_a_refusal_proposes_the_largest_value_that_fits(
    directory: Path, name: str, asked: int, others: dict[str, Any]
) -> None:
    model, available = ModelConfig.from_hf(directory), 64 << 20
    config = dataclasses.replace(engine_config(directory), **{name: asked}, **others)
    with pytest.raises(ValueError, match=f"{name} [0-9]+ would fit") as refused:
        plan_memory(model, config, available)
    found = re.search(f"{name} ([0-9]+) would fit", str(refused.value))
    assert found is not None
    largest = int(found[1])
    plan_memory(model, dataclasses.replace(config, **{name: largest}), available)
    step = 64 if name in ("max_num_batched_tokens", "prefill_chunk") else 1
    with pytest.raises(ValueError, match="too small"):
        plan_memory(model, dataclasses.replace(config, **{name: largest + step}), available)


def test_a_budget_is_proposed_that_a_large_prefill_chunk_has_to_follow(directory: Path) -> None:
    model, available = ModelConfig.from_hf(directory), 64 << 20
    large = {"max_num_batched_tokens": 1 << 20, "prefill_chunk": 1 << 20}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens [0-9]+ would fit"):
        plan_memory(model, dataclasses.replace(engine_config(directory), **large), available)


@pytest.mark.parametrize(
    ("chosen", "planned"),
    [
        ({}, (256, 128)),
        ({"max_num_batched_tokens": 4096, "prefill_chunk": 1024}, (4096, 1024)),
        ({"max_num_batched_tokens": 64}, (64, 64)),
        ({"prefill_chunk": 512}, (512, 512)),
    ],
    ids=["auto", "both", "batched tokens", "chunk"],
)
def test_budgets_are_what_was_asked_for(
    directory: Path, chosen: dict[str, int], planned: tuple[int, int]
) -> None:
    budgets = {"max_num_batched_tokens": None, "prefill_chunk": None, **chosen}
    config = engine_config(directory, **budgets)
    capacity = plan_memory(ModelConfig.from_hf(directory), config, 1 << 30).capacity
    assert (capacity.max_num_batched_tokens, capacity.prefill_chunk) == planned


def test_snapshots_take_a_tenth_and_nothing_that_blocks_must_have(directory: Path) -> None:
    model = ModelConfig.from_hf(directory)
    config = dataclasses.replace(engine_config(directory), kv_cache_memory=None)
    roomy = plan_memory(model, config, 1 << 30)
    assert roomy.capacity.num_snapshots == CPU.max_snapshots
    assert dict(roomy.rows)["snapshots"] == CPU.max_snapshots * slot_bytes(model, CPU.act)
    off = plan_memory(model, dataclasses.replace(config, enable_prefix_caching=False), 1 << 30)
    assert (off.capacity.num_snapshots, dict(off.rows)["snapshots"]) == (0, 0)
    kv_memory = roomy.capacity.num_blocks * block_bytes(model, 64, CPU.act)
    others = sum(size for name, size in roomy.rows if name != "snapshots")
    full = dataclasses.replace(config, kv_cache_memory=kv_memory)
    tight = plan_memory(model, full, others + 3 * slot_bytes(model, CPU.act))
    assert (tight.capacity.num_blocks, tight.capacity.num_snapshots) == (
        roomy.capacity.num_blocks,
        3,
    )


def test_snapshot_memory_is_what_was_asked_for_or_refused(directory: Path) -> None:
    model = ModelConfig.from_hf(directory)
    memory = 100 * slot_bytes(model, CPU.act) + 1
    config = engine_config(directory, snapshot_memory=memory, snapshot_interval=256)
    capacity = plan_memory(model, config, 1 << 30).capacity
    assert (capacity.num_snapshots, capacity.snapshot_interval) == (100, 256)
    with pytest.raises(ValueError, match=r"too small.*snapshot_memory [0-9]+ would fit"):
        plan_memory(model, config, 1900 << 10)
