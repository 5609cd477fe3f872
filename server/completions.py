"""POST /v1/completions: a well-formed request -> engine requests -> text, whole or streamed.

The order of things: field types, prompts, parameters, then the engine.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from .admission import admit, require_model, require_ready
from .answer import Shown
from .completion_answer import CompletionAnswer
from .echo import PromptEcho
from .prompts import PromptLimits, encode, read_prompts
from .protocol import CompletionBody, num_choices, parse_completion
from .reply import reply
from .request_body import read_json_body
from .sampling_fields import completion_params
from .state import ServerState
from .streaming import until_disconnect


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read_json_body(request, state.max_body_bytes)
    require_ready(state)
    fields = parse_completion(body)
    require_model(state, fields.model)
    return await until_disconnect(request.receive, _answer(request, state, fields))


async def _answer(request: Request, state: ServerState, fields: CompletionBody) -> Response:
    """No response begins before the engine has admitted every choice."""
    facts, tokenizer = state.engine.facts, state.tokenizer
    assert facts is not None and tokenizer is not None
    limits = PromptLimits.of(facts.capacity.max_model_len, facts.vocab_limit, tokenizer)
    prompts = await read_prompts(fields.prompt, limits)
    n = num_choices(fields, len(prompts))
    params = await completion_params(fields, state.sampling_defaults, tokenizer, facts.vocab_limit)
    encoded: list[list[int]] = []
    echoes: list[PromptEcho | None] = []
    for prompt in prompts:
        ids = prompt if isinstance(prompt, list) else await encode(tokenizer, prompt, limits)
        echo = await asyncio.to_thread(PromptEcho, tokenizer, ids) if fields.echo else None
        encoded.append(ids)
        echoes += [echo] * n
    wake = asyncio.Event()
    answer = CompletionAnswer(
        id=f"cmpl-{request.state.request_id}",
        model=fields.model,
        tokenizer=tokenizer,
        shown=Shown(fields.logprobs, fields.prompt_logprobs, bool(fields.return_token_ids)),
        wake=wake,
        choices=await admit(request, state, params, encoded, n, wake),
        echoes=echoes,
    )
    return await reply(request, answer, fields.stream, fields.stream_options)
