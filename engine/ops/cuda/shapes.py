"""Which models the CUDA kernels are compiled for. Everything here is checked before a weight is
read, by the names of the config."""

from __future__ import annotations

from ...config import ModelConfig
from ..base import KV_TILE
from .attention import HEAD_DIM, MAX_DECODE_ROWS, ROTARY_DIM
from .delta_net import HEAD

_INNER_STEP = 128  # every GEMM tile's BLOCK_K divides it
_ROW_STEP = 8  # 16 bytes of bf16
_MAX_HIDDEN = 8192  # norm.row_threads
QUERY_GROUPS = (4, 6)
VALUE_GROUPS = (1, 2, 3)


def check_shapes(model: ModelConfig, block_size: int, max_num_seqs: int | None) -> None:
    """Raises ValueError with every shape that no kernel was compiled for."""
    problems: list[str] = []

    def require(holds: bool, name: str, found: object, wanted: object) -> None:
        if not holds:
            problems.append(f"{name} {found} (kernels need {wanted})")

    require(model.head_dim == HEAD_DIM, "head_dim", model.head_dim, HEAD_DIM)
    require(model.rotary_dim == ROTARY_DIM, "rotary dims", model.rotary_dim, ROTARY_DIM)
    for name, dim in (
        ("linear_key_head_dim", model.key_head_dim),
        ("linear_value_head_dim", model.value_head_dim),
    ):
        require(dim == HEAD, name, dim, HEAD)
    group = model.num_query_heads // model.num_kv_heads
    require(group in QUERY_GROUPS, "query heads per KV head", group, "4 or 6")
    rep = model.num_value_heads // model.num_key_heads
    require(rep in VALUE_GROUPS, "value heads per key head", rep, "1, 2 or 3")
    heads = model.num_value_heads
    require(heads % 4 == 0, "linear_num_value_heads", heads, "a multiple of 4")
    require(model.hidden_size <= _MAX_HIDDEN, "hidden_size", model.hidden_size, "at most 8192")
    for name, size in (
        ("hidden_size", model.hidden_size),
        ("intermediate_size", model.intermediate_size),
    ):
        require(size % _INNER_STEP == 0, name, size, f"a multiple of {_INNER_STEP}")
    vocab = model.vocab_size
    require(vocab % _ROW_STEP == 0, "vocab_size", vocab, f"a multiple of {_ROW_STEP}")
    require(block_size % KV_TILE == 0, "block_size", block_size, f"a multiple of {KV_TILE}")
    require(
        (max_num_seqs or 1) <= MAX_DECODE_ROWS,
        "max_num_seqs",
        max_num_seqs,
        f"at most {MAX_DECODE_ROWS}",
    )
    if problems:
        raise ValueError(f"device cuda cannot run this model: {'; '.join(problems)}")
