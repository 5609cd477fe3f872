"""The prompt of a chat: messages, tools and template arguments -> the text that a model continues.

Shared by /v1/chat/completions and /tokenize.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import GIVEN, ChatTemplate, ChatTemplateError
from .json_body import invalid
from .prompts import SHORT_CHARS
from .state import ServerState


def require_template(state: ServerState) -> ChatTemplate:
    """Raises ApiError 400 where the model has none."""
    if state.chat_template is None:
        raise invalid(
            "messages",
            "messages: this model has no chat template; --chat-template gives the server one",
        )
    return state.chat_template


async def render_chat(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    max_chars: int,
) -> str:
    """Raises ApiError 400, also for an argument that the template does not know."""
    given = arguments or {}
    for name in given:
        if name in GIVEN or name not in template.variables:
            what = "is a field of its own" if name in GIVEN else "the chat template has no such one"
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {name[:100]!r}: {what}")
    if continue_final_message:
        _check_continued(messages[-1], add_generation_prompt)
        add_generation_prompt = False
    if "developer" not in template.source:  # templates know it as the system's
        roles = {"developer": "system"}
        messages = [{**each, "role": roles.get(each["role"], each["role"])} for each in messages]

    def render() -> str:
        return template.render(
            messages,
            tools,
            given,
            add_generation_prompt=add_generation_prompt is not False,
            continue_final_message=bool(continue_final_message),
            max_chars=max_chars,
        )

    num_chars = sum(len(message["content"]) for message in messages)
    try:
        if num_chars > SHORT_CHARS * 16 or len(messages) > 32:
            return await asyncio.to_thread(render)
        return render()
    except ChatTemplateError as error:
        raise invalid("messages", f"messages: {error}") from None


def _check_continued(message: Mapping[str, Any], add_generation_prompt: bool | None) -> None:
    name = "continue_final_message"
    if add_generation_prompt:
        raise invalid(name, f"{name}: not together with add_generation_prompt")
    if message["role"] != "assistant" or "tool_calls" in message:
        raise invalid(name, f"{name}: the last message must be an assistant's, without tool calls")
