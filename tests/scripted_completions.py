"""A server that answers completion requests with scripted bytes, and the bytes to answer with."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def completion(text: str, finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **fields}]})


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return event({"choices": [], "usage": counts})


def chunked(*parts: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def with_length(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


class ScriptedServer:
    """Answers /v1/completions with `reply(body)`, raw bytes; b"" closes the connection instead."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = self.most_open = self._open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reply(self, body: dict[str, Any]) -> bytes:
        n = body["max_tokens"]
        texts = [completion(f"{sum(body['prompt'])} ") for _ in range(n - 1)]
        ending = completion("z", "length"), usage(len(body["prompt"]), n), b"data: [DONE]\n\n"
        return chunked(*texts, *ending)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):  # /version
                    break
                self.num_connections += not counted
                counted = True
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self._open += 1
                self.most_open = max(self.most_open, self._open)
                body = json.loads(await reader.readexactly(int(size)))
                self.bodies.append(body)
                await asyncio.sleep(0)
                self._open -= 1
                answer = self.reply(body)
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
