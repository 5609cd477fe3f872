"""Which GEMMs a model has, and when a tile of the table gives way to another. Measures nothing: it
is given a function that does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deltaserve.engine.config import ModelConfig

DECODE_M = 256
"""Logits and partial sums are made of no more rows."""
STEP_MARGIN = 0.002
"""Of a step's time: what a role's tile must gain."""
ALONE_MARGIN = 0.02
"""Of a launch's."""
_PASSES = 2

Choice = dict[str, str]
"""Role -> tile."""
Measure = Callable[[dict[str, Choice]], dict[str, float]]
"""Times the choices in turns, many rounds: name -> microseconds, one figure for each."""


@dataclass(frozen=True)
class Role:
    """One GEMM of a model: N outputs, of which silu_mul has two weight rows each."""

    name: str
    form: str
    n: int
    k: int
    segmented: bool = False
    """Whether K is cut into the table's segments."""

    @property
    def key(self) -> str:
        return f"{self.form}:{self.n}x{self.k}"

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.form == "silu_mul" else self.n


def roles_of(c: ModelConfig, m: int) -> list[Role]:
    """Those of a decode step, or of a prompt where m is more than a step has; the largest first."""
    h, f, query_size = c.hidden_size, c.intermediate_size, c.num_query_heads * c.head_dim
    decode = m <= DECODE_M
    form = "fp32" if decode else "bf16"
    roles = [
        Role("gate_up", "silu_mul", f, h),
        Role("down", form, h, f, decode),
        Role("out", form, h, c.value_size, decode),
        Role("attention_out", form, h, query_size, decode),
        Role("qkvzba", "bf16", c.linear_in_size, h),
        Role("qgkv", "bf16", c.attention_in_size, h),
    ]
    if decode:
        roles.append(Role("lm_head", "fp32", c.vocab_size, h))
    by_key: dict[str, Role] = {}
    for role in roles:
        by_key.setdefault(role.key, role)
    return list(by_key.values())


def row_of(table: dict[str, Any], role: Role) -> list[str]:
    """The tiles of a role, one a bucket of M."""
    row: list[str] | None = table["shapes"].get(role.key)
    if row is None:
        row = table["default"][role.form]["wide" if role.n >= table["wide_from"] else "narrow"]
    return row


def bucket_of(table: dict[str, Any], m: int) -> int:
    return sum(m > end for end in table["buckets"])


def choice_of(table: dict[str, Any], roles: Iterable[Role], m: int) -> Choice:
    return {role.name: row_of(table, role)[bucket_of(table, m)] for role in roles}


def with_choice(
    table: dict[str, Any], roles: Iterable[Role], m: int, choice: Choice
) -> dict[str, Any]:
    """A copy of the table with these tiles at m rows; a shape that had none of its own and changes
    gets a row."""
    table, bucket = copy.deepcopy(table), bucket_of(table, m)
    for role in roles:
        row = list(row_of(table, role))
        if choice.get(role.name, row[bucket]) == row[bucket]:
            continue
        row[bucket] = choice[role.name]
        if role.form == "fp32" and m == DECODE_M:  # the rest is never asked for
            row[bucket + 1 :] = [row[bucket]] * (len(row) - bucket - 1)
        table["shapes"][role.key] = row
    return table


def is_faster(times: dict[str, float], new: str, old: str, margin: float) -> bool:
    return times[new] < (1 - margin) * times[old]


def winner(measure: Measure, tried: dict[str, Choice], now: str, margin: float) -> str:
    """The fastest of all, if it beats `now` by the margin beside all of them and once more beside
    `now` alone; else `now`."""
    first = measure(tried)
    best = min(first, key=lambda name: first[name])
    if best == now or not is_faster(first, best, now, margin):
        return now
    second = measure({name: tried[name] for name in (now, best)})
    return best if is_faster(second, best, now, margin) else now


def descend(
    measure: Measure,
    old: Choice,
    offered: dict[str, list[str]],
    time_left: Callable[[], bool],
    margin: float = STEP_MARGIN,
) -> Choice:
    """Role by role the best of the tiles offered, beside what the others then have."""
    choice = dict(old)
    for _ in range(_PASSES):
        before = dict(choice)
        for role, tiles in offered.items():
            if not time_left():
                return choice
            tried = {tile: {**choice, role: tile} for tile in (choice[role], *tiles)}
            if len(tried) > 1:
                choice = tried[winner(measure, tried, choice[role], margin)]
        if choice == before:
            break
    return choice


def proven(measure: Measure, old: Choice, new: Choice, margin: float = STEP_MARGIN) -> Choice:
    """What of `new` holds in another step: each role whose tile is better there than the one it
    had, the others as they are, and all of them together; in two turns each."""
    choice = dict(new)
    while changed := [role for role in choice if choice[role] != old[role]]:
        tried = {"old": old, "new": choice}
        tried |= {f"{role} as it was": {**choice, role: old[role]} for role in changed}
        turns = [measure(tried) for _ in range(2)]

        def better(other: str, turns: list[dict[str, float]] = turns) -> bool:
            return all(is_faster(times, "new", other, margin) for times in turns)

        kept = [role for role in changed if better(f"{role} as it was")]
        if kept == changed:
            return choice if better("old") else dict(old)
        choice = {**old, **{role: choice[role] for role in kept}}
    return choice
