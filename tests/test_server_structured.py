"""The fields that constrain an output, and the grammar of tool calls, without sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.grammar import MAX_GRAMMAR_CHARS, Grammar
from deltaserve.engine.grammars import Grammars
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.errors import ApiError
from deltaserve.server.protocol import parse_completion
from deltaserve.server.structured import grammar_of
from deltaserve.server.tool_grammar import MAX_TOOLS, tool_choice_grammar

from .tiny_checkpoint import IM_END_ID, NUM_TOKENS, write_tokenizer

OBJECT = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}


def asked(**fields: Any) -> Grammar | None:
    body = json.dumps({"model": "m", "prompt": "p", **fields}).encode()
    return grammar_of(parse_completion(body))


def json_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", **more}}


ASKED: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema", OBJECT),
    ({"response_format": json_schema(schema=SCHEMA, strict=True)}, "json_schema", SCHEMA),
    ({"response_format": json_schema(schema=SCHEMA, strict=None)}, "json_schema", SCHEMA),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_json": True}, "json_schema", {}),
    ({"guided_json": {"minimum": 10**30}}, "json_schema", {"minimum": 10**30}),
    ({"guided_regex": "[a-z]"}, "regex", None),
    ({"guided_choice": ["a", "b\u00e9"]}, "choice", ["a", "b\u00e9"]),
    ({"guided_grammar": 'root ::= "a"'}, "grammar", None),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_schema", OBJECT),
    ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, "regex", None),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", None),
]


@pytest.mark.parametrize(("fields", "kind", "content"), ASKED, ids=[str(n) for n in range(16)])
def test_what_is_asked_for(fields: dict[str, Any], kind: str, content: Any) -> None:
    grammar = asked(**fields)
    assert grammar is not None
    (name,) = fields
    assert (grammar.kind, grammar.field, grammar.start_after) == (kind, name, ())
    if content is not None:
        assert json.loads(grammar.text) == content
        assert list(json.loads(grammar.text)) == list(content)  # the order is the output's


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}], ids=str
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_white_space_of_json(schema: Any) -> None:
    compact = asked(structured_outputs={"json": schema, "disable_any_whitespace": True})
    own = asked(structured_outputs={"json": schema, "whitespace_pattern": " ?"})
    assert compact is not None and own is not None
    options = [json.loads(grammar.text)["x-guidance"] for grammar in (compact, own)]
    assert options == [
        {"whitespace_flexible": False, "whitespace_pattern": None},
        {"whitespace_pattern": " ?"},
    ]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or"),
    ({"response_format": {}}, "response_format", "missing required field `type`"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: is required"),
    ({"response_format": json_schema()}, "response_format", "missing required field `schema`"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format", "unknown field `x`"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
    (
        {"structured_outputs": {"json": "{", "disable_any_whitespace": True}},
        "structured_outputs",
        "not valid JSON",
    ),
    ({"guided_regex": 5}, "guided_regex", "must be a string"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_choice": "a"}, "guided_choice", "must be a list"),
    ({"guided_choice": [1]}, "guided_choice", "must be a string"),
    ({"guided_choice": []}, "guided_choice", "1 to 10000 choices"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "1 to 10000 choices"),
    ({"guided_json": 5}, "guided_json", "must be"),
    ({"guided_grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_grammar", "characters"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "together with guided_regex"),
    (
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        "guided_json",
        "together with response_format",
    ),
]


@pytest.mark.parametrize(("fields", "name", "message"), WRONG, ids=[str(n) for n in range(20)])
def test_what_is_refused(fields: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert message in caught.value.message
    assert caught.value.message.startswith(name)


# ---- tool calls ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, frozenset({IM_END_ID}), NUM_TOKENS)
    yield made
    made.close()


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


UNIT = {"enum": ["c", "f"]}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
WEATHER = tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"const": "k"}]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "at": {"$ref": "#/$defs/point"},
            "any": {},
            "maybe": {"type": ["integer", "string"]},
        },
        "required": ["city", "days"],
        "$defs": {"unit": UNIT, "point": POINT},
    },
)
NOW = tool("now")


def call(name: str, *parameters: tuple[str, str]) -> str:
    values = "".join(f"<parameter={p}>\n{value}\n</parameter>\n" for p, value in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


CITY, DAYS = ("city", "S\u00e3o\nPaulo <b> </parameter> {"), ("days", "5")


def accepts(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    matcher = grammars.compile(grammar).result(60).matcher.deep_copy()
    ids = tokenizer.encode(text)
    return bool(matcher.validate_tokens(ids) == len(ids)) and bool(
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (call("weather", CITY, DAYS), True),
        (call("now"), True),
        (call("now") + "\n" + call("weather", CITY, DAYS), True),
        (call("weather", CITY, ("unit", "f"), DAYS, ("at", '{"x":1.5}')), True),
        (call("weather", CITY, ("unit", "k"), DAYS, ("any", "<x>\n"), ("maybe", "5")), True),
        (call("now") + call("now"), False),
        (call("weather", CITY), False),
        (call("weather", CITY, ("days", "12")), False),
        (call("weather", CITY, ("unit", "x"), DAYS), False),
        (call("weather", CITY, DAYS, ("at", '{"x":"1"}')), False),
        (call("weather", CITY, DAYS, ("more", "1")), False),
        (call("other"), False),
        ("text", False),
        ("", False),
    ],
)
def test_required_calls(grammars: Grammars, tokenizer: Tokenizer, text: str, good: bool) -> None:
    grammar = tool_choice_grammar([WEATHER, NOW], "required")
    assert grammar is not None
    assert accepts(grammars, tokenizer, grammar, text) is good


def test_one_call_where_one_is_meant(grammars: Grammars, tokenizer: Tokenizer) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for grammar in (
        tool_choice_grammar([WEATHER, NOW], named),
        tool_choice_grammar([WEATHER, NOW], "required", parallel=False),
    ):
        assert grammar is not None
        assert accepts(grammars, tokenizer, grammar, call("now"))
        assert not accepts(grammars, tokenizer, grammar, call("now") + "\n" + call("now"))
    only_now = tool_choice_grammar([WEATHER, NOW], named)
    assert only_now is not None
    assert not accepts(grammars, tokenizer, only_now, call("weather", CITY, DAYS))


INTEGER = {"type": "integer"}
DRAFT_7 = {"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}
FANNED_OUT = {"anyOf": [{"$ref": "#/$defs/q"}] * 40 + [{"type": "string"}]}


@pytest.mark.parametrize(
    ("parameters", "value", "good"),
    [
        ({"properties": {"p": True}}, "any\ntext", True),
        ({"properties": {"p": {"allOf": [{"type": "boolean"}]}}}, "yes", False),
        ({"properties": {"p": {"allOf": [{"type": "boolean"}]}}}, "true", True),
        ({"properties": {"p": {"items": {"type": "integer"}}}}, "[1,2]", True),
        ({"properties": {"p": {"enum": ["a", 5]}}}, "b", True),  # may be a string: any
        ({"properties": {"p": {"enum": [5, None]}}}, "null", True),
        ({"properties": {"p": {"$ref": "#/properties/q"}, "q": {"type": "string"}}}, "x", True),
        ({"properties": {"p": {"$ref": "#/$defs/q"}}, "$defs": {"q": FANNED_OUT}}, "x", True),
        ({"properties": {"p": {"$ref": "#/properties/p"}}}, "x", True),
        ({"properties": {"p": {"items": {"$ref": "#/properties/q"}}, "q": INTEGER}}, "[1]", True),
        ({"properties": {"p": {"items": {"$ref": "#/properties/q"}}, "q": INTEGER}}, "[{}]", False),
        ({"properties": {"p": {"items": {"$ref": "#"}}}, **DRAFT_7}, '[{"p":[]}]', True),
        ({"properties": {"p": {"items": {"$ref": "#"}}}, **DRAFT_7}, "[5]", False),
        ({"properties": {"p": {"anyOf": [{"type": "integer"}] * 300}}}, "x", False),
        ({"properties": {"p": {"enum": [f"v{n}" for n in range(4000)]}}}, "v3999", True),
        ({"properties": {"p": {"enum": [f"v{n}" for n in range(4000)]}}}, "v4000", False),
        ({"properties": {"p": {"enum": ["", "a", "a\nb"]}}}, "", True),
        ({"properties": {"p": {"enum": ["", "a", "a\nb"]}}}, "a", True),
        ({"properties": {"p": {"enum": ["", "a", "a\nb"]}}}, "a\nb", True),
        ({"required": ["p"]}, "x", True),
        ({"required": "p", "properties": []}, "x", False),
        ({"required": [["p"], 5, "p"], "properties": {"p": {"type": 5}}}, "x", True),
        ([], "x", False),
    ],
)
def test_any_schema_of_parameters_will_do(
    grammars: Grammars, tokenizer: Tokenizer, parameters: Any, value: str, good: bool
) -> None:
    grammar = tool_choice_grammar([tool("f", parameters)], "required")
    assert grammar is not None
    assert accepts(grammars, tokenizer, grammar, call("f", ("p", value))) is good


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_choices_that_ask_for_no_call(choice: str | None) -> None:
    assert tool_choice_grammar([NOW], choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        ([NOW], "must", "tool_choice"),
        ([NOW], {"type": "function", "function": {"name": "then"}}, "tool_choice"),
        ([NOW], {}, "tool_choice"),
        ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], "required", "tools"),
        ([tool("f", {"required": ["p" * 257]})], "required", "tools"),
        ([tool("f", {"properties": {"a>b": {}}})], "required", "tools"),
        ([tool("f", {"properties": {" a": {}}})], "required", "tools"),
        ([tool("f", {"required": ["a\nb"]})], "required", "tools"),
        ([tool("f", {"required": [""]})], "required", "tools"),
        ([tool("f", {"properties": {"p": {"enum": ["v" * MAX_GRAMMAR_CHARS]}}})], "required",
         "tools"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        tool_choice_grammar(tools, choice)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_definitions_are_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of tools is not a gigabyte of grammar."""
    dumped: list[int] = []
    dumps = json.dumps

    def counted(value: Any) -> str:
        dumped.append(1)
        return dumps(value)

    properties = {f"p{n}": {"type": "integer"} for n in range(1000)}
    schema = {"properties": properties, "$defs": {"d": {"description": "d" * 100_000}}}
    monkeypatch.setattr(json, "dumps", counted)
    with pytest.raises(ApiError) as caught:
        tool_choice_grammar([tool("f", schema)], "required")
    assert caught.value.param == "tools"
    assert len(dumped) < 50
