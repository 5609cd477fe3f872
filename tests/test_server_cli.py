"""`deltaserve`: wrong values end in one line that says what to change, before a weight is read."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.engine.config import EngineConfig
from deltaserve.engine.ops.cuda.detect import has_usable_gpu
from deltaserve.server.cli import main
from deltaserve.server.config_file import read_config_file
from deltaserve.server.flags import command_parser
from deltaserve.server.options import ServerOptions

from .server_process import ROOT
from .tiny_checkpoint import tiny_hf_config, write_tokenizer


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
    ("--max-model-len", "9999999", "is over the model's"),
    ("--max-num-seqs", "0", "from 1 to"),
    ("--max-num-seqs", "x", "a number or auto"),
    ("--prefill-chunk", "100", "a multiple of 64"),
    ("--max-num-batched-tokens", "63", "a multiple of 64"),
    ("--block-size", "16", "a multiple of 64"),
    ("--max-queue", "0", "from 1 to"),
    ("--kv-cache-memory", "lots", "8G"),
    ("--max-body-bytes", "-5", "512M"),
    ("--max-body-bytes", "0", "at least 1"),
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


CONFIG_FILES = [
    ("port = 99999", "--port", "from 0 to 65535"),
    ('port = "x"', "--port", "from 0 to 65535"),
    ("max-num-seqs = 0", "--max-num-seqs", "from 1 to"),
    ("max_num_seqs = 2.5", "--max-num-seqs", "a number or auto"),
    ("cuda-graph = 1", "cuda-graph", "true or false"),
    ('host = ["a"]', "host", "a number or a string"),
    ("prot = 1", "'prot'", "unknown name"),
    ("max-queue = 1\nmax_queue = 2", "'max_queue'", "twice"),
    ('config = "other.toml"', "'config'", "unknown name"),
    ("[server]\nport = 1", "'server'", "unknown name"),
    ("port = ", "not valid TOML", "Invalid value"),
    ('api-key = ["ok", 5.5, ""]', "--api-key", "must not be empty"),
]


@pytest.mark.parametrize(
    ("text", "name", "message"), CONFIG_FILES, ids=[case[0] for case in CONFIG_FILES]
)
def test_a_wrong_value_in_a_file_is_named(
    capsys: pytest.CaptureFixture[str],
    config_only: Path,
    tmp_path: Path,
    text: str,
    name: str,
    message: str,
) -> None:
    file = tmp_path / "deltaserve.toml"
    file.write_text(text)
    code, line = run(capsys, "--model-path", str(config_only), f"--config={file}")
    assert code == 2
    assert name in line and message in line


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = run(capsys, "--config=/nowhere.toml")
    assert code == 2
    assert "--config /nowhere.toml: No such file" in line


def test_flags_win_over_the_file_and_lists_repeat(tmp_path: Path) -> None:
    file = tmp_path / "deltaserve.toml"
    file.write_text(
        'model-path = "from-file"\nport = 1\nmax_queue = 7\ncuda-graph = false\n'
        'served-model-name = ["a", "b"]\napi-key = "one"\nmax-body-bytes = "2M"\n'
    )
    parser, serve = command_parser()
    given = vars(parser.parse_args(["serve", f"--config={file}", "--port=2", "--api-key=two"]))
    values = {**read_config_file(str(file), serve), **given}
    assert values["model_path"] == "from-file"
    assert (values["port"], values["max_queue"], values["cuda_graph"]) == (2, 7, False)
    assert values["served_model_name"] == ["a", "b"]
    assert values["api_key"] == ["two"]
    assert values["max_body_bytes"] == 2 << 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--cuda-graph"], True),
        (["--cuda-graph=true"], True),
        (["--cuda-graph=false"], False),
        (["--no-cuda-graph"], False),
        (["--no-cuda-graph", "--cuda-graph"], True),
    ],
    ids=str,
)
def test_switches(arguments: list[str], expected: bool | None) -> None:
    parser, _ = command_parser()
    assert vars(parser.parse_args(["serve", *arguments])).get("cuda_graph") is expected


TOGETHER = [
    (["--kv-cache-memory=1G", "--gpu-memory-utilization=0.5"], "give one of them"),
    (["--uds=/tmp/x", "--port=1"], "give one or the other"),
    (["--ssl-keyfile=key.pem"], "needs --ssl-certfile"),
    (["--ssl-certfile=/nowhere.pem"], "no certificate and key"),
    (["--api-key="], "must not be empty"),
    (["--api-key=with space"], "printable ASCII"),
    (["--api-key-file=/nowhere"], "--api-key-file /nowhere"),
    (["--cors-origin=example.com"], "as https://example.com"),
    (["--cors-origin=https://example.com/path"], "as https://example.com"),
    (["--chat-template=/nowhere"], "there is no file /nowhere"),
    (["--api-workers=0"], "from 1 to 64"),
    (["--served-model-name="], "must not be empty"),
    (["--gpu-memory-utilization=1.5"], "in (0, 1]"),
    (["--cuda-graph=maybe"], "must be true or false"),
    (["--snapshot-interval=100"], "a multiple of 64"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), TOGETHER, ids=[str(case[0]) for case in TOGETHER]
)
def test_values_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], config_only: Path, arguments: list[str], message: str
) -> None:
    code, line = run(capsys, "--model-path", str(config_only), *arguments)
    assert code == 2
    assert message in line


def test_the_model_path_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = run(capsys)
    assert code == 2
    assert "--model-path is required" in line


def test_an_empty_key_in_the_environment_opens_nothing(
    capsys: pytest.CaptureFixture[str], config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset secret would otherwise serve everybody."""
    monkeypatch.setenv("DELTASERVE_API_KEY", "")
    code, line = run(capsys, "--model-path", str(config_only))
    assert code == 2
    assert "DELTASERVE_API_KEY" in line


