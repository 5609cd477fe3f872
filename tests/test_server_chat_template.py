"""Chat templates: where they are found, what they may use, and how they fail."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from deltaserve.server import chat_template
from deltaserve.server.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from deltaserve.server.cli import main

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HELLO, tools: Any = None, **options: Any) -> str:
    arguments = options.pop("arguments", {})
    settings = {"add_generation_prompt": True, "continue_final_message": False, "max_chars": 1000}
    return ChatTemplate(source, "t").render(messages, tools, arguments, **(settings | options))


RENDERED = [
    ("{{ messages[0].content }}\n", "hi"),
    ("{% for m in messages %}\n  {% if true %}\na\n  {% endif %}\n{% endfor %}\n", "a\n"),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
    ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
    ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}",
     '{"a": "\\u00e9", "b": 1}'),
    ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
    ("{{ '' if tools is none else 'tools' }}{{ add_generation_prompt }}", "True"),
    ("{{ missing }}{{ messages[0].missing }}", ""),
    ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", "2"),
    ("{{ messages[::-1] | length }}{{ 'a b'.split(' ')[-1] }}", "1b"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), RENDERED)
def test_what_templates_may_use(source: str, text: str) -> None:
    assert render(source) == text


FAILING = [
    ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
    ("{{ messages[0].content.nothing.at_all }}", "UndefinedError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
    ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
    ("{% for i in range(2000) %}{{ i }}{% endfor %}", "more than 1000 characters"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{{ raise_exception('x' * 9999) }}", "x..."),
    (r"{{ raise_exception('\ud800') }}", r"refuses the messages: \ud800"),
    (r"{{ '\ud800' }}", "UnicodeEncodeError"),
]


@pytest.mark.parametrize(("source", "message"), FAILING)
def test_a_template_that_fails_says_why(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_template_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", -1.0)
    with pytest.raises(ChatTemplateError, match="took more than"):
        render("a{{ messages }}")


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"


@pytest.mark.parametrize(
    "source", [LOOP, "{% set a %}" + LOOP + "{% endset %}", CALLS + "{{ m(99) }}"]
)
def test_a_template_that_goes_on_without_a_word(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.05)
    with pytest.raises(ChatTemplateError, match="took more than"):
        render(source)


def test_the_last_message_is_continued_where_it_ends() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}!"
    messages = [*HELLO, {"role": "assistant", "content": " so \n"}]
    assert render(source, messages) == "[hi][so]!"
    assert render(source, messages, continue_final_message=True) == "[hi][so \n"
    with pytest.raises(ChatTemplateError, match="leaves out the message to continue"):
        render("{{ messages[0].content }}", messages, continue_final_message=True)


def test_arguments_are_variables_and_are_known() -> None:
    source = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ bos_token }}"
    template = ChatTemplate(source, "t", {"bos_token": "<s>"})
    assert {"enable_thinking", "bos_token"} <= template.variables
    assert render(source, arguments={"enable_thinking": False}) == "False"
    settings = {"add_generation_prompt": True, "continue_final_message": False, "max_chars": 9}
    assert template.render(HELLO, None, {}, **settings) == "<s>"


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None) is None
    config: dict[str, Any] = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "e"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def text(replacement: str | None = None) -> str:
        template = load_chat_template(tmp_path, replacement)
        assert template is not None
        settings = {"add_generation_prompt": True, "continue_final_message": False}
        return template.render(HELLO, None, {}, max_chars=99, **settings)

    assert text() == "e"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert text() == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}é", "utf-8")
    assert text() == "hié"
    (tmp_path / "own.jinja").write_text("own {{ eos_token }}")
    assert text(str(tmp_path / "own.jinja")) == "own e"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", "a\n{% if %}", r"chat_template\.jinja:2: not a usable chat"),
        ("chat_template.jinja", "{% break %}", "a usable chat template: 'break' outside loop"),
        ("chat_template.jinja", "{{ a | nothing }}", "No filter named 'nothing'"),
        ("chat_template.jinja", b"\xff", "no readable chat template"),
        ("tokenizer_config.json", "[", "not a readable tokenizer_config"),
        ("tokenizer_config.json", '{"chat_template": 5}', "must be a text"),
    ],
)
def test_what_is_no_template_is_named(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_chat_template(tmp_path, None)


def test_a_file_that_is_no_template_stops_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jinja").write_text("{% for %}")
    model = str(Path(__file__).resolve().parent.parent / "models" / "demo")
    arguments = ["serve", "--model-path", model, "--chat-template", str(tmp_path / "t.jinja")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "--chat-template: " in error and "t.jinja:1: not a usable chat template" in error
