"""Runs a request of a crash dump again: the same tokens, or the first that differs.

    python -m tools.replay FILE                   what the dump holds
    python -m tools.replay FILE --request ID      the request again, with the engine's settings

A request's tokens depend on its prompt, parameters and seed alone, so it runs by itself. Exits
with 0 if the ids that the dump recorded come out again, 1 if another does or the engine fails, 2 if
the request cannot be run.
Stop strings are not looked for: the run goes on to max_tokens or an end id.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from deltaserve.engine.config import EngineConfig
from deltaserve.engine.crash_dump import FORMAT
from deltaserve.engine.grammar import Grammar
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams

# Capacity fields that are EngineConfig's too; the dump's plan made them concrete.
_PLANNED = ("max_model_len", "max_num_batched_tokens", "prefill_chunk", "block_size")


def read_dump(path: Path) -> dict[str, Any]:
    """Raises ValueError for what is no dump of this format."""
    try:
        dump = json.loads(path.read_text())
        found = dump["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a crash dump: {error}") from None
    if found != FORMAT:
        raise ValueError(f"{path}: a dump of format {found}, this reads {FORMAT}")
    return dict(dump)


def engine_config(dump: dict[str, Any], **changes: Any) -> EngineConfig:
    """The engine's settings, with what its memory plan chose in the place of "auto"."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    values = {name: value for name, value in dump["config"].items() if name in names}
    values |= {name: dump["capacity"][name] for name in _PLANNED}
    values["max_num_seqs"] = dump["capacity"]["num_state_slots"]
    return EngineConfig(**{**values, **changes})


def sampling_params(request: dict[str, Any]) -> SamplingParams:
    """With the seed that was drawn for the request, if it brought none."""
    params = {name: _tuples(value) for name, value in request["params"].items()}
    if params.get("grammar") is not None:
        grammar = {name: _tuples(value) for name, value in params["grammar"].items()}
        params["grammar"] = Grammar(**grammar)
    return SamplingParams(**{**params, "seed": request["seed"]})


def submit(engine: LLMEngine, request: dict[str, Any], max_tokens: int | None) -> None:
    """Raises ValueError for what cannot run. Of `min_tokens` what `max_tokens` leaves: the ids
    until then are the same."""
    params = sampling_params(request)
    if max_tokens is not None:
        min_tokens = max(0, min(params.min_tokens, max_tokens))
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)
    engine.add_request(request["request_id"], request["prompt_ids"], params)


def run(engine: LLMEngine) -> list[int]:
    """The ids that come out now. Raises what a step raises."""
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
            if output.error is not None:
                print(f"ends with an error: {output.error}")
    return ids


def describe(dump: dict[str, Any]) -> str:
    lines = [dump["error"], "", *"".join(dump["traceback"]).rstrip().splitlines(), "", "requests"]
    for request in dump["requests"]:
        lines.append(
            f"  {request['request_id']}: {request['status']}, {len(request['prompt_ids'])} prompt "
            f"tokens, {len(request['output_ids'])} output tokens read, "
            f"{request['num_preemptions']} preemptions"
        )
    lines += ["", "last steps, the newest is the last"]
    for step in dump["steps"]:
        prefills = [f"{row['request_id']}[{row['start']}:{row['end']}]" for row in step["prefills"]]
        lines.append(f"  {len(step['decodes'])} decode rows; prompts {' '.join(prefills) or '-'}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--request", metavar="ID")
    parser.add_argument("--model-path", help="where the checkpoint lies now")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"))
    parser.add_argument(
        "--max-num-seqs", type=int, help="fewer than the engine had, to save memory"
    )
    parser.add_argument("--max-tokens", type=int, help="fewer or more than the request wanted")
    args = parser.parse_args(arguments)
    try:
        dump = read_dump(args.file)
        if args.request is None:
            print(describe(dump))
            return 0
        requests = {request["request_id"]: request for request in dump["requests"]}
        if args.request not in requests:
            raise ValueError(f"the dump has no request {args.request!r}: {', '.join(requests)}")
        changes = {name: getattr(args, name) for name in ("model_path", "device", "max_num_seqs")}
        changes = {name: value for name, value in changes.items() if value is not None}
        request = requests[args.request]
        engine = LLMEngine(engine_config(dump, **changes))
        submit(engine, request, args.max_tokens)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    try:
        ids = run(engine)
    except Exception as error:
        print(f"the engine fails again: {type(error).__name__}: {error}")
        return 1
    engine.close()
    return _compare(ids, request["output_ids"])


def _compare(ids: list[int], recorded: list[int]) -> int:
    print(f"ids: {ids}")
    for index, (now, then) in enumerate(zip(ids, recorded, strict=False)):
        if now != then:
            print(f"output token {index} is {now} now and was {then}")
            return 1
    if len(ids) < len(recorded):
        print(f"{len(recorded)} ids were recorded; the first {len(ids)} came out again")
    else:
        print(
            f"all {len(recorded)} recorded ids came out again, and {len(ids) - len(recorded)} more"
        )
    return 0


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
