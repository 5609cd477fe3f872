"""The engine's process and its asyncio client, over a ScriptedEngine in a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import EngineProcess
from deltaserve.engine.engine_request import EngineUnavailable, RequestRefused
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, RequestOutput

from .scripted_engine import CRASH, ROW_ERROR, Script, build_scripted_engine, output_id
from .server_process import DEADLINE_S, ROOT, is_alive, wait_until

PROMPT = [50, 60, 70]


def params(max_tokens: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@asynccontextmanager
async def running(script: Script, crash_dir: Path | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineProcess(script, build_scripted_engine, crash_dir))
    await engine.start()
    try:
        await asyncio.wait_for(engine.ready_or_dead.wait(), DEADLINE_S)
        yield engine
    finally:
        await engine.close()


async def collect(engine: AsyncEngine, request_id: str, max_tokens: int) -> list[RequestOutput]:
    return [o async for o in engine.generate(PROMPT, params(max_tokens), request_id)]


async def until(engine: AsyncEngine, **gauges: int) -> None:
    """Polls the engine until its stats have these values."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats = await engine.stats()
            if all(getattr(stats, name) == value for name, value in gauges.items()):
                return


async def test_outputs_arrive_in_order_with_one_finish() -> None:
    async with running(Script()) as engine:
        outputs = await asyncio.gather(*(collect(engine, str(n), 20 + n) for n in range(3)))
    for n, mine in enumerate(outputs):
        token_ids = [token_id for output in mine for token_id in output.token_ids]
        assert token_ids == [output_id(PROMPT, i) for i in range(20 + n)]
        assert [o.finish_reason for o in mine if o.finish_reason] == [FinishReason.LENGTH]
        assert mine[-1].finish_reason is not None


async def test_facts_and_stats_are_the_engines() -> None:
    async with running(Script(max_model_len=99)) as engine:
        assert engine.facts is not None and engine.facts.capacity.max_model_len == 99
        await collect(engine, "a", 7)
        stats = await engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (3, 7)
    assert stats.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


async def test_outputs_of_a_slow_reader_are_merged() -> None:
    async with running(Script()) as engine:
        request = await engine.add("slow", PROMPT, params(300))
        await until(engine, num_running=0, num_waiting=0)
        outputs = [output async for output in request]
    assert [len(output.token_ids) for output in outputs] == [300]
    assert outputs[0].finish_reason is FinishReason.LENGTH


async def test_a_request_that_can_never_run_is_refused() -> None:
    async with running(Script(max_model_len=64)) as engine:
        with pytest.raises(RequestRefused, match="limit 64") as caught:
            await engine.add("large", PROMPT, params(62))
        assert (caught.value.status, engine.num_open) == (400, 0)


async def test_a_full_queue_refuses_and_then_recovers() -> None:
    async with running(Script(step_s=0.01, max_running=1, max_queue=1)) as engine:
        first = await engine.add("first", PROMPT, params(500))
        await until(engine, num_running=1, num_waiting=0)
        second = await engine.add("second", PROMPT, params(500))
        with pytest.raises(RequestRefused) as caught:
            await engine.add("third", PROMPT, params())
        assert caught.value.status == 429
        second.close()
        first.close()
        assert (await collect(engine, "fourth", 2))[-1].finish_reason is FinishReason.LENGTH


async def test_leaving_the_iteration_aborts_in_every_state() -> None:
    async with running(Script(step_s=0.01, max_running=1)) as engine:
        decoding = await engine.add("decoding", PROMPT, params(500))
        queued = await engine.add("queued", PROMPT, params(500))
        await anext(decoding)
        waiting = asyncio.create_task(anext(queued))
        await until(engine, num_running=1, num_waiting=1)
        queued.close()
        await until(engine, num_running=1, num_waiting=0)
        decoding.close(FinishReason.STOP)
        await until(engine, num_running=0, num_waiting=0)
        stats = await engine.stats()
        assert stats.num_finished == {"stop": 1, "length": 0, "abort": 1, "error": 0}
        waiting.cancel()


async def test_cancelling_an_admission_aborts_it() -> None:
    async with running(Script(step_s=0.01)) as engine:
        adding = asyncio.create_task(engine.add("a", PROMPT, params(500)))
        while not engine.num_open:
            await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        await until(engine, num_running=0, num_waiting=0)
        assert engine.num_open == 0
        assert (await engine.stats()).num_finished["abort"] == 1


async def test_a_failed_row_ends_its_request_alone() -> None:
    async with running(Script()) as engine:
        request = await engine.add("bad", [ROW_ERROR], params())
        (output,) = [output async for output in request]
        assert (output.finish_reason, output.error) == (
            FinishReason.ERROR,
            "logits are not finite",
        )
        assert len(await collect(engine, "good", 3)) >= 1


