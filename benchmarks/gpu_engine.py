"""The parts of `gpu.py` with engines: what vLLM and our code around it do on a GPU.

Each prints a JSON line for everything that it has seen, so that a call that is killed has shown the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import EAGER, GIB, HOW, ROOT, NotHere, Result, Scale, config_for, make_model

RANK, ADAPTED = 8, "o_proj"
MANY = (256, 1024)
"""Sequences at once, of which the tokens a second are measured."""
COMPARED = 16
"""Samples whose log-probs are compared with the trainer's."""


def tell(**seen: Any) -> Result:
    print(json.dumps(seen, default=str), flush=True)
    return seen


def part_engine(scale: Scale) -> Result:
    """An engine with full weights, fed by a trainer in this process; then one with an adapter."""
    model, out = make_model(scale), {}
    with tempfile.TemporaryDirectory() as folder:
        out |= asyncio.run(full_weights(scale, model, folder))
        out |= asyncio.run(an_adapter(scale, model, folder))
    return out


async def full_weights(scale: Scale, model: str, folder: str) -> Result:
    """Start, load from shared memory with its check, same tokens for the same seed, log-probs against the trainer's
    forward, tokens a second, and the same again after a sleep."""
    from trinity_core.exchange.sync.versions import open_versions
    from trinity_core.rollout.inference.requests import WeightSource
    from trinity_core.training.publish import make_weight_check, policy_weights, trainer_rank

    out = tell(free_gib=free(scale))
    engine = engine_of(scale, model, gpu_memory_utilization=0.3)
    out |= tell(start_s=await engine.start(), free_asleep_gib=free(scale))
    config = config_for(scale, model, folder, *HOW["whole_checkpointing"], EAGER)
    learner = trainer(scale, config)
    rank = trainer_rank(policy_weights(config, learner), learner.ranks, lambda version: True, lambda: False)
    versions, began = open_versions("memory", Path(folder)), time.perf_counter()
    try:
        versions.publisher(config, rank).publish(1, make_weight_check(learner, min(48, sum(scale.rows[2:]) - 1)))
        out |= tell(publish_s=time.perf_counter() - began)
        source = WeightSource("memory", folder)
        before = await a_turn(engine, scale, source)
        out |= {name: number for name, number in before.items() if name != "greedy"}
        samples, seeded = await sampled(engine, scale), await sampled(engine, scale)
        out |= tell(same_seed_same_tokens=same(samples, seeded), **gaps(scale, learner, samples))
        for number in MANY[: 1 if scale.tiny else None]:
            began = time.perf_counter()
            tokens = sum(len(sample.tokens) for sample in await sampled(engine, scale, number))
            out |= tell(**{f"tokens_s_{number}": tokens / (time.perf_counter() - began)})
        began = time.perf_counter()
        await engine.sleep()
        out |= tell(sleep_s=time.perf_counter() - began, free_asleep_again_gib=free(scale))
        after = await a_turn(engine, scale, source, before["greedy"])
        out |= tell(same_greedy_after_sleep=after["same_greedy"])
    finally:
        versions.remove()
    await engine.stop()
    return out


async def an_adapter(scale: Scale, model: str, folder: str) -> Result:
    """An adapter is loaded, and again after a sleep that keeps the base."""
    from trinity_core.exchange.sync.versions import open_versions
    from trinity_core.rollout.inference.requests import WeightSource

    open_versions("checkpoint", Path(folder)).publish(1, adapter_for(model))
    lora = {"lora_rank": RANK, "lora_modules": (ADAPTED,)}
    engine = engine_of(scale, model, gpu_memory_utilization=0.3, enforce_eager=True, **lora)
    out = tell(lora_start_s=await engine.start(), lora_free_asleep_gib=free(scale))
    first = await a_turn(engine, scale, WeightSource("checkpoint", folder))
    await engine.sleep()
    again = await a_turn(engine, scale, WeightSource("checkpoint", folder), first["greedy"])
    await engine.stop()
    return out | tell(lora_load_s=first["load_s"], lora_same_after_sleep=again["same_greedy"])


