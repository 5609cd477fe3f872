"""A server over the model of `bigram_model` with the table that the parameter tests share.

    a -> b 5, z 4        e -> end 5, f 4        s -> the three bytes of a snowman -> s
    b -> c 5, z 4        f -> end 5, e 4
    c -> a 5, z 4        z -> z 5, a 4.5, end 4.4
    end -> a 5

The checkpoint's generation_config.json says top_k 1, so that all is greedy where nothing is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .bigram_model import logits_table, write_bigram_model
from .server_process import ServerProcess
from .tiny_checkpoint import ENDOFTEXT_ID, IM_END_ID, NUM_TOKENS

A, B, C, E, F, S, Z = b"abcefsz"
SNOWMAN = "\u2603".encode()
TABLE: dict[int, dict[int, float]] = {
    A: {B: 5, Z: 4},
    B: {C: 5, Z: 4},
    C: {A: 5, Z: 4},
    E: {IM_END_ID: 5, F: 4},
    F: {IM_END_ID: 5, E: 4},
    Z: {Z: 5, A: 4.5, IM_END_ID: 4.4},
    IM_END_ID: {A: 5},
    ENDOFTEXT_ID: {A: 5},
    S: {SNOWMAN[0]: 5},
    SNOWMAN[0]: {SNOWMAN[1]: 5},
    SNOWMAN[1]: {SNOWMAN[2]: 5},
    SNOWMAN[2]: {S: 5},
}
LOGITS = logits_table(TABLE)[:, :NUM_TOKENS]
LOGPROBS = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))


def start_bigram(directory: Path) -> ServerProcess:
    """`m`: two sequences at once, 256 tokens of context."""
    write_bigram_model(directory / "model", TABLE, {"top_k": 1, "eos_token_id": [ENDOFTEXT_ID]})
    (directory / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    arguments = ["--served-model-name=m", "--port=0", "--max-num-seqs=2", "--max-model-len=256"]
    started = ServerProcess(
        ["deltaserve.server.cli", "serve", "--model-path", str(directory / "model"), *arguments],
        directory,
    )
    return started.wait_ready()


def complete(server: ServerProcess, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = server.complete(model="m", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def answer(server: ServerProcess, prompt: Any, **fields: Any) -> tuple[str, str, Any]:
    """(text, finish_reason, stop_reason) of the one choice."""
    (choice,) = complete(server, prompt, **fields)["choices"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


def stream(server: ServerProcess, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    response = server.complete(model="m", prompt=prompt, stream=True, **fields)
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
