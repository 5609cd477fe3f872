"""Chat prompts are transformers' own, to the character and the token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from deltaserve.engine.tokenizer import Tokenizer  # noqa: E402
from deltaserve.server.chat_template import ChatTemplate, load_chat_template  # noqa: E402
from tools.demo_chat import conversation  # noqa: E402

pytestmark = pytest.mark.hf
DEMO = Path(__file__).resolve().parent.parent / "models" / "demo"

# What templates on the hub use of Jinja and of transformers' own additions to it.
SOURCES = [
    "{%- for m in messages %}\n    {%- if loop.first %}\nfirst\n    {%- endif %}\n{{ m.role }}\n"
    "    {% if m.content is string %}\n{{ m.content | trim }}\n    {% endif %}\n{%- endfor %}\n",
    "{%- for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}",
    "{% for m in messages[::-1] %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index0 == 3 %}{% break %}{% endif %}{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}\n\n",
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def cases() -> list[tuple[list[dict[str, Any]], list[Any], bool]]:
    return [conversation(random.Random(seed)) for seed in range(60)]


def test_the_demo_models_prompts(theirs: Any) -> None:
    ours, tokenizer = load_chat_template(DEMO, None), Tokenizer(DEMO)
    assert ours is not None
    for messages, tools, think in cases():
        for turns, adding in ((messages, False), (messages[:-1], True)):
            options = {"add_generation_prompt": adding, "enable_thinking": think}
            expected = theirs.apply_chat_template(
                turns, tools=tools or None, tokenize=False, **options
            )
            text = ours.render(
                turns,
                tools,
                {"enable_thinking": think},
                add_generation_prompt=adding,
                continue_final_message=False,
                max_chars=1 << 20,
            )
            assert text == expected
            assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_message_to_continue(theirs: Any) -> None:
    ours = load_chat_template(DEMO, None)
    assert ours is not None
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi, I am"}]
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    expected = theirs.apply_chat_template(turns, tokenize=False, **settings)
    assert ours.render(turns, None, {}, max_chars=999, **settings) == expected


@pytest.mark.parametrize("source", SOURCES)
def test_other_templates(theirs: Any, source: str) -> None:
    ours = ChatTemplate(source, "t", {"eos_token": theirs.eos_token})
    for messages, tools, _ in cases()[:20]:
        if not tools and "tools" in source:
            continue
        expected = theirs.apply_chat_template(
            messages, tools=tools or None, chat_template=source, tokenize=False
        )
        settings = {"add_generation_prompt": False, "continue_final_message": False}
        assert ours.render(messages, tools, {}, max_chars=1 << 20, **settings) == expected
