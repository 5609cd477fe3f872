"""The configuration file: TOML with the names of the flags, as the flags' own text form."""

from __future__ import annotations

import tomllib

from .flags import Parser, UsageError, switch_names


def read_config_file(path: str, parser: Parser) -> dict[str, object]:
    """Flag values by destination, parsed as on the command line. Raises UsageError.

    `max-num-seqs` and `max_num_seqs` are the same name; lists are for flags that repeat.
    """
    try:
        with open(path, "rb") as file:
            entries = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid TOML: {error}") from None
    switches = switch_names(parser)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    arguments = []
    seen = set()
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in actions or name == "config":
            raise UsageError(f"--config {path}: unknown name {key!r} (--help lists the flags)")
        if name in seen:  # TOML takes a name with - and one with _ for two
            raise UsageError(f"--config {path}: {key!r} is there twice")
        seen.add(name)
        flag = "--" + name.replace("_", "-")
        repeats = type(actions[name]).__name__ == "_AppendAction"
        values = value if isinstance(value, list) and repeats else [value]
        for item in values:
            arguments += _arguments(f"--config {path}: {key}", flag, item, name in switches)
    try:
        return vars(parser.parse_args(arguments))
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from None


def _arguments(where: str, flag: str, value: object, is_switch: bool) -> list[str]:
    if is_switch != isinstance(value, bool):
        wanted = "true or false" if is_switch else "a number or a string"
        raise UsageError(f"{where}: must be {wanted}, got {value!r}")
    if flag == "--dry-run":
        return [flag] if value else []
    if isinstance(value, bool):
        return [f"{flag}={str(value).lower()}"]
    if not isinstance(value, (int, float, str)):
        raise UsageError(f"{where}: must be a number or a string, got {value!r}")
    return [f"{flag}={value}"]
