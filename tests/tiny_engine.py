"""Engines over tiny random checkpoints, and a device that holds work back, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltaserve.engine.config import EngineConfig, ModelConfig
from deltaserve.engine.device import StepTiming
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.memory_plan import CPU
from deltaserve.engine.memory_sizes import block_bytes
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.sequence import RequestOutput
from tests.tiny_checkpoint import write_checkpoint, write_tokenizer

BLOCK_SIZE = 64

_DIMS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


def write_tiny_model(directory: Path, **overrides: Any) -> Path:
    """A checkpoint with its tokenizer, as small as shows every kind of layer and head sharing."""
    write_checkpoint(directory, **{**_DIMS, **overrides})
    write_tokenizer(directory)
    return directory


def engine_config(directory: Path, num_blocks: int = 64, **options: Any) -> EngineConfig:
    """`num_blocks` KV blocks of 64 tokens on the CPU."""
    kv_memory = num_blocks * block_bytes(ModelConfig.from_hf(directory), BLOCK_SIZE, CPU.act)
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "prefill_chunk": 128,
        "max_model_len": min(1024, num_blocks * BLOCK_SIZE),
    }
    return EngineConfig(str(directory), kv_cache_memory=kv_memory, **{**defaults, **options})


def run_to_end(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; the outputs of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [id_ for output in outputs for id_ in output.token_ids]


def assert_idle(engine: LLMEngine) -> None:
    """Nothing runs, waits or is held."""
    stats = engine.stats()
    assert not engine.has_work
    assert engine.open_sequences == []
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_state_slots == stats.num_state_slots


class DelayedPending:
    def __init__(self, device: DelayingDevice, number: int) -> None:
        self._device = device
        self._number = number

    def wait(self) -> Any:
        return self._device.run_until(self._number)

    timing = StepTiming(0.0, 0.0)


class DelayingDevice(CpuDevice):
    """Runs submitted work no sooner than someone waits for it, in order, and notes both.

    So what the host knows early is what it did not wait for: `events` has ("submit", n) and
    ("wait", n), and whatever else a test adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self._works: list[Callable[[], Any]] = []
        self._results: list[Any] = []

    def submit(self, work: Callable[[], Any]) -> Any:
        self.events.append(("submit", len(self._works)))
        self._works.append(work)
        return DelayedPending(self, len(self._works) - 1)

    def run_until(self, number: int) -> Any:
        self.events.append(("wait", number))
        while len(self._results) <= number:
            self._results.append(self._works[len(self._results)]())
        return self._results[number]
