"""A request whose logits are not finite, at a real server: it ends with an error, and no other
request notices."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file

from .server_process import ServerProcess, wait_until
from .tiny_checkpoint import write_safetensors
from .tiny_engine import write_tiny_model

BROKEN_ID = 77  # its row of the embedding is NaN
GOOD = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One prompt of a step is broken, the rows beside it are not; three slots are soon reused."""
    directory = tmp_path_factory.mktemp("broken")
    model = write_tiny_model(directory / "model")
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[embedding][BROKEN_ID] = np.nan
    write_safetensors(path, tensors)
    arguments = ["--served-model-name=tiny", "--port=0", "--max-num-seqs=3", "--device=cpu"]
    started = ServerProcess(
        ["deltaserve.server.cli", "serve", "--model-path", str(model), *arguments], directory
    )
    yield started.wait_ready()
    started.stop()


def test_it_ends_alone(server: ServerProcess) -> None:
    alone = server.complete(**GOOD).json()["choices"][0]
    with server.client.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as stream:
        lines = stream.iter_lines()
        text = [next(lines)]  # it runs
        for prompt in ([BROKEN_ID], [1] * 100 + [BROKEN_ID] + [2] * 100):
            response = server.complete(model="tiny", prompt=prompt, max_tokens=20)
            assert response.status_code == 500
            assert "finite" in response.json()["error"]["message"]
        text += lines
    chunks = [json.loads(line[6:]) for line in text if line.startswith("data: {")]
    joined = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert joined == alone["text"]
    assert server.complete(**GOOD).json()["choices"][0]["text"] == alone["text"]
    assert server.metrics()["vllm:request_success_total:error"] == 2
    wait_until("idle", server.is_idle)
    assert server.client.get("/health").status_code == 200
