"""LLM: a model in this process, for scripts. Text or token ids in, completions out.

Owns an LLMEngine, the tokenizer and one OutputProcessor a prompt. A server has its engine in a
process of its own instead: see `async_engine`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from .config import EngineConfig
from .generation_config import read_sampling_defaults
from .llm_engine import LLMEngine
from .output_processor import OutputProcessor, TextLogprob, TextOutput
from .sampling_params import SamplingParams
from .sequence import TokenLogprobs
from .tokenizer import Tokenizer

Prompts = str | SequenceOf[str] | SequenceOf[SequenceOf[int]]


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt.

    `finish_reason`: "stop", "length" or "error" (then `error` says why); `stop_reason`: the stop
    string or the end id, where one of them ended it. `token_ids` has the end id, `text` has not.
    `logprobs` are one a token if the sampling parameters ask for them, else empty; so are
    `prompt_logprobs`, of the prompt's tokens from the second on.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TextLogprob, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class _Request:
    """A prompt on its way."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    processor: OutputProcessor
    outputs: list[TextOutput] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def completion(self) -> Completion:
        last = self.outputs[-1]
        assert last.finish_reason is not None
        return Completion(
            text="".join(output.text for output in self.outputs),
            token_ids=tuple(id_ for output in self.outputs for id_ in output.token_ids),
            finish_reason=last.finish_reason.value,
            stop_reason=last.stop_reason,
            logprobs=tuple(entry for output in self.outputs for entry in output.logprobs),
            error=last.error,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """`LLM("models/demo").generate("The capital of France is")`; `options` are EngineConfig's.

    `default_params` are for prompts that come without parameters: those of the checkpoint's
    generation_config.json, or SamplingParams' own with `generation_config` "none". Use it from one
    thread. As a context manager, or by `close`, it frees the device.
    """

    def __init__(
        self,
        model_path: str,
        *,
        generation_config: Literal["auto", "none"] = "auto",
        **options: Any,
    ) -> None:
        if generation_config not in ("auto", "none"):
            raise ValueError(f"generation_config: must be auto or none, got {generation_config!r}")
        config = EngineConfig(model_path=str(model_path), **options)
        defaults = read_sampling_defaults(model_path) if generation_config == "auto" else {}
        self.default_params = SamplingParams(**defaults)
        self.tokenizer = Tokenizer(config.model_path)
        self.engine = LLMEngine(config, tokenizer=self.tokenizer)
        self._request_ids = itertools.count()

    def generate(
        self, prompts: Prompts, params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in order; a string counts as one prompt.

        `params`: for all prompts, or one each; None is `default_params`. `bad_words` are ids, which
        `llm.tokenizer.bad_words(["word", ...])` makes. Raises ValueError for a prompt that cannot
        run (none of the prompts has an effect then).
        """
        requests = self._make_requests(prompts, params)
        waiting = deque(requests)
        running: dict[str, _Request] = {}
        max_queue = self.engine.capacity.max_queue
        try:
            while waiting or running:
                while waiting and self.engine.num_waiting < max_queue:
                    request = waiting.popleft()
                    self.engine.add_request(request.request_id, request.prompt_ids, request.params)
                    running[request.request_id] = request
                for output in self.engine.step():
                    request = running[output.request_id]
                    text = request.processor.process(output)
                    request.outputs.append(text)
                    request.prompt_logprobs += output.prompt_logprobs
                    if text.must_abort:
                        self.engine.abort(request.request_id)
                    if text.finish_reason is not None:
                        del running[request.request_id]
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return [request.completion() for request in requests]

    def _make_requests(
        self, prompts: Prompts, params: SamplingParams | SequenceOf[SamplingParams] | None
    ) -> list[_Request]:
        items: list[str | SequenceOf[int]] = [prompts] if isinstance(prompts, str) else [*prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(items)
        if len(params) != len(items):
            raise ValueError(f"params: {len(params)} of them for {len(items)} prompts")
        requests = []
        for prompt, own_params in zip(items, params, strict=True):
            if not isinstance(prompt, str) and not hasattr(prompt, "__len__"):
                raise ValueError(
                    f"prompts: must be texts or lists of token ids, one among them is {prompt!r}"
                )
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            requests.append(
                _Request(
                    f"llm-{next(self._request_ids)}",
                    ids,
                    own_params,
                    OutputProcessor(self.tokenizer, own_params, len(ids)),
                )
            )
        return requests

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
