"""`deltaserve`: wrong values end in one line that says what to change, before a weight is read."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.server.cli import main

from .server_process import ROOT
from .tiny_checkpoint import tiny_hf_config


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory without weights: whatever gets as far as reading them would fail."""
    import json

    path = tmp_path_factory.mktemp("config_only")
    (path / "config.json").write_text(json.dumps(tiny_hf_config()))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, the one line on stderr)"""
    try:
        code = main(["serve", *arguments])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return code, line


WRONG = [
    ("--port", "99999", "from 0 to 65535"),
    ("--max-model-len", "many", "a number or auto"),
    ("--max-model-len", "1", "from 2 to"),
    ("--max-num-seqs", "0", "from 1 to"),
    ("--max-num-seqs", "x", "a number or auto"),
    ("--prefill-chunk", "100", "a multiple of 64"),
    ("--max-num-batched-tokens", "63", "a multiple of 64"),
    ("--block-size", "16", "a multiple of 64"),
    ("--max-queue", "0", "from 1 to"),
    ("--kv-cache-memory", "lots", "8G"),
    ("--max-body-bytes", "-5", "512M"),
    ("--shutdown-timeout", "-1", "seconds from 0"),
    ("--shutdown-timeout", "nan", "seconds from 0"),
    ("--seed", "-1", "from 0 to"),
    ("--device", "tpu", "invalid choice"),
    ("--dtype", "int4", "invalid choice"),
    ("--log-level", "loud", "invalid choice"),
    ("--no-such-flag", "1", "unrecognized arguments"),
]


@pytest.mark.parametrize(("flag", "value", "message"), WRONG, ids=[f"{w[0]}={w[1]}" for w in WRONG])
def test_a_wrong_value_names_its_flag(
    capsys: pytest.CaptureFixture[str], config_only: Path, flag: str, value: str, message: str
) -> None:
    code, line = run(capsys, "--model-path", str(config_only), f"{flag}={value}")
    assert code == 2
    assert flag in line and message in line


def test_a_path_without_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, line = run(capsys, "--model-path", str(tmp_path))
    assert code == 2
    assert "--model-path" in line and "config.json" in line


def test_a_model_that_cannot_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, line = run(capsys, "--model-path", str(tmp_path))
    assert code == 2
    assert "llama" in line


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], config_only: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, line = run(capsys, "--model-path", str(config_only), "--port", port)
    assert code == 2
    assert port in line and "choose another --port" in line


@pytest.mark.parametrize("host", ["999.1.1.1", "no-such-host.invalid"])
def test_a_host_that_is_none(
    capsys: pytest.CaptureFixture[str], config_only: Path, host: str
) -> None:
    code, line = run(capsys, "--model-path", str(config_only), "--host", host)
    assert code == 2
    assert host in line and "--host" in line


def test_version_and_help_import_nothing_heavy() -> None:
    """Which is what makes them quick; the time itself is not asserted."""
    script = (
        "import sys\n"
        "from deltaserve.server.cli import main\n"
        "for arguments in (['--version'], ['serve', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'zmq', 'msgspec', 'starlette', 'uvloop', 'tokenizers', 'asyncio'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--shutdown-timeout" in done.stdout
