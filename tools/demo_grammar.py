"""A small template language for generated text; knows nothing of stories or facts.

`[a|b|c]` picks one branch (branches nest, an empty one is allowed), `{name}` inserts a slot,
`{a name}` inserts it with "a" or "an", `{^name}` with a capital. Slots are values of a dict.
"""

import random
import re
from functools import cache

Node = str | tuple[str, str] | list["list[Node]"]
TOKEN = re.compile(r"[\[\]|]|\{(?:(a) |(\^))?(\w+)\}")


@cache
def parse(template: str) -> list[Node]:
    """Template -> a sequence of text, (mode, slot) and choices (lists of sequences)."""
    root: list[Node] = []
    stack: list[list[list[Node]]] = [[root]]
    pos = 0
    for match in TOKEN.finditer(template):
        if match.start() > pos:
            stack[-1][-1].append(template[pos : match.start()])
        pos = match.end()
        token = match.group()
        if token == "[":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == "]":
            branches = stack.pop()
            stack[-1][-1].append(branches)
        else:
            stack[-1][-1].append((match.group(1) or match.group(2) or "", match.group(3)))
    assert len(stack) == 1, template
    if pos < len(template):
        root.append(template[pos:])
    return root


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiouAEIOU" else "a ") + noun


def expand(template: str, rng: random.Random, slots: dict[str, str]) -> str:
    """One random reading of a template, with doubled spaces removed."""
    out: list[str] = []

    def walk(nodes: list[Node]) -> None:
        for node in nodes:
            if isinstance(node, str):
                out.append(node)
            elif isinstance(node, tuple):
                mode, name = node
                value = slots[name]
                if mode == "a":
                    value = article(value)
                elif mode == "^":
                    value = value[0].upper() + value[1:]
                out.append(value)
            else:
                walk(node[int(rng.random() * len(node))])

    walk(parse(template))
    return "".join(out).replace("  ", " ").replace(" .", ".").replace(" ,", ",")
