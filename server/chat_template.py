"""ChatTemplate: a checkpoint's Jinja template, messages -> the text of a prompt.

Owns where the template is found and what it may use: a sandbox with the names and filters that
templates on the Hugging Face hub expect (transformers, `utils/chat_template_utils.py`). What a
message may be is chat_messages.py's.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S = 10.0
"""A prompt whose text is not there by then is refused."""
MAX_ERROR_CHARS = 500
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that are the request's own fields."""
_CHECK_TIME = "_check_time"


class ChatTemplateError(ValueError):
    """The template does not take these messages; says why."""


class _Refused(Exception):
    """The template's own `raise_exception`."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is as if unmarked."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`origin` is where it was found, `special_tokens` are variables it may use (`bos_token`, ...).

    Raises ValueError, naming the origin, for what is not a Jinja template.
    """

    def __init__(
        self, source: str, origin: str, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            _look_at_the_clock(tree)
            self._template = environment.from_string(tree)
        except (TemplateError, SyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", None) if isinstance(error, TemplateError) else None
            place = origin if line is None else f"{origin}:{line}"
            raise ValueError(f"{place}: not a usable chat template: {error}") from None
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        max_chars: int,
    ) -> str:
        """The prompt's text. `arguments`: further variables. With `continue_final_message` it ends
        where the last message's content does.

        Raises ChatTemplateError, also for a text of more than `max_chars` characters.
        """
        marker = ""
        if continue_final_message:
            marker = uuid.uuid4().hex
            last = {**messages[-1], "content": messages[-1]["content"] + marker}
            messages = [*messages[:-1], last]
        variables = {
            **self._special_tokens,
            **arguments,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._text(variables, max_chars)
        if not marker:
            return text
        before, found, _ = text.rpartition(marker)
        if not found:
            raise ChatTemplateError("the chat template leaves out the message to continue")
        return before

    def _text(self, variables: Mapping[str, Any], max_chars: int) -> str:
        deadline = time.monotonic() + RENDER_S

        def check_time() -> None:
            if time.monotonic() > deadline:
                raise ChatTemplateError(f"the chat template took more than {RENDER_S:g} s")

        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, _CHECK_TIME: check_time}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise ChatTemplateError(
                        f"the prompt has more than {max_chars} characters, more than the context "
                        "can hold"
                    )
                check_time()
            text = "".join(pieces)
            text.encode()  # a lone surrogate is no text
        except ChatTemplateError:
            raise
        except _Refused as error:
            raise ChatTemplateError(
                f"the chat template refuses the messages: {_short(error)}"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # whatever a template's expressions may raise
            raise ChatTemplateError(
                f"the chat template failed on the messages: {type(error).__name__}: {_short(error)}"
            ) from None
        return text


def load_chat_template(model_path: str | Path, replacement: str | None) -> ChatTemplate | None:
    """The template in the file `replacement`, else the checkpoint's: chat_template.jinja, or what
    tokenizer_config.json says. None where there is none. Raises ValueError that names the file."""
    directory = Path(model_path)
    config_path = directory / "tokenizer_config.json"
    config = _read_config(config_path)
    special_tokens = _special_tokens(config)
    file = directory / "chat_template.jinja" if replacement is None else Path(replacement)
    if replacement is not None and not file.is_file():
        raise ValueError(f"there is no file {replacement}")
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: no readable chat template ({error})") from None
        return ChatTemplate(source, str(file), special_tokens)
    listed = config.get("chat_template")
    if isinstance(listed, list):  # named ones
        named = {entry.get("name"): entry.get("template") for entry in listed}
        listed = named.get("default")
    if listed is None:
        return None
    if not isinstance(listed, str):
        raise ValueError(f"{config_path}: chat_template must be a text")
    return ChatTemplate(listed, str(config_path), special_tokens)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable tokenizer_config.json ({error})") from None
    return config if isinstance(config, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what matters to HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _look_at_the_clock(tree: nodes.Template) -> None:
    """At every turn of a loop and call of a macro: they may go on without writing anything."""
    for node in [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]:
        assert isinstance(node, nodes.For | nodes.Macro)
        check = nodes.Call(nodes.Name(_CHECK_TIME, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))


def _short(error: Exception) -> str:
    text = str(error).encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
