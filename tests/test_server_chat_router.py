"""MessageRouter: reasoning, content and tool calls of an output, however it was cut."""

from __future__ import annotations

import random

import pytest

from deltaserve.server.reasoning import reasoning_is_open
from deltaserve.server.tool_arguments import ToolParameters

from .chat_transcripts import TOOLS, Message, Transcript, routed, transcript

TRANSCRIPTS = [transcript(random.Random(seed)) for seed in range(200)]
CALL = "<tool_call>\n<function=f>\n<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>"
HI = [("f", '{"text": "hi"}')]


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=range(len(TRANSCRIPTS)))
def test_a_transcript_means_its_message_at_every_split(case: Transcript) -> None:
    text = case.text
    whole = routed([text], case.reasoning)
    assert whole.values == case.values
    assert (whole.reasoning, whole.content) == (case.message.reasoning, case.message.content)
    for at in range(1, len(text)):
        assert routed([text[:at], text[at:]], case.reasoning) == whole, (text[:at], text[at:])
    assert routed(list(text), case.reasoning) == whole


@pytest.mark.parametrize("case", TRANSCRIPTS[:12], ids=range(12))
def test_a_transcript_cut_anywhere_is_the_same_in_pieces(case: Transcript) -> None:
    """Also the end of a `length`: nothing raises, and no half of a tag is left in the arguments."""
    for end in range(0, len(case.text), 7):
        text = case.text[:end]
        for truncated in (True, False):
            whole = routed([text], case.reasoning, truncated=truncated)
            assert routed(list(text), case.reasoning, truncated=truncated) == whole
            if not truncated:
                assert all(isinstance(arguments, dict) for _, arguments in whole.values)
            assert "<tool_call>\n" not in whole.content + whole.reasoning


def test_the_transcripts_hold_what_they_should() -> None:
    calls = [values for case in TRANSCRIPTS for values in case.values]
    assert {name for _, arguments in calls for name in arguments} == {
        "text", "code", "count", "ratio", "flag", "items", "where", "nothing", "unit", "maybe",
    }  # fmt: skip
    assert sum("</parameter>" in str(arguments) for _, arguments in calls) > 3
    assert sum(bool(case.values) and case.message.content != "" for case in TRANSCRIPTS) > 15
    assert sum(case.reasoning and "</think>" not in case.text for case in TRANSCRIPTS) > 5


CASES = [
    # output, begins in reasoning, reasoning, content, calls
    ("a\n</think>\n\nb", True, "a", "b", []),
    ("a</think>b\n", True, "a", "b\n", []),
    ("a</think>b", False, "", "a</think>b", []),
    ("\n b \n", False, "", "\n b \n", []),
    ("<think>\na</think>b", True, "a", "b", []),
    ("a <think> b</think>c", True, "a <think> b", "c", []),
    ("<think>a", False, "", "<think>a", []),
    (f"a\n{CALL}", True, "a", "", HI),
    (f"a\n{CALL}\n</think>\n\nb", True, "a", "b", HI),
    (f"a</think>\n\n{CALL}", True, "a", "", HI),
    (f"{CALL}\n{CALL}", False, "", "", HI * 2),
    (f"a\n\n{CALL}\n\nb", False, "", "a\n\nb", HI),
    ("use <tool_call> here</think>b", True, "use <tool_call> here", "b", []),
    ("<tool_call>\n{}\n</tool_call>", False, "", "<tool_call>\n{}\n</tool_call>", []),
    ("a <tool_", False, "", "a <tool_", []),
    ("a <tool_call>\n<funct", False, "", "a", []),
    ("<tool_call><function=g></function></tool_call>", False, "", "", [("g", "{}")]),
    (
        "<tool_call><function=f><parameter=text>hi</parameter></function></tool_call>",
        False, "", "", HI,
    ),
    # end tags that a model forgets
    (CALL.replace("</parameter>\n", ""), False, "", "", HI),
    (CALL.removesuffix("\n</tool_call>") + " b", False, "", "b", HI),
    (CALL.removesuffix("\n</tool_call>") + CALL, False, "", "", HI * 2),
    (CALL.replace("</function>\n", "") + "b", False, "", "b", HI),
    (CALL.partition("</para")[0], False, "", "", HI),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "thought", "content", "calls"), CASES)
