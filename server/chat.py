"""POST /v1/chat/completions: messages -> prompt -> engine requests -> message.

The order of things: field types, tools, parameters, messages and their prompt, then the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.capacity import Capacity
from deltaserve.engine.sampling_params import SamplingParams

from .admission import admit, answer_body
from .answer import ChoiceState, Shown
from .chat_answer import ChatAnswer
from .chat_grammar import chat_grammar
from .chat_messages import read_messages, read_tools, tool_parameters_by_name
from .chat_prompt import render_chat, require_template
from .chat_protocol import ChatBody, chosen_tools, parse_chat
from .chat_template import ChatTemplate
from .errors import ApiError
from .json_body import invalid
from .prompts import PromptLimits, encode
from .protocol import num_choices
from .reasoning import THINK_END, MessageRouter, reasoning_is_open
from .reply import reply
from .sampling_fields import sampling_params
from .state import ServerState


async def chat_completions(request: Request) -> Response:
    return await answer_body(request, parse_chat, _answer)


async def _answer(request: Request, state: ServerState, fields: ChatBody) -> Response:
    """No response begins before the engine has admitted every choice."""
    facts, tokenizer = state.engine.facts, state.tokenizer
    assert facts is not None and tokenizer is not None
    template = require_template(state)
    limits = PromptLimits.of(facts.capacity.max_model_len, facts.vocab_limit, tokenizer)
    n = num_choices(fields, 1)
    tools = read_tools(fields.tools)
    callable_tools = tool_parameters_by_name(tools)
    choice = chosen_tools(fields, callable_tools)
    if choice == "none":  # then the model sees none
        tools, callable_tools = [], {}
    text = await render_chat(
        template,
        await read_messages(fields.messages),
        tools,
        _template_arguments(fields, template),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        max_chars=limits.max_chars,
    )
    reasoning = reasoning_is_open(text)
    start_after = tuple(tokenizer.encode(THINK_END)) if reasoning else ()
    shown = Shown(
        (fields.top_logprobs or 0) if fields.logprobs else None,
        fields.prompt_logprobs,
        bool(fields.return_token_ids),
    )
    chosen = {
        **state.sampling_defaults,
        "max_tokens": fields.max_tokens or facts.capacity.max_model_len,
        "logprobs": shown.logprobs,
        "prompt_logprobs": shown.prompt_logprobs,
        "grammar": chat_grammar(fields, tools, choice, start_after),
    }
    params = await sampling_params(fields, chosen, tokenizer, facts.vocab_limit)
    prompt_ids = await encode(tokenizer, text, limits, "messages")
    if fields.max_tokens is None:
        most = max(_room(facts.capacity, len(prompt_ids)), params.min_tokens, 1)
        params = replace(params, max_tokens=most)
    max_calls = 1 if fields.parallel_tool_calls is False else None
    wake = asyncio.Event()
    answer = ChatAnswer(
        id=f"chatcmpl-{request.state.request_id}",
        model=fields.model,
        tokenizer=tokenizer,
        shown=shown,
        wake=wake,
        choices=await _admit(request, state, params, prompt_ids, n, wake),
        routers=[MessageRouter(reasoning, callable_tools or None, max_calls) for _ in range(n)],
    )
    return await reply(request, answer, fields.stream, fields.stream_options)


async def _admit(
    request: Request,
    state: ServerState,
    params: SamplingParams,
    prompt_ids: list[int],
    n: int,
    wake: asyncio.Event,
) -> list[ChoiceState]:
    """What the engine says of the prompt is said of the messages here."""
    try:
        return await admit(request, state, params, [prompt_ids], n, wake)
    except ApiError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise


def _room(capacity: Capacity, num_prompt: int) -> int:
    """Output tokens that fit behind the prompt; the last one needs no place in the cache."""
    cached = capacity.num_blocks * capacity.block_size
    return min(capacity.max_model_len - num_prompt, cached - num_prompt + 1)


def _template_arguments(fields: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    """`reasoning_effort` is the template's, if it knows efforts; "none" turns thinking off."""
    arguments = dict(fields.chat_template_kwargs or {})
    effort = fields.reasoning_effort
    if effort is None:
        return arguments
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort, **arguments}
    if effort == "none" and "enable_thinking" in template.variables:
        return {"enable_thinking": False, **arguments}
    raise invalid(
        "reasoning_effort",
        f"reasoning_effort: this model's chat template does not know {effort!r}; "
        "chat_template_kwargs has what it knows",
    )
