"""A server of OpenEnv's protocol, answering on `/ws` like openenv-core 0.3.0: guess the number."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from ports import free_port


def make_app(most_sessions: int = 8) -> FastAPI:
    """`app.state` counts `open` sessions and those that the client `closed`; odd actions make it misbehave."""
    app = FastAPI()
    app.state.open = app.state.closed = 0

    @app.websocket("/ws")
    async def session(client: WebSocket) -> None:
        await client.accept()
        if app.state.open >= most_sessions:
            await client.send_json(error("CAPACITY_REACHED", "no room"))
            await client.close()
            return
        app.state.open += 1
        number = 0
        try:
            while True:
                message = json.loads(await client.receive_text())
                if message["type"] == "close":
                    app.state.closed += 1
                    await client.close()
                    return
                data = message["data"]
                if message["type"] == "reset":
                    number = data.get("seed", 0) % 5
                    await client.send_json(observation("Guess."))
                elif set(data) != {"message"}:
                    missing = {"loc": ["message"], "msg": "Field required"}
                    await client.send_json(error("VALIDATION_ERROR", "Invalid message", errors=[missing]))
                elif data["message"] == "nonsense":
                    await client.send_text("<html>")
                elif data["message"] == "praise":
                    await client.send_json(observation("No.", "very good"))
                elif data["message"] == "raise":
                    await client.send_json(error("EXECUTION_ERROR", "it broke"))
                elif data["message"] == "end":
                    await client.close()
                    return
                else:
                    right = data["message"] == str(number)
                    await client.send_json(observation("Right." if right else "No.", float(right), right))
        except WebSocketDisconnect:
            pass
        finally:
            app.state.open -= 1

    return app


def observation(text: str, reward: Any = None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@contextlib.contextmanager
def serving(app: FastAPI, **settings: Any) -> Iterator[str]:
    """The address of a server of `app`, in a thread, with these settings of uvicorn."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "it does not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def core_serving(script: str | Path, *before: str) -> Iterator[str]:
    """The address of a server written with openenv-core, in a file of this folder, started with these arguments and a
    port."""
    server = subprocess.Popen([sys.executable, Path(__file__).parent / script, *before, str(port := free_port())])
    try:
        while not is_open(port):
            assert server.poll() is None, "it does not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def is_open(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0
