"""Times the loader on this machine's GPU, on checkpoints of random bits in true shapes.

    python -m tools.gpu_load [--sizes 4B 27B] [--variants] [--folder DIR] [--out FILE]

Writes each checkpoint into memory or the page cache (`--folder`, default: /dev/shm where there is
room, else the folder for temporary files), with fewer layers where not all fit, loads it twice as
the engine does, compares arrays with the files, and prints seconds and GB/s. `--variants`: other
numbers of readers and buffers, and the parts by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tools.gpu_check import ROOT, make_importable

make_importable()

from deltaserve.engine import tensor_stream  # noqa: E402
from deltaserve.engine.checkpoint import find_prefix, read_entries  # noqa: E402
from deltaserve.engine.config import ModelConfig  # noqa: E402
from deltaserve.engine.tensor_names import (  # noqa: E402
    PackedArray,
    map_arrays,
    packed_layout,
)
from deltaserve.engine.tensor_stream import RowRead, TensorFile, stream_rows  # noqa: E402
from deltaserve.engine.weights import load_weights  # noqa: E402
from tools.model_shapes import hf_text_config  # noqa: E402
from tools.random_checkpoint import checkpoint_bytes, write_random_checkpoint  # noqa: E402

ROOM_SHARE = 0.45
"""Of the free space and memory that a checkpoint may take: a file in /dev/shm is memory too."""
READERS = (1, 2, 4, 8, 12, 16)
BUFFERS = ((4 << 20, 16), (4 << 20, 64), (16 << 20, 8), (16 << 20, 32), (64 << 20, 8))


def room(folder: Path) -> int:
    memory = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return int(ROOM_SHARE * min(shutil.disk_usage(folder).free, memory))


def fitting_config(size: str, limit: int) -> dict[str, Any]:
    """The size's config, with as many layers as `limit` bytes hold."""
    config = hf_text_config(size)
    while checkpoint_bytes(config) > limit:
        layers = config["num_hidden_layers"] - 4
        config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    return config


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - began, result


def free_device_memory() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def pairs(layout: Any, weights: Any) -> Iterator[tuple[PackedArray, Any]]:
    """Every array of the layout with the loaded one in its place."""
    if isinstance(layout, PackedArray):
        yield layout, weights
    elif isinstance(layout, tuple):
        for part, own in zip(layout, weights, strict=True):
            yield from pairs(part, own)
    else:
        for name, part in vars(layout).items():
            yield from pairs(part, getattr(weights, name))


def wrong_tensors(weights: Any, directory: Path, config: ModelConfig) -> list[str]:
    """Names of the tensors that differ from their files, of some layers and what is beside them."""
    entries = read_entries(directory)
    wrong = []
    checked = (".layers.0.", ".layers.3.", f".layers.{config.num_layers - 1}.")
    for array, loaded in pairs(packed_layout(config, find_prefix(entries, directory)), weights):
        name = array.pieces[0].name
        if ".layers." in name and not any(part in name for part in checked):
            continue
        host = loaded.get()
        for piece in array.pieces:
            entry = entries[piece.name]
            bits = np.dtype(np.uint32 if entry.dtype == "F32" else np.uint16)
            mapped = np.memmap(entry.file, bits, "r", entry.begin, piece.shape)
            stored = mapped.reshape(-1, *array.shape[1:])
            for copy in piece.copies:
                rows = host[copy.target : copy.target + copy.count]
                if array.fp32 and entry.dtype == "BF16":
                    rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
                expected = stored[copy.source : copy.source + copy.count]
                if not np.array_equal(rows.view(bits), expected):
                    wrong.append(piece.name)
    return wrong


def load_rows(
    device: Any, directory: Path, config: ModelConfig, options: argparse.Namespace
) -> list[dict[str, Any]]:
    def load() -> Any:
        return load_weights(directory, config, device, "bfloat16")

    rows: list[dict[str, Any]] = []
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    for what in ("load", "load again"):
        seconds, weights = timed(load)
        rows.append({"what": what, "seconds": seconds, "bytes": size})
        if what == "load":
            wrong = wrong_tensors(weights, directory, config)
            rows[0] |= {"ok": not wrong, "wrong": wrong}
        del weights
        free_device_memory()
    if options.variants and size < 20e9:
        rows += variants(device, directory, load, size)
    return rows


