r"""The grammar of tool calls that must be made: `tool_choice` required, or a function's name.

    <tool_call>\n<function=NAME>\n<parameter=P>\nVALUE\n</parameter>\n...</function>\n</tool_call>

Parameters come in the order of the schema, required ones always. A value that may be a string is
any text up to its end tag, or one of those listed; any other is JSON by its schema. That is what
`tool_calls` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deltaserve.engine.grammar import MAX_GRAMMAR_CHARS, Grammar

from .json_body import invalid
from .structured import make_grammar
from .tool_calls import is_name

MAX_TOOLS = 256
MAX_SCHEMAS = 64
"""Looked at for one parameter; one that refers further may be any text."""
_DEFINITIONS = ("$defs", "definitions")
_COMPACT = {"whitespace_flexible": False}
_REFERENCE = '"$ref": "#'
_OTHER_REFERENCE = re.compile(re.escape(_REFERENCE) + r"(?!/(\$defs|definitions)/)")
_VALUE_END = "\n</parameter>\n"


def tool_choice_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    parallel: bool = True,
    start_after: tuple[int, ...] = (),
) -> Grammar | None:
    """`tools` and `choice` as a request has them: None for "auto" and "none"; one call for a named
    function, one or with `parallel` more for "required". Raises ApiError 400."""
    if choice is None or choice in ("auto", "none"):
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice == "required":
        if not functions:
            raise invalid("tool_choice", "tool_choice: required, but there are no tools")
        more = ' ("\\n" call)*' if parallel else ""
    elif isinstance(choice, Mapping):
        name = choice.get("function", {}).get("name")
        if name not in functions:
            raise invalid("tool_choice", f"tool_choice: there is no function {name!r:.100}")
        functions, more = {name: functions[name]}, ""
    else:
        raise invalid("tool_choice", "tool_choice: must be none, auto, required or a function")
    if len(functions) > MAX_TOOLS:
        raise invalid("tools", f"tools: at most {MAX_TOOLS} to choose from, got {len(functions)}")
    names = " | ".join(f"f{number}" for number in range(len(functions)))
    rules = [
        f"start: call{more}",
        f'call: "<tool_call>\\n" ({names}) "</tool_call>"',
        f"text[suffix={json.dumps(_VALUE_END)}]: /(?s:.*)/",
    ]
    num_chars = 0
    for number, (name, function) in enumerate(functions.items()):
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, Mapping) else {}
        for rule in _function_rules(f"f{number}", name, schema):
            rules.append(rule)
            num_chars += len(rule)
            if num_chars > MAX_GRAMMAR_CHARS:  # each parameter repeats the schema's definitions
                raise invalid(
                    "tools",
                    f"tools: the grammar of their calls is over {MAX_GRAMMAR_CHARS} characters",
                )
    return make_grammar("lark", "\n".join(rules), start_after, "tools")


def _function_rules(rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    listed = schema.get("required")
    listed = listed if isinstance(listed, list) else []
    required = [name for name in listed if isinstance(name, str)]
    for parameter in required:
        properties.setdefault(parameter, {})
    parts = [_literal(f"<function={name}>\n")]
    for number, (parameter, own) in enumerate(properties.items()):
        if not is_name(parameter):
            raise invalid("tools", f"tools: no call can name the parameter {parameter!r:.100}")
        value = _value(own, schema)
        part = f"{rule}_p{number}"
        if value.startswith("("):  # listed texts: a terminal, which may have any number
            part = part.upper()
        yield f"{part}: {_literal(f'<parameter={parameter}>' + chr(10))} {value}"
        parts.append(part if parameter in required else f"{part}?")
    parts.append(_literal("</function>\n"))
    yield f"{rule}: {' '.join(parts)}"


def _value(own: Any, root: Mapping[str, Any]) -> str:
    """What stands between the tags, and the end tag."""
    kinds = list(_kinds(own, root))
    texts = [text for texts in kinds if texts is not None for text in texts]
    if kinds and all(kind for kind in kinds):
        return f"({' | '.join(map(_literal, texts))}) {_literal(_VALUE_END)}"
    if not kinds or any(kind is not None for kind in kinds):
        return "text"
    schema = {"x-guidance": _COMPACT, **(own if isinstance(own, Mapping) else {})}
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    text = json.dumps(definitions | schema)
    if _OTHER_REFERENCE.search(text):  # references are from the root
        text = json.dumps(schema | {"$defs": {"root": root}})
        text = text.replace(_REFERENCE, f"{_REFERENCE}/$defs/root")
    return f"%json {text} {_literal(_VALUE_END)}"


def _kinds(own: Any, root: Mapping[str, Any]) -> Iterator[list[str] | None]:
    """Of each alternative: the texts it is one of, [] for any text, None where it is no string."""
    open_schemas, seen = [own], set[int]()
    while open_schemas:
        schema = open_schemas.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if not isinstance(schema, Mapping) or len(seen) > MAX_SCHEMAS:
            yield []
            return
        reference = schema.get("$ref")
        inner = [
            part
            for keyword in ("anyOf", "oneOf", "allOf")
            if isinstance(schema.get(keyword), list)
            for part in schema[keyword][:MAX_SCHEMAS]
        ]
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if isinstance(reference, str):
            open_schemas.append(_referred(reference, root))
        elif isinstance(values, list):
            texts = [value for value in values if isinstance(value, str)]
            yield texts if len(texts) == len(values) else [] if texts else None
        elif isinstance(types, list):
            yield [] if "string" in types else None
        elif inner:
            open_schemas += reversed(inner)
        else:
            yield None if "properties" in schema or "items" in schema else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _literal(text: str) -> str:
    return json.dumps(text)