async def a_turn(engine: Any, scale: Scale, source: Any, before: Sequence[list[int]] = ()) -> Result:
    """Wake, load version 1, and answer greedily; `same_greedy` is the share of tokens as in `before`."""
    began = time.perf_counter()
    await engine.wake()
    out = tell(wake_s=time.perf_counter() - began, free_awake_gib=free(scale))
    report = await engine.load(source, 1)
    out |= tell(load_s=report.seconds, check_s=report.check_seconds, check_gap=report.gap)
    answers = [sample.tokens.tolist() for sample in await sampled(engine, scale, 8, temperature=0.0)]
    pairs = [a == b for now, then in zip(answers, before, strict=False) for a, b in zip(now, then, strict=True)]
    return out | {"greedy": answers, "same_greedy": float(np.mean(pairs)) if pairs else None}


async def sampled(engine: Any, scale: Scale, number: int = 32, temperature: float = 1.0) -> list[Any]:
    """Answers of full length: eight for each random prompt, with the same seeds in each call."""
    from trinity_core.rollout.inference.requests import Request, Sampling

    after = scale.rows[3]
    sampling = Sampling(max_tokens=after, min_tokens=after, temperature=temperature)
    key = time.monotonic_ns()
    requests = [Request(f"{key}/{i}", prompt_of(scale, i), sampling, i) for i in range(number)]
    return list((await engine.generate(requests)).unpack())