def variants(
    device: Any, directory: Path, load: Callable[[], Any], size: int
) -> list[dict[str, Any]]:
    import cupy

    from deltaserve.engine.ops.cuda.upload import PinnedStaging

    rows = []

    def note(what: str, seconds: float, num_bytes: int) -> None:
        rows.append({"what": what, "seconds": seconds, "bytes": num_bytes})
        print(f"  {what:40s} {seconds:7.3f} s {num_bytes / seconds / 1e9:7.1f} GB/s", flush=True)

    own = device.staging
    settings = [(16 << 20, 16, readers) for readers in READERS]
    settings += [(*buffers, 8) for buffers in BUFFERS]
    for buffer_bytes, count, readers in settings:
        device.staging = lambda row_bytes, b=buffer_bytes, n=count, r=readers: PinnedStaging(
            cupy, device.stream, row_bytes, b, n, r
        )
        seconds, weights = timed(load)
        note(f"{readers} readers, {count} x {buffer_bytes >> 20} MiB", seconds, size)
        del weights
        free_device_memory()
    device.staging = own

    seconds, staging = timed(device.staging, 1)
    pinned = sum(map(len, staging.buffers))
    note("pinned memory alone", seconds, pinned)
    seconds, target = timed(device.empty, (size,), "uint8")
    note("device memory in one piece", seconds, size)

    def copy_to(target: Any) -> None:
        for i, start in enumerate(range(0, size - (16 << 20), 16 << 20)):
            staging.send(i % 16, staging.buffers[i % 16], target, start)
        device.stream.synchronize()

    note("copies to the device alone", timed(copy_to, target)[0], size)
    del target
    free_device_memory()
    arrays: list[PackedArray] = []
    map_arrays(packed_layout(ModelConfig.from_hf(directory), "model."), arrays.append)
    shapes = [array.shape for array in dict.fromkeys(arrays)]
    what = f"device memory in {len(shapes)} pieces"
    note(what, timed(lambda: [device.empty(shape, "bfloat16") for shape in shapes])[0], size)
    path = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    step = len(staging.buffers[0])
    byte = np.dtype(np.uint8)
    reads = [
        RowRead(path, start, (step,), byte, byte, ())
        for start in range(0, path.stat().st_size - step, step)
    ]
    for way, readers in [("reads", n) for n in READERS] + [("mapped reads", n) for n in (1, 4, 16)]:
        staging.num_readers = readers
        kind = MappedFile if way == "mapped reads" else TensorFile
        with mock.patch.object(tensor_stream, "TensorFile", kind):
            seconds, _ = timed(stream_rows, reads, staging, lambda _: None)
        note(f"{way} alone, {readers} readers", seconds, len(reads) * step)
    staging.close()
    free_device_memory()
    return rows


class MappedFile(TensorFile):
    """Reads through a mapping, to compare."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._map = np.memmap(path, np.uint8, "r")

    def read(self, offset: int, out: Any) -> None:
        np.copyto(out, self._map[offset : offset + len(out)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["4B", "27B"])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    from deltaserve.engine.ops.cuda.device import CudaDevice

    device = CudaDevice()
    device.empty((1,), "uint8")
    results: dict[str, Any] = {}
    for size in options.sizes:
        folders = (
            [options.folder] if options.folder else [Path("/dev/shm"), Path(tempfile.gettempdir())]
        )
        folder = max(folders, key=room)
        hf_config = fitting_config(size, room(folder))
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
        try:
            threads = len(os.sched_getaffinity(0))
            seconds, _ = timed(write_random_checkpoint, directory, hf_config, threads)
            config = ModelConfig.from_hf(hf_config)
            print(f"{size}: {config.num_layers} layers in {directory}, written in {seconds:.1f} s")
            rows = load_rows(device, directory, config, options)
        finally:
            shutil.rmtree(directory)
        results[size] = {"layers": config.num_layers, "folder": str(folder), "rows": rows}
    out = options.out or Path(os.environ.get("OUT", ROOT / "bench/results")) / "gpu_load.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))
    for size, result in results.items():
        for row in result["rows"][:2]:
            rate = row["bytes"] / row["seconds"] / 1e9
            mark = "" if row.get("ok", True) else f"  WRONG: {row['wrong'][:3]}"
            print(
                f"{size:5s} {result['layers']} layers {row['what']:12s}"
                f" {row['bytes'] / 1e9:6.2f} GB {row['seconds']:6.2f} s {rate:6.1f} GB/s{mark}"
            )
    return 0 if all(r.get("ok", True) for s in results.values() for r in s["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
