"""Generation in a rollout step against a bare `LLM.generate` of the same vLLM, in turn, on the same prompts.

    python benchmarks/generation.py [--model DIR --data FILE] [--tasks 16 --repeats 8 --max-new 40] [--threads 2]
        [--rounds 10] [--block 128] [--spin 60000] [--no-ray]

Prints one JSON line: medians of tokens/s of both, and their ratio (the aim: at least 0.8). Our side includes everything
between a workflow's question and its answer: chat template, tokens, the call to the engine's process, sampling with a
seed for each answer, log-probs, decoding, experiences. The peer gets token ids and returns only text (`LLM.generate`
with vLLM's own defaults). Without `--model`, a small model and its data are made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from trinity_core.rollout.inference.settings import EngineSettings


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=int)
    parser.add_argument("--spin", type=int, default=0, help="turns that idle OpenMP threads spin; a run has none")
    parser.add_argument("--no-ray", action="store_true", help="the engine in this process")
    return parser.parse_args()


def questions(path: Path, count: int) -> list[str]:
    with path.open() as file:
        return [json.loads(line)["question"] for _, line in zip(range(count), file, strict=False)]


def prompts(args: argparse.Namespace) -> list[list[int]]:
    from trinity_core.data.chat import ChatEncoder
    from trinity_core.data.tokenizer import load_tokenizer

    encoder = ChatEncoder(load_tokenizer(str(args.model), False))
    return [encoder.prompt([{"role": "user", "content": q}]).tokens for q in questions(args.data, args.tasks)]


@cache
def bare(model: Path) -> Any:
    """vLLM as it comes, with all defaults of its own but the memory for its cache."""
    from vllm import LLM

    made = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    return LLM(str(model), dtype="float32", max_model_len=512, disable_log_stats=True, **made)


def bare_round(args: argparse.Namespace, number: int) -> float:
    """Tokens/s of a round of `LLM.generate`."""
    from vllm import SamplingParams

    llm, prompt_tokens = bare(args.model), [{"prompt_token_ids": tokens} for tokens in prompts(args)]
    sampling = SamplingParams(n=args.repeats, max_tokens=args.max_new, seed=number)
    began = time.perf_counter()
    outputs = llm.generate(prompt_tokens, sampling, use_tqdm=False)
    return sum(len(o.token_ids) for output in outputs for o in output.outputs) / (time.perf_counter() - began)


async def ours(args: argparse.Namespace, settings: EngineSettings, other: Executor) -> list[tuple[float, float]]:
    """Pairs of tokens/s: ours, the peer's."""
    from trinity_core.data.chat import ChatEncoder
    from trinity_core.data.tokenizer import load_tokenizer, stop_tokens
    from trinity_core.rollout.inference.engine_model import EngineModel, Limits
    from trinity_core.rollout.inference.pool import EnginePool
    from trinity_core.rollout.inference.remote import as_handle
    from trinity_core.rollout.inference.requests import Sampling

    pool = EnginePool([as_handle(_engine(settings, args))], str(args.model))
    await pool.start()
    encoder = ChatEncoder(load_tokenizer(str(args.model), False))
    stops = stop_tokens(str(args.model), encoder)
    limits = Limits(512, None, args.max_new, Sampling(args.max_new, stop_token_ids=stops))
    model = EngineModel(pool, encoder, limits)
    asked = questions(args.data, args.tasks)
    pairs = []
    for number in range(args.rounds + 2):
        seeds = [[number * 100_000 + i * args.repeats + k for k in range(args.repeats)] for i in range(len(asked))]
        began, before = time.perf_counter(), pool.tokens
        groups = await asyncio.gather(
            *(
                model.chat([{"role": "user", "content": q}], n=args.repeats, seeds=s)
                for q, s in zip(asked, seeds, strict=True)
            )
        )
        for group in groups:
            for answer in group:
                answer.experience(reward=0.0)
        mine = (pool.tokens - before) / (time.perf_counter() - began)
        theirs = other.submit(bare_round, args, number).result()
        if number >= 2:
            pairs.append((mine, theirs))
    await pool.stop()
    return pairs


def _engine(settings: EngineSettings, args: argparse.Namespace) -> object:
    from trinity_core.rollout.inference.in_process import InProcessEngine

    if args.no_ray:
        return InProcessEngine(settings)
    import ray

    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    env = settings.environment() | {"GOMP_SPINCOUNT": str(args.spin)}
    options = {"num_cpus": 0, "max_concurrency": 1000, "runtime_env": {"env_vars": env}}
    return ray.remote(InProcessEngine).options(**options).remote(settings)


def main() -> None:
    args = arguments()
    if args.model is None:
        from trinity_core.data.tiny import make_tiny

        made = make_tiny(Path(tempfile.mkdtemp()))
        args.model, args.data = made.model, made.data / "train.jsonl"
    settings = EngineSettings(
        str(args.model),
        512,
        max_num_seqs=args.tasks * args.repeats,
        threads=args.threads,
        block_size=args.block,
    )
    spinning = {"GOMP_SPINCOUNT": str(args.spin)}
    # The peer in one process, asleep while ours runs, with the same threads, spinning no longer.
    environment = {"OMP_NUM_THREADS": str(args.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | spinning
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        with mock.patch.dict(os.environ, environment | {"VLLM_LOGGING_LEVEL": "ERROR"}):
            other.submit(bare_round, args, 0).result()
        if args.no_ray:
            os.environ.update(settings.environment() | spinning)
        pairs = asyncio.run(ours(args, settings, other))
    mine, peers = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    rollouts = args.tasks * args.repeats
    print(json.dumps({
        "rollouts": rollouts,
        "max_new": args.max_new,
        "threads": args.threads,
        "ours_tokens_per_second": round(mine),
        "bare_tokens_per_second": round(peers),
        "ratio": round(ratio, 3),
    }))  # fmt: skip
    os._exit(0)  # vLLM's threads in this process do not end by themselves


if __name__ == "__main__":
    main()