def prompt_of(scale: Scale, number: int) -> np.ndarray:
    """Return the prompt of a sample; eight have the same."""
    return np.random.default_rng(number // 8).integers(5, 90, scale.rows[2], dtype=np.int32)


def same(some: Sequence[Any], others: Sequence[Any]) -> float:
    return float(np.mean([np.array_equal(a.tokens, b.tokens) for a, b in zip(some, others, strict=True)]))


def gaps(scale: Scale, learner: Any, samples: Sequence[Any]) -> Result:
    """Differences of the samples' log-probs from those of the trainer's forward, nats."""
    from trinity_core.data.experience import Experience
    from trinity_core.training.micro import build_micro

    differences = []
    for number, sample in enumerate(samples[:COMPARED]):
        prompt, answer = prompt_of(scale, number), np.ones(len(sample.tokens), np.bool_)
        tokens = np.concatenate([prompt, sample.tokens])
        row = Experience(tokens=tokens, prompt_length=len(prompt), action_mask=answer)
        micro = build_micro([row], [0], len(answer), learner.cut.packing).to(learner.ranks.device)
        with torch.no_grad():
            logprobs, _ = learner.engine(micro, 1.0, False)
        differences.append(np.abs(logprobs.float().cpu().numpy() - sample.logprobs))
    every = np.concatenate(differences)
    return {"logprob_gap_mean": float(every.mean()), "logprob_gap_max": float(every.max())}


def trainer(scale: Scale, config: Any) -> Any:
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner

    return Learner(config, 4, join(0, 1, *meeting_point(), use_gpu=scale.device.type == "cuda"))


def adapter_for(model: str) -> list[tuple[str, torch.Tensor]]:
    """Random matrices A and B for one matrix of each layer of the model in a folder."""
    from trinity_core.exchange.checkpoints.adapters import A, B
    from trinity_core.training.policy import load_causal_lm

    tensors = []
    for name, module in load_causal_lm(model, torch.bfloat16, reads=False).named_modules():
        if name.endswith(ADAPTED):
            out, into = module.weight.shape
            tensors += [(name + A, torch.randn(RANK, into) * into**-0.5), (name + B, torch.randn(out, RANK) * 0.1)]
    return tensors


def engine_of(scale: Scale, model: str, **settings: Any) -> Any:
    """An engine that sleeps between turns."""
    from trinity_core.rollout.inference.remote import engine_class
    from trinity_core.rollout.inference.settings import EngineSettings

    on_gpu = scale.device.type == "cuda"
    settings = {"sleeps": True, "kv_cache_gib": None if on_gpu else 0.1, **settings}
    made = EngineSettings(model, sum(scale.rows[2:]), on_gpu, max_num_seqs=None if on_gpu else 64, **settings)
    os.environ.update(made.environment())
    return engine_class(made)(made)


def free(scale: Scale) -> float:
    """GiB of the GPU that nobody holds."""
    return torch.cuda.mem_get_info()[0] / GIB if scale.device.type == "cuda" else 0.0


def command(config: str, name: str, folder: str, *overrides: str) -> list[str]:
    """A user's command for a run whose job is `folder`/Trinity-Flows/`name`."""
    module = [sys.executable, "-m", "trinity_core.run", "--config", f"configs/{config}.yaml"]
    return [*module, f"name={name}", f"checkpoint_root_dir={folder}", "monitor.monitor_type=tensorboard", *overrides]


def part_one_gpu(scale: Scale) -> Result:
    """Two steps of configs/gsm8k/one_gpu.yaml as on 24 GB."""
    return on_small_gpu(scale, "gsm8k/one_gpu", make_model(scale), 24)


def part_lora_7b(scale: Scale) -> Result:
    """Two steps of configs/lora/one_gpu.yaml as on 24 GB, with a model of Qwen2.5-7B's shape, its embeddings tied."""
    return on_small_gpu(scale, "lora/one_gpu", make_7b(scale), 24)


def part_qlora_7b(scale: Scale) -> Result:
    """The same with the base in 4 bits, as on 16 GB."""
    in_4_bits = "model.lora_configs=[{lora_rank: 32, lora_alpha: 32, load_in_4bit: true}]"
    return on_small_gpu(scale, "lora/one_gpu", make_7b(scale), 16, *[in_4_bits] * (scale.device.type == "cuda"))


def make_7b(scale: Scale) -> str:
    from trinity_core.data.tiny import TinySize

    return make_model(scale) if scale.tiny else make_model(scale, "7b", TinySize(3584, 18944, 28, 28, 4, 4096, 152064))


LIMIT = """import ray, torch

if ray.is_initialized() and ray.get_gpu_ids() and torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction({share})
"""
"""A plugin that lets torch in the trainer have no more of the GPU; an engine's share is a setting."""


def on_small_gpu(scale: Scale, recipe: str, model: str, gb: int, *overrides: str) -> Result:
    """Two steps of a recipe with random weights, whose answers all run to their limit, on as much of the GPU as one of
    `gb` GB has: seconds and memory; then a third step, resumed."""
    from trinity_core.config.training import GPU_CONTEXT
    from trinity_core.data.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        place = {"TRINITY_MODEL_PATH": model}
        place["TRINITY_TASKSET_PATH"] = str(make_tiny(Path(folder) / "begin").data)
        fields = ("buffer.explorer_input.eval_tasksets=[]", "buffer.explorer_input.taskset.subset_name=null")
        more = [*fields, *overrides]
        if scale.device.type == "cuda":
            memory = torch.cuda.get_device_properties(0).total_memory
            (Path(folder) / "plugins").mkdir()
            limit = LIMIT.format(share=(gb * 1e9 - GPU_CONTEXT) / memory)
            (Path(folder) / "plugins" / "limit.py").write_text(limit)
            more.append(f"explorer.rollout_model.gpu_memory_utilization={0.85 * gb * 1e9 / memory:.3f}")
            more.append(f"plugin_dir={folder}/plugins")
        else:
            more += [
                "cluster.gpu_per_node=0", "model.max_response_tokens=16", "model.max_prompt_tokens=128",
                "buffer.batch_size=4",
            ]  # fmt: skip
        name = recipe.replace("/", "_")
        job = Path(folder) / "Trinity-Flows" / name
        with most_used() as used:
            out = finished(command(recipe, name, folder, *more, "buffer.total_steps=2"), place, job)
        out = tell(**out, most_used_gib=max(used, default=None))
        resumed = finished(command(recipe, name, folder, *more, "buffer.total_steps=3"), place, job)
        assert resumed["step"] == 3, resumed
        return out | tell(resumed_s=resumed["seconds"])


@contextmanager
def most_used() -> Iterator[list[float]]:
    """GiB of the GPU in use, by all processes, ten times a second until the end; empty without a GPU."""
    used: list[float] = []
    if not torch.cuda.is_available():
        yield used
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=100"]
    watch = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    try:
        yield used
    finally:
        watch.terminate()
        used += [float(line) / 1024 for line in (watch.stdout or ()) if line.strip().isdigit()]


def finished(command: list[str], environment: dict[str, str], job: Path) -> Result:
    """Run to the end: seconds, scores, and what its last step measured."""
    from trinity_core.exchange.tracking.metrics_file import read_metrics

    began = time.perf_counter()
    subprocess.run(command, env=os.environ | environment, cwd=ROOT, check=True)
    lines = [line for line in read_metrics(job) if line.source != "eval"]
    last = {key: value for line in lines if line.step == lines[-1].step for key, value in line.metrics.items()}
    summary = json.loads((job / "summary.json").read_text())
    kept = ("rollout_gap/mean", "rollout_gap/max", "reward/mean", "actor/grad_norm", "weight_sync/check_gap")
    times = {key: value for key, value in last.items() if key.startswith("timing_s/")}
    return {
        "seconds": time.perf_counter() - began, "step": summary["step"], "scores": summary["scores"],
        **{key: last.get(key) for key in kept}, **times,
    }  # fmt: skip


def need_two_gpus(why: str) -> None:
    if torch.cuda.device_count() < 2:
        raise NotHere(f"{why}, and there are {torch.cuda.device_count()}")


class SameLoop:
    """A `RayEngine` of an engine that runs in an event loop of this process; other threads call it."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def __getattr__(self, verb: str) -> Callable[..., None]:
        method = getattr(self._engine, verb)
        return lambda *given: asyncio.run_coroutine_threadsafe(method(*given), self._loop).result(120)


def part_push(scale: Scale) -> Result:
    """Weights from a trainer's GPU by NCCL into an engine on another, thrice; each push is checked by its digests."""
    need_two_gpus("weights are pushed from one GPU to another")
    from trinity_core.exchange.sync.nccl import EngineGroup, KeptWeights, NcclSender, PushedVersions, VllmWeights
    from trinity_core.rollout.inference.requests import WeightSource
    from trinity_core.rollout.inference.weight_receiver import with_head
    from trinity_core.training.policy import load_causal_lm

    async def push(model: str, folder: str) -> Result:
        lm = load_causal_lm(model, torch.bfloat16).to(scale.device)
        weights = KeptWeights(dict(with_head(iter(lm.state_dict().items()))))
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the engine's processes; this one has opened GPU 0
        engine = engine_of(scale, model, sleeps=False, weight_transfer="nccl", gpu_memory_utilization=0.5)
        out: Result = {"start_s": await engine.start(), "gb": sum(t.nbytes for t in weights.tensors.values()) / 1e9}
        group = EngineGroup([SameLoop(engine, asyncio.get_running_loop())], 1)  # type: ignore[list-item]
        versions, source = PushedVersions.open(Path(folder)), VllmWeights(weights, "bfloat16")
        sender = await asyncio.to_thread(NcclSender, 0, source, group, versions)
        for version in (1, 2, 3):
            for tensor in {tensor.data_ptr(): tensor for tensor in weights.tensors.values()}.values():
                tensor.mul_(1.01)
            began = time.perf_counter()
            await asyncio.to_thread(sender.send, version)
            out["push_s"], began = time.perf_counter() - began, time.perf_counter()
            await engine.load(WeightSource("nccl", folder), version)
            out["check_s"] = time.perf_counter() - began
            assert engine.version == version
        sender.close()
        await engine.stop()
        return out

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(push(make_model(scale), folder))
