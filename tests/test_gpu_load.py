"""Loading onto the GPU: the same bits as on the CPU, through a ring that is gone round often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.weights import load_weights
from tests.slow_packing import assert_equal_weights, flatten
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("size", "num_buffers"), [(1 << 12, 2), (1 << 12, 5), (4 << 20, 16)])
def test_weights_on_the_gpu(tmp_path: Path, dtype: str, size: int, num_buffers: int) -> None:
    import cupy

    from deltaserve.engine.ops.cuda.device import CudaDevice
    from deltaserve.engine.ops.cuda.upload import PinnedStaging

    write_checkpoint(tmp_path, dtype=dtype, shards=2, vocab_size=4000, hidden_size=256)
    config = ModelConfig.from_hf(tmp_path)
    staged: list[PinnedStaging] = []

    class Device(CudaDevice):
        def staging(self, row_bytes: int) -> PinnedStaging:
            staged.append(PinnedStaging(cupy, self.stream, row_bytes, size, num_buffers, 4))
            return staged[-1]

    device, cpu = Device(), CpuDevice()
    found = flatten(load_weights(tmp_path, config, device, "bfloat16"))
    assert staged[0].buffers == []
    wanted = flatten(load_weights(tmp_path, config, cpu, "float32", round_bf16=True))
    assert_equal_weights(
        {name: array.get().astype(np.float32) for name, array in found.items()}, wanted
    )
    device.close()
    cpu.close()
