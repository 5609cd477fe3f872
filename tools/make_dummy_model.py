"""Writes a checkpoint folder of a true size without weights, for `--load-format dummy`.

    python -m tools.make_dummy_model --size 4B models/dummy-4B
    deltaserve serve --model-path models/dummy-4B --load-format dummy

The config is that of the size. The tokenizer has as many tokens as the real one, made up: the 256
bytes, then words and characters that only a model can produce, since no merge leads to them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tools.model_shapes import SIZES, hf_text_config

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "\u0120"  # a byte-level vocabulary's stand-in for a space


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary (GPT-2's convention)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def made_up_tokens(count: int) -> list[str]:
    """Distinct: words, half of them after a space, and every eighth a character of three bytes."""
    bytes_ = byte_characters()
    tokens = []
    for index in range(count):
        if index % 8 == 0 and index // 8 < 20000:
            tokens.append("".join(bytes_[b] for b in chr(0x4E00 + index // 8).encode()))
            continue
        letters, rest = "", index + 26
        while rest:
            rest, letter = divmod(rest, 26)
            letters += _LETTERS[letter]
        tokens.append((_SPACE if index % 2 else "") + letters + "x")
    return tokens


def tokenizer_json(num_tokens: int) -> dict[str, Any]:
    """`num_tokens` ids, and SPECIALS behind them."""
    byte_tokens = byte_characters()
    tokens = byte_tokens + made_up_tokens(num_tokens - len(byte_tokens))
    assert len(set(tokens)) == num_tokens
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": num_tokens + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(SPECIALS)
        ],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }


def write_dummy_model(folder: Path, size: str) -> None:
    config = hf_text_config(size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = tokenizer_json(config["eos_token_id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="4B")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    if next(args.folder.glob("*.safetensors"), None) is not None:
        parser.error(f"{args.folder} has weights, and a config.json that they need")
    write_dummy_model(args.folder, args.size)
    print(args.folder)


if __name__ == "__main__":
    main()
