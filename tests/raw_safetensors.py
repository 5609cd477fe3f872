"""A safetensors file as its header and its data, for tests that write wrong ones."""

from __future__ import annotations

import json
import struct
from typing import Any


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
