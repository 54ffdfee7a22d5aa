"""Chat completions through a run's OpenAI API, recorded in sessions, against vLLM's own server on the same machine.

    python benchmarks/api.py [--model DIR] [--clients 32 --turns 3 --max-new 40] [--threads 1] [--rounds 4] [--stream]

Prints one JSON line: medians of requests/s and tokens/s of both, and the ratio of tokens/s (the aim: 0.9 or more). Each
client has its own conversation, whose later turns continue earlier ones: our server continues from the recorded tokens,
the peer renders and tokenises the whole conversation again. The same client code, in a third process, asks the two
servers alternately. Without `--model` a small model is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from trinity_core.rollout.inference.settings import EngineSettings

LONGEST = 1024
START_SECONDS = 300


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-new", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--stream", action="store_true", help="answers are streamed")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings(args: argparse.Namespace) -> EngineSettings:
    return EngineSettings(str(args.model), LONGEST, max_num_seqs=args.clients, threads=args.threads)


async def ours(args: argparse.Namespace) -> None:
    """Serve; each line of standard input, a number, opens that many sessions and closes those before."""
    import ray

    from trinity_core.rollout.inference.in_process import InProcessEngine
    from trinity_core.rollout.inference.pool import EnginePool
    from trinity_core.rollout.inference.remote import as_handle
    from trinity_core.rollout.openai_api.recorded_session import RecordedSession
    from trinity_core.rollout.openai_api.served_model import ServedModel
    from trinity_core.rollout.openai_api.server import ApiServer

    engine_settings = settings(args)
    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    options = {"num_cpus": 0, "max_concurrency": 1000, "runtime_env": {"env_vars": engine_settings.environment()}}
    pool = EnginePool(
        [as_handle(ray.remote(InProcessEngine).options(**options).remote(engine_settings))], str(args.model)
    )
    await pool.start()
    path, length = str(args.model), engine_settings.max_model_len
    server = ApiServer([ServedModel(("policy",), path, pool, length, sampling=(("temperature", 1.0),))])
    await server.start()
    sessions: list[RecordedSession] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        for session in sessions:
            server.close(session)
            session.sequences()
        sessions = [RecordedSession() for _ in range(int(line))]
        for session in sessions:
            server.open(session)
        print(json.dumps({"key": server.key, "urls": [server.base_url(one) for one in sessions]}), flush=True)
    server.stop()


class Ours:
    """A run's API with an engine in a process of its own, as in a run."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--ours", "--model", str(args.model), "--clients", str(args.clients)]
        self.process = subprocess.Popen(
            [*command, "--threads", str(args.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )

    def sessions(self, count: int) -> tuple[list[str], str, str]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"key"'):
                ready = json.loads(line)
                return ready["urls"], ready["key"], "policy"
        raise SystemExit("our server ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Peer:
    """vLLM's own server, with the engine settings of ours and vLLM's own processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.key = secrets.token_hex(8)
        environment = settings(args).environment()
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        flags = {
            "--max-model-len": str(LONGEST),
            "--max-num-seqs": str(args.clients),
            "--dtype": "float32",
            "--port": str(self.port),
            "--host": "127.0.0.1",
            "--block-size": "32",
            "--kv-cache-memory-bytes": str(1 << 28),
            "--served-model-name": "policy",
            "--generation-config": "vllm",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
        command += ["--enforce-eager"]
        command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
        self.process = subprocess.Popen(
            command + [part for pair in flags.items() for part in pair],
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment, "VLLM_API_KEY": self.key},
            start_new_session=True,
        )

    def wait(self) -> None:
        for _ in range(START_SECONDS):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1)
                return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit("vLLM's server ended") from None
                time.sleep(1)
        raise SystemExit("vLLM's server did not start")

    def sessions(self, count: int) -> tuple[list[str], str, str]:
        return [f"http://127.0.0.1:{self.port}/v1"] * count, self.key, "policy"

    def close(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


async def converse(http, url: str, key: str, name: str, number: int, args: argparse.Namespace) -> int:
    """One conversation; the tokens that were sampled."""
    messages = [{"role": "user", "content": f"Mia has {number} apples and buys 3. How many has she?"}]
    tokens = 0
    for turn in range(args.turns):
        body = {"model": name, "messages": messages, "max_tokens": args.max_new, "ignore_eos": True, "seed": turn}
        if args.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.post(
            f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as response:
            response.raise_for_status()
            text = ""
            if args.stream:
                async for raw in response.content:
                    if raw.startswith(b"data: {"):
                        chunk = json.loads(raw[6:])
                        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                        tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
            else:
                body = await response.json()
                text = body["choices"][0]["message"]["content"]
                tokens += body["usage"]["completion_tokens"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    return tokens


async def round_of(args: argparse.Namespace, sessions: tuple[list[str], str, str]) -> tuple[float, float]:
    """Requests/s and tokens/s."""
    import aiohttp

    urls, key, name = sessions
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        tokens = await asyncio.gather(
            *(converse(http, url, key, name, number, args) for number, url in enumerate(urls))
        )
        seconds = time.perf_counter() - began
    return args.clients * args.turns / seconds, sum(tokens) / seconds


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with both servers
    if args.model is None:
        from trinity_core.data.tiny import make_tiny

        args.model = make_tiny(Path(tempfile.mkdtemp())).model
    if args.ours:
        asyncio.run(ours(args))
        return
    mine = Ours(args)
    peer = Peer(args)
    pairs = []
    try:
        peer.wait()
        for number in range(args.rounds + 1):
            pair = [asyncio.run(round_of(args, side.sessions(args.clients))) for side in (mine, peer)]
            if number:
                pairs.append(pair)
    finally:
        mine.close()
        peer.close()
    requests, tokens = ([[side[what] for side in pair] for pair in pairs] for what in (0, 1))
    median = statistics.median
    print(json.dumps({
        "clients": args.clients,
        "turns": args.turns,
        "max_new": args.max_new,
        "stream": args.stream,
        "ours_requests_per_second": round(median(a for a, _ in requests), 1),
        "vllm_requests_per_second": round(median(b for _, b in requests), 1),
        "ours_tokens_per_second": round(median(a for a, _ in tokens)),
        "vllm_tokens_per_second": round(median(b for _, b in tokens)),
        "ratio": round(median(a / b for a, b in tokens), 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
