"""A random checkpoint of the true 0.8B shapes, in two shards, against transformers in fp32.

The sizes are the point: every weight comes from a file of hundreds of megabytes, over shard
boundaries. It writes 1.5 GB below the temporary directory and takes about 5 GB of memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.cache import allocate_cache
from deltaserve.engine.capacity import Capacity
from deltaserve.engine.config import ModelConfig
from deltaserve.engine.forward_batch import build_decode_batch, build_prefill_batch
from deltaserve.engine.models.qwen3_5 import Qwen35Model, allocate_buffers
from deltaserve.engine.ops.numpy import NumpyOps
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledDecode, ScheduledPrefill
from deltaserve.engine.sequence import Sequence
from deltaserve.engine.weights import load_weights
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [pytest.mark.hf, pytest.mark.slow]

SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
NUM_PROMPT_TOKENS, NUM_TOKENS = 56, 64
"""Of 64 tokens the first 56 run as a prompt, the others as decode steps."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("checkpoint_08b")
    write_checkpoint(directory, shards=2, **SHAPES)
    yield directory
    for path in directory.iterdir():
        path.unlink()


def transformers_logits(directory: Path, input_ids: list[int]) -> np.ndarray:
    import torch
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([input_ids]), use_cache=False).logits[0].numpy()


def our_logits(directory: Path, input_ids: list[int]) -> np.ndarray:
    config = ModelConfig.from_hf(directory)
    capacity = Capacity(
        num_blocks=1,
        block_size=64,
        num_state_slots=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        max_queue=1,
    )
    device = CpuDevice()
    model = Qwen35Model(
        config,
        load_weights(directory, config, device, "float32"),
        NumpyOps(),
        allocate_cache(config, capacity, device, "float32"),
        allocate_buffers(config, capacity, device, "float32"),
    )
    prompt_ids = tuple(input_ids[:NUM_PROMPT_TOKENS])
    sequence = Sequence("0", prompt_ids, SamplingParams(), block_table=[0], state_slot=0)
    prefill = build_prefill_batch(
        (ScheduledPrefill(sequence, 0, 0, NUM_PROMPT_TOKENS, True),), 64, device.upload
    )
    every_row = device.upload(np.arange(NUM_PROMPT_TOKENS, dtype=np.int32))
    logits = np.empty((NUM_TOKENS, config.vocab_size), np.float32)
    model.prefill(replace(prefill, logits_rows=every_row), logits[:NUM_PROMPT_TOKENS])
    for position in range(NUM_PROMPT_TOKENS, NUM_TOKENS):
        decode = ScheduledDecode(sequence, 0, position, input_ids[position], True)
        batch = build_decode_batch((decode,), device.upload)
        model.decode(batch, logits[position : position + 1])
    device.close()
    return logits


def test_two_shards_give_the_logits_of_transformers(checkpoint: Path) -> None:
    assert len(list(checkpoint.glob("*.safetensors"))) == 2
    input_ids = np.random.default_rng(1).integers(0, 248077, NUM_TOKENS).tolist()
    expected = transformers_logits(checkpoint, input_ids)
    gc.collect()
    found = our_logits(checkpoint, input_ids)
    scale = np.abs(expected).max()
    assert expected.std() > 1  # the comparison can see something
    assert np.abs(found - expected).max() / scale <= 1e-4  # fp32 noise: spec, section 10
