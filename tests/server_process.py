"""A server in its own process for tests: started, watched, ended; and polling with a deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0

T = TypeVar("T")


def wait_until(what: str, condition: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Polls until `condition` gives something true, and returns it."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Zombies are dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class ServerProcess:
    """`arguments` after `python -m`; the port is read from the log. Log lines go to `log_path`.

    In a process group of its own, as a shell would start it, with a temporary directory of its own.
    """

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self.log_path = directory / "server.log"
        self.temporary = directory / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "OPENBLAS_NUM_THREADS": "1",
        }
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        address = wait_until("listening", lambda: self._find(r"listening on (\S+),"))
        self.port = int(address.rpartition(":")[2]) if "://" in address else 0
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def _find(self, pattern: str) -> str:
        assert self.process.poll() is None, self.log()
        match = re.search(pattern, self.log())
        return match[1] if match else ""

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> ServerProcess:
        wait_until("ready", lambda: self.client.get("/ready").status_code == 200)
        return self

    @property
    def engine_pid(self) -> int:
        """The child that runs the engine; the other is multiprocessing's resource tracker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"spawn_main" in command:
                return pid
        raise AssertionError("no engine process")

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=fields)

    def metrics(self) -> dict[str, float]:
        """Name (with `:` and the finished reason or status, if it has one) -> value."""
        values: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("#") or "_bucket{" in line:
                continue
            name, _, value = line.rpartition(" ")
            reason = re.search(r'(?:finished_reason|status)="(\w+)"', name)
            name = name.partition("{")[0] + (f":{reason[1]}" if reason else "")
            values[name] = float(value)
        return values

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no slot or block is in use."""
        values = self.metrics()
        return not any(
            values[name]
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "deltaserve:state_slots_in_use",
            )
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        """For fixtures: ends it whatever state it is in."""
        self.client.close()
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def start_scripted(directory: Path, **script: Any) -> ServerProcess:
    """A server over a ScriptedEngine, with the tests' tokenizer."""
    from .tiny_checkpoint import write_tokenizer

    write_tokenizer(directory)
    path = directory / "script.json"
    path.write_text(json.dumps(script))
    return ServerProcess(["tests.scripted_server", str(directory), str(path)], directory)
