"""The memory plan of a GPU, the shapes that its kernels have and what else is refused before it is
touched; needs no GPU."""

from __future__ import annotations

import dataclasses

import pytest

from deltaserve.engine.config import ConfigError, EngineConfig, ModelConfig
from deltaserve.engine.memory_plan import CUDA, MemoryPlan, plan_memory
from deltaserve.engine.memory_sizes import slot_bytes
from deltaserve.engine.model_loader import create_backend
from deltaserve.engine.ops.cuda import detect, loader
from deltaserve.engine.ops.cuda.detect import Gpu
from deltaserve.engine.ops.cuda.ops import OpsShape, workspace_bytes
from deltaserve.engine.ops.cuda.shapes import check_shapes
from tools.model_shapes import SIZES, hf_text_config

FOUR_B = ModelConfig.from_hf(hf_text_config("4B"))


def workspace(rows: int, tokens: int) -> int:
    return workspace_bytes(OpsShape(16, 32, rows, tokens))


def plan_cuda(config: EngineConfig, free: int) -> MemoryPlan:
    return plan_memory(FOUR_B, config, free, CUDA, workspace)


@pytest.mark.parametrize(("gib", "num_seqs"), [(15.6, 32), (23.5, 64), (79, 256), (139, 256)])
def test_defaults_on_cards_of_16_24_80_and_141_gb(gib: float, num_seqs: int) -> None:
    plan = plan_cuda(EngineConfig("4B"), int(gib * 2**30))
    capacity = plan.capacity
    assert capacity.num_state_slots == num_seqs
    assert (capacity.max_num_batched_tokens, capacity.prefill_chunk) == (8192, 1024)
    assert capacity.max_model_len >= 16384 and capacity.num_snapshots >= 2


@pytest.mark.parametrize("gib", [16, 80, 139])
def test_plan_fits_the_share_of_the_device(gib: int) -> None:
    plan = plan_cuda(EngineConfig("4B"), gib << 30)
    total = sum(size for _, size in plan.rows)
    assert total <= plan.available == int(0.92 * (gib << 30))
    assert total >= 0.99 * plan.available
    slots = plan.capacity.num_state_slots
    assert slots & (slots - 1) == 0
    assert (gib >= 80) == (slots == 256)
    assert dict(plan.rows)["state slots"] == slots * slot_bytes(FOUR_B, CUDA.act)


def test_snapshots_are_a_tenth_of_what_the_state_slots_leave() -> None:
    on = plan_cuda(EngineConfig("4B"), 139 << 30)
    config = EngineConfig("4B", enable_prefix_caching=False)
    off = plan_cuda(config, 139 << 30)
    snapshots = dict(on.rows)["snapshots"]
    left = dict(off.rows)["KV blocks"]
    assert snapshots == on.capacity.num_snapshots * slot_bytes(FOUR_B, CUDA.act)
    assert 0.095 * left < snapshots <= 0.1 * left + slot_bytes(FOUR_B, CUDA.act)
    assert off.capacity.num_snapshots == 0
    exact = EngineConfig("4B", snapshot_memory=5 * slot_bytes(FOUR_B, CUDA.act))
    assert plan_cuda(exact, 139 << 30).capacity.num_snapshots == 5


def test_slot_is_the_specifications_size() -> None:
    state = 24 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert slot_bytes(FOUR_B, CUDA.act) == state


def test_plan_refuses_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"memory: too small.*weights 7\.83 GiB"):
        plan_cuda(EngineConfig("4B"), 8 << 30)
    with pytest.raises(ValueError, match="max_model_len: 262145 is over the model's 262144"):
        plan_cuda(EngineConfig("4B", max_model_len=262145), 1 << 37)


@pytest.mark.parametrize("size", SIZES)
def test_kernels_have_every_size(size: str) -> None:
    check_shapes(ModelConfig.from_hf(hf_text_config(size)), 64, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 128}, r"head_dim 128 \(kernels need 256\)"),
        ({"rotary_dim": 32}, r"rotary dims 32 \(kernels need 64\)"),
        ({"num_kv_heads": 8}, "query heads per KV head 2"),
        ({"num_value_heads": 64}, "value heads per key head 4"),
        ({"hidden_size": 2600}, "hidden_size 2600.*multiple of 128"),
    ],
)
def test_other_shapes_are_refused_by_name(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shapes(dataclasses.replace(FOUR_B, **change), 64, None)


H100 = Gpu("sm_90", 13_000)


@pytest.mark.parametrize(
    ("gpus", "ordinal", "change", "message"),
    [
        ([], 0, {}, "device: cuda needs CuPy"),
        ([H100], 1, {}, "device_ordinal: 1, but the GPUs here are 0 to 0"),
        ([H100], 0, {"head_dim": 128}, "device cuda cannot run this model: head_dim 128"),
        ([Gpu("sm_70", 13_000)], 0, {}, "device: cuda: this GPU is sm_70; kernels are"),
    ],
    ids=["no GPU", "ordinal", "shapes", "architecture"],
)
def test_what_the_machine_cannot_do_is_an_error_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Gpu],
    ordinal: int,
    change: dict[str, int],
    message: str,
) -> None:
    monkeypatch.setattr(detect, "find_gpus", lambda: gpus)
    monkeypatch.setattr(detect, "has_usable_gpu", lambda: bool(gpus))
    monkeypatch.setattr(loader, "read_manifest", lambda: {"archs": {"sm_90": {}}, "compilers": {}})
    config = EngineConfig("4B", device="cuda", device_ordinal=ordinal)
    with pytest.raises(ConfigError, match=message):
        create_backend(config, dataclasses.replace(FOUR_B, **change))