def test_cases(
    text: str, reasoning: bool, thought: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = Message(thought, content, calls)
    assert routed([text], reasoning) == expected
    assert routed(list(text), reasoning) == expected


def test_without_tools_a_call_is_text() -> None:
    assert routed([CALL], False, tools=None) == Message(content=CALL)
    assert routed(["a\n", CALL, "</think>b"], True, None) == Message(f"a\n{CALL}", "b")


def test_calls_beyond_the_most_are_left_out() -> None:
    assert routed(list(f"{CALL}\n{CALL}\n\nb"), False, max_calls=1) == Message("", "b", HI)


def test_what_is_cut_stays_open() -> None:
    cut = CALL.partition("i\n</para")[0]
    assert routed([cut], False, truncated=True).calls == [("f", '{"text": "h')]
    assert routed([cut], False, truncated=False).calls == [("f", '{"text": "h"}')]
    number = "<tool_call>\n<function=f>\n<parameter=count>\n12"
    assert routed([number], False, truncated=True).calls == [("f", '{"count": ')]
    assert routed([number], False, truncated=False).calls == [("f", '{"count": 12}')]


def test_strings_go_out_as_they_come() -> None:
    pieces = [*CALL[: CALL.index("hi")].partition("\n<par")[:1], "\n<parameter=text>\na b c d e"]
    assert routed(pieces, False, truncated=True).calls == [("f", '{"text": "a b c d e')]


def test_content_without_anything_to_wait_for_is_not_held_back() -> None:
    from deltaserve.server.reasoning import MessageRouter

    router = MessageRouter(False, None)
    assert [router.push(piece).content for piece in ("a ", "<", "\n")] == ["a ", "<", "\n"]
    router = MessageRouter(True, TOOLS)
    assert [router.push(piece).reasoning for piece in ("a", " b", "</thi", "s")] == [
        "a", " b", "", "</this",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n<think>so", True),
        ("", False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(prompt: str, is_open: bool) -> None:
    assert reasoning_is_open(prompt) is is_open


TYPES = [
    # schema, written, JSON
    ({"type": "string"}, "5", '"5"'),
    ({"type": "string"}, '"a"', '"\\"a\\""'),
    ({"type": "string"}, "null", '"null"'),
    ({"type": "integer"}, "5", "5"),
    ({"type": "integer"}, " 5.0 ", "5"),
    ({"type": "integer"}, "5.5", '"5.5"'),
    ({"type": "integer"}, "five", '"five"'),
    ({"type": "integer"}, "true", '"true"'),
    ({"type": "integer"}, "9" * 5000, f'"{"9" * 5000}"'),
    ({"type": "number"}, "5", "5"),
    ({"type": "number"}, "-1.5e3", "-1500.0"),
    ({"type": "number"}, "1e999", '"1e999"'),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "boolean"}, "true", "true"),
    ({"type": "boolean"}, "False", "false"),
    ({"type": "boolean"}, "1", '"1"'),
    ({"type": "null"}, "None", "null"),
    ({"type": "array"}, '[1, "a", null]', '[1, "a", null]'),
    ({"type": "array"}, "['a', True]", '["a", true]'),
    ({"type": "array"}, "[1,", '"[1,"'),
    ({"type": "array"}, "[" * 100000, f'"{"[" * 100000}"'),
    ({"type": "object"}, '{"a": {"b": ["\u4e2d"]}}', '{"a": {"b": ["\u4e2d"]}}'),
    ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ({"type": "object"}, "[]", '"[]"'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["string", "null"]}, "None", '"None"'),
    ({"type": ["integer", "string"]}, "5", "5"),
    ({"type": ["integer", "string"]}, "05", '"05"'),
    ({"anyOf": [{"type": "number"}, {"type": "array"}]}, "[2]", "[2]"),
    ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "yes", '"yes"'),
    ({"allOf": [{"title": "t"}, {"type": "integer"}]}, "3", "3"),
    ({"enum": ["5", "6"]}, "5", '"5"'),
    ({"enum": [5, "a"]}, "5", "5"),
    ({"enum": ["5", 6]}, "5", '"5"'),
    ({"const": 1.5}, "1.5", "1.5"),
    ({"$ref": "#/$defs/n"}, "4", "4"),
    ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "null", "null"),
    ({"$ref": "#/$defs/loop"}, "4", "4"),
    ({"$ref": "#/nowhere"}, "x", '"x"'),
    ({"properties": {"a": {}}}, '{"a": 1}', '{"a": 1}'),
    ({"items": {}}, "[1]", "[1]"),
    ({}, "5", "5"),
    ({}, "True", '"True"'),
    (True, "[1]", "[1]"),
    ({"type": 5, "enum": 7}, "a", '"a"'),
]


@pytest.mark.parametrize(("schema", "written", "expected"), TYPES)
def test_types(schema: object, written: str, expected: str) -> None:
    root = {
        "properties": {"p": schema},
        "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    tools = {"f": ToolParameters(root)}
    text = f"<tool_call>\n<function=f>\n<parameter=p>\n{written}\n</parameter>\n</function>"
    assert routed([text], False, tools).calls == [("f", f'{{"p": {expected}}}')]


def test_parameters_that_no_schema_names() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=q>\n5\n</parameter>\n</function>"
    for schema, expected in (
        (None, "5"),
        ({"properties": {}}, "5"),
        ({"additionalProperties": {"type": "string"}}, '"5"'),
        ({"properties": [], "additionalProperties": False}, "5"),
    ):
        tools = {"f": ToolParameters(schema)}
        assert routed([text], False, tools).calls == [("f", f'{{"q": {expected}}}')]