async def test_an_exception_in_a_step_leaves_a_dump_and_fails_open_requests(
    tmp_path: Path,
) -> None:
    async with running(Script(step_s=0.01), tmp_path) as engine:
        other = await engine.add("other", PROMPT, params(500))
        await anext(other)
        crash = await engine.add("crash", [CRASH, 9], params(3))
        with pytest.raises(EngineUnavailable, match="RuntimeError: scripted failure"):
            await anext(crash)
        with pytest.raises(EngineUnavailable):
            [output async for output in other]
        assert engine.broken is not None
        with pytest.raises(EngineUnavailable):
            await engine.add("late", PROMPT, params())
        process = engine._process
    assert process.exit_code == 1
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dump = json.loads(path.read_text())
    requests = {request["request_id"]: request for request in dump["requests"]}
    assert requests["crash"]["prompt_ids"] == [CRASH, 9]
    assert requests["crash"]["params"]["max_tokens"] == 3
    assert requests["other"]["output_ids"][0] == output_id(PROMPT, 0)
    assert [step["prefills"][0]["request_id"] for step in dump["steps"]] == ["other", "crash"]
    assert dump["error"] == "RuntimeError: scripted failure"


async def test_a_killed_engine_fails_open_requests() -> None:
    async with running(Script(step_s=0.01)) as engine:
        request = await engine.add("a", PROMPT, params(500))
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="exit code -9"):
            [output async for output in request]
        with pytest.raises(EngineUnavailable):
            await engine.stats()


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 300.0), ("cuda", 30.0)])
async def test_the_device_that_was_found_sets_when_a_step_is_stuck(
    device: str, seconds: float
) -> None:
    async with running(Script(device_name=device)) as engine:
        assert engine.step_timeout == seconds


async def test_an_idle_engine_keeps_its_clock_fresh() -> None:
    async with running(Script()) as engine:
        await collect(engine, "a", 2)
        ended = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            while engine._heartbeat.last_step_time < ended or not engine._heartbeat.num_steps:
                await asyncio.sleep(0.01)
        assert not engine._heartbeat.has_work


async def test_a_failed_load_says_why() -> None:
    async with running(Script(load_error="weights.bin: truncated")) as engine:
        assert engine.facts is None
        assert engine.broken == "cannot load: weights.bin: truncated"
        process = engine._process
    assert process.exit_code == 1


async def test_a_config_that_cannot_be_followed_is_told_apart() -> None:
    message = "max_num_seqs: too many"
    async with running(Script(config_error=message)) as engine:
        assert engine.facts is None
        assert (engine.config_error, engine.broken) == (message, message)
    async with running(Script(load_error=message)) as engine:
        assert engine.config_error is None


async def test_loading_reports_its_stages() -> None:
    engine = AsyncEngine(EngineProcess(Script(load_s=0.3), build_scripted_engine))
    await engine.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while engine.loading.stage != "planning":
                await asyncio.sleep(0.01)
        assert (engine.loading.done, engine.loading.total) == (0, 2)
        assert engine.unavailable == "the model is loading: planning"
        with pytest.raises(EngineUnavailable, match="planning"):
            await engine.add("early", PROMPT, params())
    finally:
        await engine.close()


async def test_the_engine_leaves_signals_to_its_parent() -> None:
    """Ctrl-C reaches the whole group; the requests that the parent lets finish must finish."""
    async with running(Script(step_s=0.005)) as engine:
        request = await engine.add("a", PROMPT, params(50))
        await anext(request)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine._process.pid, number)
        outputs = [output async for output in request]
        assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_close_ends_the_process_and_removes_the_socket() -> None:
    async with running(Script()) as engine:
        pid = engine._process.pid
        directory = Path(engine._process.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert engine._process.exit_code == 0
    assert not is_alive(pid)
    assert not directory.exists()


ORPHAN = """
import asyncio, sys
from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import EngineProcess
from tests.scripted_engine import HANG, Script, build_scripted_engine
from deltaserve.engine.sampling_params import SamplingParams

async def main():
    engine = AsyncEngine(EngineProcess(Script(), build_scripted_engine))
    await engine.start()
    await engine.ready_or_dead.wait()
    await engine.add("stuck", [HANG], SamplingParams())
    print(engine._process.pid, engine._process.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent_even_when_it_is_stuck() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, address = parent.stdout.readline().split()
    assert is_alive(int(pid))
    parent.kill()
    parent.communicate()
    directory = Path(address.removeprefix("ipc://")).parent
    wait_until("engine gone", lambda: not is_alive(int(pid)) and not directory.exists())
