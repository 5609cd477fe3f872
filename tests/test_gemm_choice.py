"""tools/gemm_choice.py: when a GEMM tile of the table gives way to another, by made-up times."""

from __future__ import annotations

import copy
from typing import Any

from deltaserve.engine.config import ModelConfig
from tools.gemm_choice import (
    Choice,
    Measure,
    bucket_of,
    choice_of,
    descend,
    proven,
    roles_of,
    winner,
    with_choice,
)
from tools.model_shapes import hf_text_config

OLD = {"a": "old", "b": "old", "c": "old"}


def by_tiles(costs: dict[tuple[str, str], float], base: float = 1000.0) -> Measure:
    """A step's time is `base` and what each (role, tile) adds."""

    def measure(tried: dict[str, Choice]) -> dict[str, float]:
        return {
            name: base + sum(costs.get(item, 0.0) for item in choice.items())
            for name, choice in tried.items()
        }

    return measure


def in_turns(*turns: dict[str, float]) -> Measure:
    """One figure after the other, whatever the tiles."""
    left = iter(turns)
    return lambda tried: {name: us for name, us in next(left).items() if name in tried}


def always() -> bool:
    return True


# ---- the rules -----------------------------------------------------------------------------------


def test_a_tile_that_wins_both_turns_by_the_margin_is_taken() -> None:
    tried = {"old": OLD, "new": {**OLD, "a": "new"}}
    turns = {"old": 100.0, "new": 90.0}, {"old": 110.0, "new": 99.0}
    assert winner(in_turns(*turns), tried, "old", 0.05) == "new"


def test_a_tile_that_wins_one_turn_alone_is_not() -> None:
    tried = {"old": OLD, "new": {**OLD, "a": "new"}}
    turns = {"old": 100.0, "new": 90.0}, {"old": 100.0, "new": 97.0}
    assert winner(in_turns(*turns), tried, "old", 0.05) == "old"


def test_each_role_is_chosen_beside_what_the_others_then_have() -> None:
    costs = {("a", "fast"): -50.0, ("a", "slow"): 50.0, ("b", "even"): -0.5, ("c", "fast"): -30.0}
    offered = {"a": ["slow", "fast"], "b": ["even"], "c": ["fast"]}
    found = descend(by_tiles(costs), OLD, offered, always)
    assert found == {"a": "fast", "b": "old", "c": "fast"}


def test_without_time_left_the_rest_stays_as_it_was() -> None:
    left = iter([True, False])
    costs = {("a", "fast"): -50.0, ("b", "fast"): -50.0}
    found = descend(by_tiles(costs), OLD, {"a": ["fast"], "b": ["fast"]}, lambda: next(left, False))
    assert found == {**OLD, "a": "fast"}


def test_of_a_new_choice_only_the_roles_that_hold_in_the_step_are_kept() -> None:
    costs = {("a", "new"): -40.0, ("b", "new"): 30.0, ("c", "new"): -0.1}
    new = {"a": "new", "b": "new", "c": "new"}
    assert proven(by_tiles(costs), OLD, new) == {**OLD, "a": "new"}


def test_a_choice_that_no_role_of_holds_is_dropped() -> None:
    assert proven(by_tiles({("a", "new"): 30.0}), OLD, {**OLD, "a": "new"}) == OLD


def test_roles_that_hold_one_by_one_and_not_together_are_dropped() -> None:
    new = {**OLD, "a": "new", "b": "new"}

    def measure(tried: dict[str, Choice]) -> dict[str, float]:
        # either alone is worse than both, and both worse than none
        changed = {name: sum(t == "new" for t in choice.values()) for name, choice in tried.items()}
        return {name: {0: 1000.0, 1: 1100.0, 2: 1050.0}[count] for name, count in changed.items()}

    assert proven(measure, OLD, new) == OLD


# ---- shapes and tables ---------------------------------------------------------------------------


def config(size: str) -> ModelConfig:
    return ModelConfig.from_hf(hf_text_config(size))


def table() -> dict[str, Any]:
    row = [f"t{i}" for i in range(8)]
    widths = {"wide": row, "narrow": [f"n{i}" for i in range(8)]}
    return {
        "buckets": [8, 16, 32, 64, 128, 256, 512],
        "wide_from": 8192,
        "default": {form: copy.deepcopy(widths) for form in ("bf16", "fp32", "silu_mul")},
        "shapes": {"silu_mul:9216x2560": [f"s{i}" for i in range(8)]},
    }


def test_one_role_for_mixers_of_the_same_output_shape_and_two_for_others() -> None:
    same, other = ({role.name for role in roles_of(config(c), 64)} for c in ("4B", "small"))
    assert "attention_out" not in same
    assert other == same | {"attention_out"}


def test_prompts_have_no_segments_and_no_logits() -> None:
    roles = roles_of(config("4B"), 1024)
    assert {role.form for role in roles} == {"bf16", "silu_mul"}
    assert not any(role.segmented for role in roles)


def test_only_what_changes_gets_a_row_and_the_old_table_stays() -> None:
    old, roles = table(), roles_of(config("4B"), 64)
    before = copy.deepcopy(old)
    choice = choice_of(old, roles, 64)
    assert choice["gate_up"] == "s3" and choice["out"] == "n3" and choice["lm_head"] == "t3"
    new = with_choice(old, roles, 64, {**choice, "out": "x"})
    assert old == before
    assert set(new["shapes"]) == {"silu_mul:9216x2560", "fp32:2560x4096"}
    assert new["shapes"]["fp32:2560x4096"] == ["n0", "n1", "n2", "x", "n4", "n5", "n6", "n7"]


def test_the_last_bucket_of_decode_rows_serves_the_larger_ones_of_fp32() -> None:
    roles = roles_of(config("4B"), 256)
    row = with_choice(table(), roles, 256, {"out": "x", "gate_up": "y"})["shapes"]
    assert row["fp32:2560x4096"][4:] == ["n4", "x", "x", "x"]
    assert row["silu_mul:9216x2560"][4:] == ["s4", "y", "s6", "s7"]


def test_a_bucket_holds_its_upper_end() -> None:
    assert [bucket_of(table(), m) for m in (8, 9, 64, 512, 8192)] == [0, 1, 3, 6, 7]
