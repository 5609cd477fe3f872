"""POST /v1/completions: a well-formed request -> engine requests -> text, whole or streamed.

The order of things: field types, prompts, parameters, then the engine.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from .admission import admit, answer_body
from .answer import Shown
from .completion_answer import CompletionAnswer
from .echo import PromptEcho
from .prompts import PromptLimits, encode, read_prompts
from .protocol import CompletionBody, num_choices, parse_completion
from .reply import reply
from .sampling_fields import completion_params
from .state import ServerState


async def completions(request: Request) -> Response:
    return await answer_body(request, parse_completion, _answer)


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