def test_every_flag_of_the_contract_is_there() -> None:
    names = (
        "model-path served-model-name host port uds device device-ordinal dtype max-model-len "
        "max-num-seqs max-num-batched-tokens prefill-chunk gpu-memory-utilization kv-cache-memory "
        "block-size snapshot-memory snapshot-interval dry-run cuda-graph no-cuda-graph "
        "enable-prefix-caching no-enable-prefix-caching api-key ssl-certfile ssl-keyfile "
        "cors-origin max-queue max-body-bytes request-timeout api-workers log-level log-format "
        "generation-config chat-template seed enable-profiling shutdown-timeout config"
    )
    _, serve = command_parser()
    known = {option for action in serve._actions for option in action.option_strings}
    assert {f"--{name}" for name in names.split()} <= known


def test_every_engine_option_and_server_option_has_a_flag() -> None:
    """Under its own name or one of these; so that none is forgotten."""
    other = {
        "tls_certificate": "ssl_certfile",
        "tls_key": "ssl_keyfile",
        "num_workers": "api_workers",
        "served_names": "served_model_name",
        "api_keys": "api_key",
        "cors_origins": "cors_origin",
    }
    without = {"receive_timeout", "step_timeout"}
    _, serve = command_parser()
    known = {action.dest for action in serve._actions}
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerOptions)]
    names = {other.get(field.name, field.name) for field in fields} - without
    assert names <= known


def test_a_dry_run_prints_the_plan_and_reads_no_weights(
    capsys: pytest.CaptureFixture[str], config_only: Path
) -> None:
    assert main(["serve", f"--model-path={config_only}", "--device=cpu", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "weights" in output and "KV blocks" in output and "sequences at once" in output


UNFOLLOWED = [
    (["--device=cpu", "--kv-cache-memory=1"], "--kv-cache-memory: must be at least"),
    (["--device=cpu", "--snapshot-memory=900000G"], "memory: too small"),
    pytest.param(
        ["--device=cuda"],
        "--device: cuda needs CuPy",
        marks=pytest.mark.skipif(has_usable_gpu(), reason="there is a GPU"),
    ),
]


@pytest.mark.parametrize(("flags", "message"), UNFOLLOWED, ids=str)
def test_a_dry_run_of_what_cannot_be_followed(
    capsys: pytest.CaptureFixture[str], config_only: Path, flags: list[str], message: str
) -> None:
    code, line = run(capsys, f"--model-path={config_only}", "--dry-run", *flags)
    assert code == 2
    assert line.startswith(f"deltaserve: error: {message}")


@pytest.mark.parametrize(("flags", "message"), UNFOLLOWED, ids=str)
def test_a_server_of_what_cannot_be_followed(
    config_only: Path, flags: list[str], message: str
) -> None:
    """Found in the engine's process; there are no weights that could be read before."""
    write_tokenizer(config_only)
    command = [sys.executable, "-m", "deltaserve.server.cli", "serve", "--port=0", *flags]
    done = subprocess.run(
        [*command, f"--model-path={config_only}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if " INFO " not in line)
    assert f" ERROR {message}" in line
