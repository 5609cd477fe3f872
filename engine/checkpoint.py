"""A checkpoint's tensors: which files hold them, and whether they are the ones a model needs.

Owns shard discovery, the index, the name prefix and every check that reads headers alone, so that
a wrong checkpoint fails before any data is read. Copying the data is `weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from .json_section import CheckpointError, read_json_object, show
from .safetensors_header import TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SKIPPED_PREFIXES = ("model.visual.", "mtp.")
"""The vision tower and the multi-token-prediction layer; neither is run."""

_TEXT_PREFIXES = ("model.language_model.", "model.")
_DTYPES = ("BF16", "F32")  # no model comes in F16, and to bf16 it would lose precision


def read_entries(model_dir: Path) -> dict[str, TensorEntry]:
    """name -> entry of every tensor of the checkpoint, from the headers of all its files.

    `model.safetensors` where there is one, else the shards that the index names.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such directory")
    single, index = model_dir / SINGLE_NAME, model_dir / INDEX_NAME
    if single.exists():
        return read_header(single)
    if not index.exists():
        found = sorted(path.name for path in model_dir.glob("*.safetensors"))
        shards = f", only {show(found[0])}{_and_more(found)}" if found else ""
        raise CheckpointError(f"{model_dir}: neither {SINGLE_NAME} nor {INDEX_NAME} there{shards}")
    return _read_shards(index)


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    weight_map = _read_weight_map(index)
    entries: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        path = index.with_name(file_name)
        if not path.exists():
            name = next(name for name, file in weight_map.items() if file == file_name)
            raise CheckpointError(f"{path}: missing shard; {INDEX_NAME} places {show(name)} in it")
        shard = read_header(path)
        for name, entry in shard.items():
            listed = weight_map.get(name)
            if listed == file_name:
                entries[name] = entry
            elif not name.startswith(SKIPPED_PREFIXES):
                where = f"places it in {listed}" if listed else "does not list it"
                raise CheckpointError(f"{path}: holds {show(name)}, but {INDEX_NAME} {where}")
        for name, file in weight_map.items():
            if file == file_name and name not in shard:
                raise CheckpointError(
                    f"{path}: lacks tensor {show(name)}, which {INDEX_NAME} places in it"
                )
    return entries


def _read_weight_map(index: Path) -> dict[str, str]:
    """tensor name -> file name; file names are names alone, not paths."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object, found {show(weight_map)}")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or PurePosixPath(file).name != file
            or not file.isprintable()
            or "\\" in file
            or len(file) > 255
        ):
            raise CheckpointError(
                f"{index}: {show(name)}: expected the name of a .safetensors file beside the"
                f" index, found {show(file)}"
            )
    return weight_map


def find_prefix(entries: Mapping[str, TensorEntry], model_dir: Path) -> str:
    """What the text model's names start with, by where the embedding is."""
    found = [prefix for prefix in _TEXT_PREFIXES if f"{prefix}embed_tokens.weight" in entries]
    if len(found) != 1:
        names = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _TEXT_PREFIXES)
        problem = "both are there" if found else f"none among {len(entries)} tensors"
        raise CheckpointError(f"{model_dir}: expected tensor {names}, {problem}")
    return found[0]


def check_entries(
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    optional: Iterable[str],
    model_dir: Path,
) -> None:
    """Every `expected` name is there with its shape and BF16 or F32 data, and no other text tensor
    is but the `optional` ones."""
    missing = [name for name in expected if name not in entries]
    if missing:
        raise CheckpointError(
            f"{model_dir}: missing tensor {missing[0]}{_and_more(missing)}; expected BF16 or F32"
            f" {list(expected[missing[0]])}"
        )
    known = {*expected, *optional}
    extra = [n for n in entries if n not in known and not n.startswith(SKIPPED_PREFIXES)]
    if extra:
        entry = entries[extra[0]]
        raise CheckpointError(
            f"{entry.file}: unexpected tensor {show(extra[0])}{_and_more(extra)}, {entry}; the"
            " config describes a model without it"
        )
    for name, shape in expected.items():
        entry = entries[name]
        if entry.dtype not in _DTYPES or entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name}: expected BF16 or F32 {list(shape)}, found {entry}"
            )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
