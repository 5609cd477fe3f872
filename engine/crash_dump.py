"""The file an engine leaves when a step fails: its plan, open requests, the last scheduled batches.

JSON, readable by its owner alone, because it holds prompts. Enough to run a request again, which
tools/replay.py does: ids, parameters and the drawn seed are what its tokens depend on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .capacity import Capacity
from .scheduled_batch import ScheduledBatch
from .sequence import Sequence

FORMAT = 2


def write_crash_dump(
    directory: Path,
    error: BaseException,
    config: Any,
    capacity: Capacity,
    sequences: Iterable[Sequence],
    batches: Iterable[ScheduledBatch],
) -> Path:
    """Writes `deltaserve-crash-<time>-<pid>.json` and returns its path. Batches oldest first.
    `config`: the engine's, a dataclass."""
    content = {
        "format": FORMAT,
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exception(error),
        "config": dataclasses.asdict(config),
        "capacity": dataclasses.asdict(capacity),
        "requests": [_request(sequence) for sequence in sequences],
        "steps": [_step(batch) for batch in batches],
    }
    stamp = time.strftime("%Y%m%dT%H%M%S")
    path = directory / f"deltaserve-crash-{stamp}-{os.getpid()}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
    return path


def _request(sequence: Sequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "status": sequence.status.value,
        "prompt_ids": list(sequence.prompt_ids),
        "output_ids": list(sequence.output_ids),
        "params": dataclasses.asdict(sequence.params),
        "stop_ids": sorted(sequence.stop_ids),
        "seed": sequence.seed,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_sampled": sequence.num_sampled,
        "num_preemptions": sequence.num_preemptions,
        "num_cached_tokens": sequence.num_cached_tokens,
        "state_slot": sequence.state_slot,
        "block_table": list(sequence.block_table),
    }


def _step(batch: ScheduledBatch) -> dict[str, Any]:
    return {
        "decodes": [
            {
                "request_id": row.sequence.request_id,
                "state_slot": row.state_slot,
                "position": row.position,
                "input_id": row.input_id,
                "sample": row.sample,
            }
            for row in batch.decodes
        ],
        "prefills": [
            {
                "request_id": row.sequence.request_id,
                "state_slot": row.state_slot,
                "start": row.start,
                "end": row.end,
                "sample": row.sample,
                "initial_slot": row.initial_slot,
                "snapshots": row.snapshots,
                "logprob_positions": list(row.logprob_positions),
            }
            for row in batch.prefills
        ],
        "block_updates": [dataclasses.asdict(update) for update in batch.block_updates],
        "admitted": [sequence.request_id for sequence in batch.admitted],
    }
