"""What only a GPU can show, in one call of at most 9 minutes, using the project's own functions.

Each part is a process with its own time limit, which writes OUT/PART.json at once, even if it fails. A part that lacks
a package says so. Without a GPU nothing is done, unless `--tiny` runs every part at a small size on the CPU.

    python benchmarks/gpu.py --out results        all but the next line: torch, transformers, DeepSpeed
    python benchmarks/gpu.py --engine             engine, coexist, run and one_gpu as well: vLLM, Ray
    python benchmarks/gpu.py --only lora_7b --only qlora_7b --only push --only experts      what is done only if named

Beside torch and transformers the first line needs deepspeed, omegaconf, pydantic, and sqlalchemy, with what they
require; vLLM without flashinfer needs VLLM_USE_FLASHINFER_SAMPLER=0; `qlora_7b` needs requirements/qlora.txt. `push`
(weights by NCCL) and `experts` need two GPUs and say so if there is only one; `tests/sync/test_sync_nccl.py` has gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12}
"""Operations a second in bfloat16 without sparsity, as the data sheets say."""
Result = dict[str, Any]


class NotHere(Exception):
    """The machine lacks what a part needs."""


@dataclass(frozen=True)
class Scale:
    """How large everything is: for a GPU, or to show on a CPU that the code works."""

    tiny: bool
    folder: Path = Path()
    """Where the parts make the models that they share."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def bytes(self) -> int:
        """Of the tensors that are digested and published."""
        return 3 << 20 if self.tiny else 3 * GIB

    @property
    def model(self) -> Any:
        """Qwen2.5-1.5B's shape."""
        from trinity_core.data.tiny import TinySize

        return TinySize(64, 96, 2, 2, 1) if self.tiny else TinySize(1536, 8960, 28, 12, 2, 4096, 151936)

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """Prompts, rollouts of each, tokens of a prompt and of an answer."""
        return (2, 4, 8, 8) if self.tiny else (16, 8, 256, 512)


def timed(work: Callable[[], Any], device: torch.device, rounds: int = 3) -> float:
    """Seconds of the fastest of some rounds, after one that does not count."""
    work()
    best = float("inf")
    for _ in range(rounds):
        settle(device)
        began = time.perf_counter()
        work()
        settle(device)
        best = min(best, time.perf_counter() - began)
    return best


def settle(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensors_of(scale: Scale, dtype: torch.dtype, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Sixteen tensors with all of `scale.bytes`."""
    count = scale.bytes // 16 // dtype.itemsize
    return [(f"w{i}", torch.randn(count, device=device).to(dtype)) for i in range(16)]


def part_digests(scale: Scale) -> Result:
    """A value digest is the same wherever it is computed."""
    from trinity_core.sync.tensorfile import value_digest

    out: Result = {}
    for dtype in (torch.bfloat16, torch.float32):
        tensor = tensors_of(scale, dtype, scale.device)[0][1]
        host = tensor.cpu()
        assert value_digest(tensor) == value_digest(host), f"{dtype}: other digests on {scale.device} than on the CPU"
        for name, each in (("cpu", host), (scale.device.type, tensor)):
            seconds = timed(lambda each=each: value_digest(each), scale.device, 1)
            out[f"{str(dtype).removeprefix('torch.')}_{name}_gb_s"] = each.nbytes / seconds / 1e9
    return out


def part_sync(scale: Scale) -> Result:
    """Publish through shared memory, load into tensors on the device."""
    from trinity_core.sync.memory import MemoryVersions, memory_root

    source = tensors_of(scale, torch.bfloat16, scale.device)
    held = [torch.empty_like(tensor) for _, tensor in source]
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = (MemoryVersions(memory_root(Path(folder))) for _ in range(2))
        numbers = iter(range(99))

        def load() -> None:
            for target, (_, tensor) in zip(held, reader.load(reader.latest()), strict=True):
                target.copy_(tensor)

        try:
            publish = timed(lambda: writer.publish(next(numbers), source), scale.device)
            seconds = timed(load, scale.device)
        finally:
            writer.remove()
    assert all(torch.equal(mine, theirs) for mine, (_, theirs) in zip(held, source, strict=True))
    return {"gb": scale.bytes / 1e9, "publish_s": publish, "load_s": seconds}


def random_rows(scale: Scale, vocabulary: int, seed: int = 0) -> list[Any]:
    """Rollouts with random tokens, log-probs and rewards."""
    from trinity_core.data.experience import Experience

    prompts, repeats, before, after = scale.rows
    rng = np.random.default_rng(seed)
    return [
        Experience(
            tokens=np.concatenate([prompt, rng.integers(3, vocabulary, after)]),
            prompt_length=before, action_mask=np.ones(after, np.bool_), logprobs=np.full(after, -9.0, np.float32),
            versions=np.zeros(after), reward=float(rng.random() < 0.5), group=f"1/{group}", run=run,
        )
        for group in range(prompts) for prompt in [rng.integers(3, vocabulary, before)] for run in range(repeats)
    ]  # fmt: skip


def make_model(scale: Scale, name: str = "", size: Any = None) -> str:
    """The folder of a random model; the first part that needs it makes it."""
    from trinity_core.data import tiny

    folder = scale.folder / (name or f"{'tiny' if scale.tiny else 'large'}_model")
    if not folder.exists():
        making = folder.with_suffix(".part")
        tiny.make_model(making, 0, size or scale.model)
        making.rename(folder)
    return str(folder)


def part_paths(scale: Scale) -> Result:
    """Packed against padded log-probs and gradients, and attention alone against torch's kernels."""
    from trinity_core.training.micro import build_micro
    from trinity_core.training.packing import ATTENTION
    from trinity_core.training.policy import FastPaths, Policy, find_fast_paths, load_causal_lm

    out: Result = {}
    repeats, after = scale.rows[1], scale.rows[3]
    small = make_model(replace(scale, tiny=True))
    for dtype in (torch.float32, torch.bfloat16):
        lm = load_causal_lm(small, dtype).to(scale.device)
        rows = random_rows(scale, 400)[:repeats]
        outputs, by_length = [], find_fast_paths(lm).by_length
        for packing, attention in ((False, "sdpa"), (True, ATTENTION)):
            lm.set_attn_implementation(attention)
            lm.zero_grad()
            micro = build_micro(rows, range(len(rows)), after, packing).to(scale.device)
            logprobs, _ = Policy(lm, FastPaths(packing, packing, packing and by_length))(micro, 1.0, "none")
            logprobs.mean().backward()
            gradient = torch.cat([p.grad.float().flatten() for p in lm.parameters() if p.grad is not None])
            outputs.append((micro.grid(logprobs.detach()), gradient))
        name, (plain, packed) = str(dtype).removeprefix("torch."), outputs
        out[f"{name}_by_length"] = by_length
        out[f"{name}_logprob_gap"] = float((plain[0] - packed[0]).abs().max())
        out[f"{name}_gradient_gap"] = float((plain[1] - packed[1]).norm() / plain[1].norm())
        tolerance = 1e-3 if dtype == torch.float32 else 0.1
        assert out[f"{name}_logprob_gap"] < tolerance and out[f"{name}_gradient_gap"] < tolerance, out
    return out | attention_times(scale)


def attention_times(scale: Scale) -> Result:
    """Milliseconds of forward and backward of one layer's attention, each kernel on the same rows; or why not."""
    from trinity_core.training.micro import build_micro
    from trinity_core.training.packing import attention

    rows = random_rows(scale, 400)
    before, after = scale.rows[2:]
    device, dtype = scale.device, torch.float32 if scale.device.type == "cpu" else torch.bfloat16
    heads, kv_heads, length = scale.model.heads, scale.model.key_value_heads, before + after
    channels = scale.model.hidden_size // heads
    packed = build_micro(rows, range(len(rows)), after).to(device).inputs

    def inputs(batch: int, tokens: int) -> list[torch.Tensor]:
        shapes = [(batch, count, tokens, channels) for count in (heads, kv_heads, kv_heads)]
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    whole, layer = inputs(len(rows), length), torch.nn.Module()
    short = inputs(1, packed.tokens.shape[1])
    flat = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in whole]
    ends = torch.arange(0, (len(rows) + 1) * length, length, device=device, dtype=torch.int32)

    def varlen() -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // kv_heads, 1) for x in flat)
        return varlen_attn(q, k, v, ends, ends, length, length, window_size=(-1, 0))

    compiled: list[Any] = []

    def flex() -> torch.Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not compiled:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device.type)
            kernel = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
            compiled.extend((kernel, mask))
        return compiled[0](*whole, block_mask=compiled[1], enable_gqa=True)

    def flash() -> torch.Tensor:  # on an H100 torch prefers cuDNN's kernel
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return sdpa(*whole, is_causal=True, enable_gqa=True)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    kernels: dict[str, tuple[Callable[[], torch.Tensor], Sequence[torch.Tensor]]] = {
        "packed": (lambda: attention(layer, *short, None, packed=packed.masked(dtype))[0], short),
        "packed_by_length": (lambda: attention(layer, *short, None, packed=packed)[0], short),
        "preferred": (lambda: sdpa(*whole, is_causal=True, enable_gqa=True), whole),
        "flash": (flash, whole),
        "varlen": (varlen, flat),
        "flex": (flex, whole),
    }
    out: Result = {}
    for name, (kernel, leaves) in kernels.items():
        try:
            both = lambda kernel=kernel, leaves=leaves: torch.autograd.grad(kernel().sum(), leaves)  # noqa: E731
            out[f"{name}_ms"] = timed(both, device) * 1e3
        except (RuntimeError, ImportError, TypeError, ValueError) as error:
            out[f"{name}_ms"] = f"not here: {str(error).splitlines()[0]}"
    return out


EAGER = "trainer.torch_compile=false"
ACTOR = "trainer.trainer_config.actor_rollout_ref.actor.fsdp_config"
HOST = {
    "bfloat16": ("trainer.dtype=bfloat16",),
    "bfloat16_checkpointing": ("trainer.dtype=bfloat16", "trainer.gradient_checkpointing=true"),
    "float32_lora": ("trainer.dtype=float32", "model.lora_configs=[{lora_rank: 16}]"),
    "bfloat16_zero2_offload": ("trainer.dtype=bfloat16", f"{ACTOR}.optimizer_offload=true"),
}


def part_host(scale: Scale) -> Result:
    """What the host takes for a step: the 28 layers of a 1.5B model, so narrow that their arithmetic takes nothing."""
    from trinity_core.data import tiny
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner

    out: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny.make_model(Path(folder) / "narrow", 0, tiny.TinySize(64, 64, 28, 2, 1))
        ranks = join(0, 1, *meeting_point(), use_gpu=scale.device.type == "cuda")
        small = replace(scale, tiny=True)
        one_group = ("model.max_model_len=40", "trainer.max_token_len_per_gpu=40", "algorithm.kl_loss_fn=none", EAGER)
        for name, overrides in HOST.items():
            learner = Learner(config_for(small, f"{folder}/narrow", folder, *one_group, *overrides), 99, ranks)
            rows, steps = random_rows(small, 400), iter(range(1, 99))
            ours = host_seconds(lambda learner=learner, rows=rows, steps=steps: learner.step(rows, next(steps)), ranks)
            alone, zero = host_seconds(torch_alone(learner, rows), ranks), learner.engine.settings.zero_stage
            out[name] = {"zero": zero, "step_ms": 1e3 * ours, "torch_ms": 1e3 * alone, "ratio": ours / alone}
            print(json.dumps({name: out[name]}), flush=True)
    return out


def host_seconds(work: Callable[[], Any], ranks: Any) -> float:
    """The fastest of three rounds after the first; on a CPU seconds of this process, which other ones do not change."""
    clock = time.perf_counter if ranks.device.type == "cuda" else time.process_time
    rounds = []
    for _ in range(4):
        settle(ranks.device)
        began = clock()
        work()
        settle(ranks.device)
        rounds.append(clock() - began)
    return min(rounds[1:])


def torch_alone(learner: Any, rows: list[Any]) -> Callable[[], None]:
    """Forward and backward of a step's micro-batches by the same module, with no hook, loss or update; then AdamW."""
    from trinity_core.training.batch import make_batch
    from trinity_core.training.update import micro_batches

    micros = micro_batches(make_batch(rows, learner.ranks.device), learner.cut, learner.ranks)
    weights = [p for p in learner.engine.module.parameters() if p.requires_grad]
    copies = [p.detach().clone().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(copies, lr=0.0, fused=True)

    def run() -> None:
        for micro in micros:
            loss = learner.engine.module(micro, 1.0, "none")[0].mean()
            for copy, gradient in zip(copies, torch.autograd.grad(loss, weights), strict=True):
                copy.grad = gradient
        torch.nn.utils.clip_grad_norm_(copies, 1.0, foreach=True)
        optimizer.step()

    return run


def config_for(scale: Scale, model: str, root: str, *overrides: str) -> Any:
    """A trainer alone, whose batch is `scale.rows`."""
    from trinity_core.config import config_from_dict

    prompts, repeats, before, after = scale.rows
    tree = {
        "mode": "train", "checkpoint_root_dir": root,
        "algorithm": {"algorithm_type": "grpo", "repeat_times": repeats, "optimizer": {"lr": 1e-5}},
        "model": {"model_path": model, "max_prompt_tokens": before, "max_response_tokens": after},
        "cluster": {"gpu_per_node": int(scale.device.type == "cuda")},
        "buffer": {"batch_size": prompts, "total_steps": 4, "trainer_input": {"experience_buffer": {"name": "b"}}},
        "synchronizer": {"sync_method": "checkpoint"},
    }  # fmt: skip
    return config_from_dict(tree, overrides)


def planned_bytes(config: Any, on_gpu: bool) -> int:
    """The trainer's peak by `trinity plan`."""
    from trinity_core.runtime.placement import Machine, place
    from trinity_core.runtime.preflight.model_shape import total
    from trinity_core.runtime.preflight.resource_estimate import processes_of

    machine = Machine(os.cpu_count() or 1, int(on_gpu))
    return max(
        total(process.memory or ()) for process in processes_of(config, place(config, machine), 64 * GIB, 80 * GIB)
    )


HOW = {
    "whole": (),
    "whole_without_kl": ("algorithm.kl_loss_fn=none",),
    "whole_head_in_torch": ("algorithm.kl_loss_fn=none",),
    "whole_not_compiled": ("algorithm.kl_loss_fn=none", EAGER),
    "whole_checkpointing": ("trainer.gradient_checkpointing=true",),
    "zero2_offload": ("trainer.gradient_checkpointing=true", f"{ACTOR}.optimizer_offload=true"),
    "zero3_checkpointing": ("trainer.zero_stage=3", "trainer.gradient_checkpointing=true"),
}


def part_steps(scale: Scale) -> Result:
    """Train steps of a random 1.5B model: memory against the plan, use of the GPU, states moved away and back."""
    from trinity_core.training.distributed import join, meeting_point

    out: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale)
        ranks = join(0, 1, *meeting_point(), use_gpu=scale.device.type == "cuda")
        for name, overrides in HOW.items():
            config = config_for(scale, model, folder, *overrides)
            kernels, moves = name != "whole_head_in_torch", name in ("whole", "zero2_offload")
            out[name] = one_trainer(config, ranks, scale, moves, kernels)
            print(json.dumps({name: out[name]}), flush=True)
    return out


def one_trainer(config: Any, ranks: Any, scale: Scale, moves: bool, kernels: bool = True) -> Result:
    """Three steps and a profiled fourth of one trainer; then its states leave the device and come back.

    The first steps compile layers and kernels. `kernels` false: the head is computed in torch.
    """
    from training_part import work_of

    from trinity_core.training.engine import free_cached
    from trinity_core.training.learner import Learner

    on_gpu = ranks.device.type == "cuda"
    free_cached(ranks.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(config, 4, ranks)
    vocabulary = learner.model_config.vocab_size
    rows, policy = random_rows(scale, vocabulary), learner.engine.module
    policy.fast_paths = replace(policy.fast_paths, head_kernels=policy.fast_paths.head_kernels and kernels)
    for step in (1, 2, 3):
        settle(ranks.device)
        began = time.perf_counter()
        learner.step(rows, step)
        settle(ranks.device)
        seconds = time.perf_counter() - began
    work = work_of(learner, rows)
    out: Result = {"step_s": seconds, "planned_gib": planned_bytes(config, on_gpu) / GIB} | work._asdict()
    if on_gpu:
        out["fast_paths"] = str(policy.fast_paths)
        out["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        out |= use_of_gpu(learner, rows, work.micro_batches)
        if learner.engine.plain:
            out["torch_alone_s"] = timed(torch_alone(learner, rows), ranks.device, 1)
        peak = next((value for name, value in PEAK.items() if name in torch.cuda.get_device_name()), None)
        if peak is not None:
            out |= {"mfu_counted": work.counted / seconds / peak, "mfu_computed": work.computed / seconds / peak}
        by_length = policy.fast_paths.by_length  # what is planned; masks take more
        assert out["peak_gib"] <= out["planned_gib"] or not by_length, f"more than the plan says: {out}"
    if moves:
        for again in ("", "_again"):  # the first makes the place in the machine's memory
            began = time.perf_counter()
            learner.offload()
            out[f"offload{again}_s"] = time.perf_counter() - began
            out["left_gib"] = torch.cuda.memory_allocated() / GIB if on_gpu else 0.0
            began = time.perf_counter()
            learner.reload()
            settle(ranks.device)
            out[f"reload{again}_s"] = time.perf_counter() - began
        out["metrics_after"] = {
            k: v for k, v in learner.step(rows, 5).items() if k in ("actor/pg_loss", "actor/grad_norm")
        }
    return out


def use_of_gpu(learner: Any, rows: list[Any], micro_batches: int) -> Result:
    """Of one step: the share of its time in which no kernel ran; and for each micro-batch, kernels with
    copies, and waits of the CPU for the GPU."""
    from torch.profiler import ProfilerActivity, profile

    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        learner.step(rows, 4)
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()  # the profiler's own sums take minutes for a step
    kernels = [event.duration_ns() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    waits = sum("Synchronize" in event.name() for event in events)
    return {
        "idle_share": max(0.0, 1 - sum(kernels) / 1e9 / wall),
        "kernels_each": len(kernels) / micro_batches, "synchronizations_each": waits / micro_batches,
    }  # fmt: skip


def part_resume(scale: Scale) -> Result:
    """Two checkpoints are copied, each beside the step that follows, and written; the second is loaded, and its next
    step taken twice more: what the copies cost, and how far apart the three steps are."""
    from trinity_core.training.checkpoint import copy, largest_file, load
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner
    from trinity_core.training.saving import CheckpointWriter
    from trinity_core.training.state import weights

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale)
        ranks = join(0, 1, *meeting_point(), use_gpu=scale.device.type == "cuda")
        config = config_for(scale, model, folder, *HOW["whole_checkpointing"], EAGER)  # compiling takes a minute
        learner = Learner(config, 4, ranks)
        rows, out, writer = random_rows(scale, learner.model_config.vocab_size), Result(), CheckpointWriter(ranks)

        def take(step: int) -> dict[str, torch.Tensor]:
            began = time.perf_counter()
            learner.step(rows, step)
            settle(ranks.device)
            out["step_s"] = time.perf_counter() - began
            return {name: w.cpu().clone() for name, w in weights(learner.engine)}

        take(1)
        for turn, name in enumerate(("", "_again"), start=1):  # the first makes the place in the machine's memory
            saved, began = Path(folder) / f"saved{turn}", time.perf_counter()
            saved.mkdir()
            with writer.start(turn, saved, [0], largest_file(learner), lambda written: None) as copying:
                copy(learner, turn, copying)
            out[f"copy{name}_s"] = time.perf_counter() - began
            states = [take(turn + 1)]
            out[f"step_beside_copy{name}_s"] = out["step_s"]
            writer.until_written()
            out[f"write{name}_s"] = time.perf_counter() - began
        writer.close()
        for _ in range(2):
            began = time.perf_counter()
            load(learner, saved)
            out["load_s"] = time.perf_counter() - began
            states.append(take(3))
    first, *others = states
    differing = sum(int((first[name] != other[name]).sum()) for other in others for name in first)
    most = max(float((first[name].float() - other[name].float()).abs().max()) for other in others for name in first)
    out |= {"largest_difference": most, "exact": not differing}
    return out | {"differing_share": differing / sum(2 * w.numel() for w in first.values())}


def part_engine(scale: Scale) -> Result:
    """vLLM: start, sampling with and without CUDA graphs, seeds, sleep and wake, new weights; with an adapter, too."""
    from trinity_core.inference.requests import WeightSource
    from trinity_core.sync.versions import open_versions

    out: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale)
        open_versions("checkpoint", Path(folder)).publish(1, adapter_for(model))
        adapter = {"lora_rank": RANK, "lora_modules": (ADAPTED,)}
        kinds = {
            "graphs": (False, {}), "eager": (True, {}), "lora": (scale.device.type == "cpu", adapter),
            "fp8": (False, {"extra_engine_args": {"quantization": "fp8"}}),
            "ngram": (False, {"extra_engine_args": {"speculative_config": NGRAM}}),
        }  # fmt: skip
        for name, (eager, more) in kinds.items():
            if scale.device.type == "cpu" and not eager:
                continue
            source = WeightSource("checkpoint", folder) if more else WeightSource("folder", model)
            engine = engine_of(scale, model, enforce_eager=eager, gpu_memory_utilization=0.5, **more)
            out[name] = asyncio.run(try_engine(engine, scale, source, int(bool(more))))
    return out


RANK, ADAPTED = 8, "o_proj"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def part_experts(scale: Scale) -> Result:
    """An engine whose two GPUs have half of a mixture's experts each: `try_engine` of a random Qwen3-MoE."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trinity_core.inference.requests import WeightSource

    need_two_gpus("experts are divided among GPUs")
    shape = {"hidden_size": 1024, "num_hidden_layers": 8, "moe_intermediate_size": 512, "vocab_size": 32000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model("qwen3_moe", num_experts=32, num_experts_per_tok=4, **shape, **heads)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        args = {"tensor_parallel_size": 2, "extra_engine_args": {"enable_expert_parallel": True}}
        engine = engine_of(scale, folder, gpu_memory_utilization=0.5, **args)
        return asyncio.run(try_engine(engine, scale, WeightSource("folder", folder), 0))


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
    from trinity_core.inference.requests import WeightSource
    from trinity_core.inference.weight_receiver import with_head
    from trinity_core.sync.nccl import EngineGroup, KeptWeights, NcclSender, PushedVersions, VllmWeights
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


def adapter_for(model: str) -> list[tuple[str, torch.Tensor]]:
    """Random matrices A and B for one matrix of each layer of the model in a folder."""
    from trinity_core.checkpoints.adapters import A, B
    from trinity_core.training.policy import load_causal_lm

    tensors = []
    for name, module in load_causal_lm(model, torch.bfloat16, reads=False).named_modules():
        if name.endswith(ADAPTED):
            out, into = module.weight.shape
            tensors += [(name + A, torch.randn(RANK, into) * into**-0.5), (name + B, torch.randn(out, RANK) * 0.1)]
    return tensors


def engine_of(scale: Scale, model: str, **settings: Any) -> Any:
    """An engine that sleeps between turns."""
    from trinity_core.inference.engine import engine_class
    from trinity_core.inference.settings import EngineSettings

    on_gpu = scale.device.type == "cuda"
    kv_cache_gib = None if on_gpu else 0.1
    settings = {"sleeps": True, "kv_cache_gib": kv_cache_gib, **settings}
    made = EngineSettings(model, sum(scale.rows[2:]), on_gpu, **settings)
    os.environ.update(made.environment())
    return engine_class(made)(made)


def free(scale: Scale) -> float:
    """GiB of the GPU that nobody holds."""
    return torch.cuda.mem_get_info()[0] / GIB if scale.device.type == "cuda" else 0.0


def requests(scale: Scale, turn: int) -> list[Any]:
    """Of a turn: each prompt with all its rollouts, the same in each."""
    from trinity_core.inference.requests import Request, Sampling

    prompts, repeats, before, after = scale.rows
    prompt = np.arange(5, 5 + before, dtype=np.int32)
    return [Request(f"{turn}/{i}", prompt, Sampling(max_tokens=after), i) for i in range(prompts * repeats)]


async def try_engine(engine: Any, scale: Scale, source: Any, version: int) -> Result:
    """Two turns of one engine, which then loads `version`."""
    out: Result = {"free_before_gib": free(scale), "start_s": await engine.start(), "free_asleep_gib": free(scale)}
    began = time.perf_counter()
    await engine.wake()
    out |= {"wake_s": time.perf_counter() - began, "free_awake_gib": free(scale)}
    samples = []
    for turn in range(2):
        began = time.perf_counter()
        samples.append((await engine.generate(requests(scale, turn))).unpack())
        out["tokens_s"] = sum(len(sample.tokens) for sample in samples[-1]) / (time.perf_counter() - began)
    pairs = zip(*samples, strict=True)
    out["same_seed_same_tokens"] = sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs) / len(samples[0])
    began = time.perf_counter()
    await engine.sleep()
    out["sleep_s"] = time.perf_counter() - began
    await engine.wake()
    out["load_s"] = (await engine.load(source, version)).seconds
    await engine.stop()
    return out


def part_coexist(scale: Scale) -> Result:
    """An engine and a trainer on one GPU, at once and in turns, and what a process of each holds while it rests."""
    from trinity_core.config.training import GPU_CONTEXT
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale)
        engine = engine_of(scale, model, gpu_memory_utilization=0.3)
        before = free(scale)
        asyncio.run(engine.start())
        out: Result = {"planned_resting_gib": GPU_CONTEXT / GIB, "engine_resting_gib": before - free(scale)}
        before = free(scale)
        ranks = join(0, 1, *meeting_point(), use_gpu=scale.device.type == "cuda")
        learner = Learner(config_for(scale, model, folder, *HOW["whole_checkpointing"]), 4, ranks)
        rows = random_rows(scale, learner.model_config.vocab_size)
        learner.step(rows, 1)
        learner.offload()
        out["trainer_resting_gib"] = before - free(scale)  # without the context, which the first look has made
        out |= asyncio.run(take_turns(engine, learner, rows, scale))
    return out


async def take_turns(engine: Any, learner: Any, rows: list[Any], scale: Scale) -> Result:
    """Seconds of sampling alone, and of sampling and a train step at once; every wake is checked."""
    out: Result = {}
    for turn in range(2):
        await engine.wake()
        began = time.perf_counter()
        await engine.generate(requests(scale, 2 * turn))
        out["sampling_s"], began = time.perf_counter() - began, time.perf_counter()
        learner.reload()
        await asyncio.gather(
            engine.generate(requests(scale, 2 * turn + 1)), asyncio.to_thread(learner.step, rows, 2 + turn)
        )
        out["at_once_s"], began = time.perf_counter() - began, time.perf_counter()
        await engine.sleep()
        learner.step(rows, 4)
        learner.offload()
        out["training_turn_s"] = time.perf_counter() - began
    await engine.stop()
    return out


ON_ONE_GPU = (
    "cluster.gpu_per_node=1",
    "trainer.worker_num=1",
    "trainer.zero_stage=2",
    "explorer.rollout_model.engine_num=1",
    "explorer.rollout_model.gpu_memory_utilization=0.12",
)
NO_STAGES = ("stages=[]", "continue_from_checkpoint=false")


def command(config: str, name: str, folder: str, *overrides: str) -> list[str]:
    """A user's command for a run whose job is `folder`/Trinity-Flows/`name`."""
    module = [sys.executable, "-m", "trinity_core.runtime.run", "--config", f"configs/{config}.yaml"]
    return [*module, f"name={name}", f"checkpoint_root_dir={folder}", "monitor.monitor_type=tensorboard", *overrides]


def part_run(scale: Scale) -> Result:
    """Whole runs: stages in turn on one GPU; killed and resumed; with an adapter; with one of a base in 4 bits."""
    from trinity_core.data.tiny import TinySize, make_tiny

    on_gpu, steps = scale.device.type == "cuda", 4 if scale.tiny else 24
    with tempfile.TemporaryDirectory() as folder:
        begin = make_tiny(Path(folder) / "begin", size=TinySize() if scale.tiny else TinySize(256, 768, 4, 4, 2))
        place = {"TRINITY_MODEL_PATH": str(begin.model), "TRINITY_TASKSET_PATH": str(begin.data)}
        job, shared = Path(folder) / "Trinity-Flows", ON_ONE_GPU * on_gpu
        whole = (
            "quickstart/quickstart",
            "whole",
            folder,
            *shared,
            *["explorer.rollout_model.enforce_eager=false"] * on_gpu,
        )
        out: Result = {}
        out["whole"] = finished(command(*whole, f"buffer.total_steps={steps}"), place, job / "whole_rft")
        longer = command(*whole, f"buffer.total_steps={2 * steps}", "trainer.save_interval=2")
        kill_after(longer, place, job / "whole_rft", steps + 3)
        out["killed"] = finished(longer, place, job / "whole_rft")
        place |= {"TRINITY_MODEL_PATH": json.loads((job / "whole_sft" / "summary.json").read_text())["hf_dir"]}
        for name, four_bits in (("lora", False), ("qlora", True)) if on_gpu else (("lora", False),):
            adapter = f"model.lora_configs=[{{lora_rank: 16, lora_alpha: 32, load_in_4bit: {str(four_bits).lower()}}}]"
            more = (*shared, *NO_STAGES, adapter, f"buffer.total_steps={steps // 2}")
            out[name] = finished(command("lora/quickstart", name, folder, *more), place, job / name)
            print(json.dumps(out), flush=True)
    return out


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
    so many GB has: seconds and memory."""
    from trinity_core.config.training import GPU_CONTEXT
    from trinity_core.data.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        place = {"TRINITY_MODEL_PATH": model}
        place["TRINITY_TASKSET_PATH"] = str(make_tiny(Path(folder) / "begin").data)
        fields = ("buffer.explorer_input.eval_tasksets=[]", "buffer.explorer_input.taskset.subset_name=null")
        more = ["buffer.total_steps=2", *fields, *overrides]
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
        with most_used() as used:
            out = finished(command(recipe, name, folder, *more), place, Path(folder) / "Trinity-Flows" / name)
        return out | {"most_used_gib": max(used, default=None)}


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
    from trinity_core.tracking.metrics_file import read_metrics

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


def kill_after(command: list[str], environment: dict[str, str], job: Path, step: int) -> None:
    """Kill a run and all that it started once it has recorded a step."""
    from trinity_core.tracking.metrics_file import read_metrics

    run = subprocess.Popen(command, env=os.environ | environment, cwd=ROOT, start_new_session=True)
    while run.poll() is None and not any(line.step >= step for line in read_metrics(job)):
        time.sleep(0.1)
    assert run.poll() is None, f"the run ended with code {run.returncode} before step {step}"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


PARTS: dict[str, tuple[Callable[[Scale], Result], int]] = {
    "digests": (part_digests, 30),
    "sync": (part_sync, 50),
    "paths": (part_paths, 70),
    "host": (part_host, 50),
    "steps": (part_steps, 250),
    "resume": (part_resume, 90),
    "engine": (part_engine, 400),
    "coexist": (part_coexist, 140),
    "run": (part_run, 400),
    "one_gpu": (part_one_gpu, 240),
    "lora_7b": (part_lora_7b, 420),
    "qlora_7b": (part_qlora_7b, 420),
    "push": (part_push, 180),
    "experts": (part_experts, 180),
}
"""What each does, and its limit in seconds: 540 in all without vLLM."""
NEED_VLLM = ("engine", "coexist", "run", "one_gpu")
IF_NAMED = ("lora_7b", "qlora_7b", "push", "experts")


def share_heads() -> None:
    """Let torch 2.11's kernel of attention by length take fewer heads of keys than of queries, as torch 2.13's does."""
    from torch.nn.attention import varlen

    kernel = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return

    @functools.wraps(kernel)
    def shared(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, enable_gqa: bool = False, **more: Any
    ) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return kernel(q, k, v, *args, **more)

    varlen.varlen_attn = shared


def run_part(name: str, scale: Scale, out: Path) -> None:
    """Do a part in this process, and write what came of it."""
    began = time.perf_counter()
    share_heads()
    result: Result = {"part": name, "tiny": scale.tiny, "torch": torch.__version__}
    result["device"] = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    try:
        result |= {"status": "done", **PARTS[name][0](scale)}
    except (ImportError, NotHere) as error:
        result |= {"status": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - the others go on, and the file says why this one did not
        traceback.print_exc()
        result |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    result["seconds"] = time.perf_counter() - began
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")))
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU where there is no GPU")
    parser.add_argument("--engine", action="store_true", help="also what needs vLLM")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help="where the parts make the random models; else a temporary folder")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("There is no GPU here; --tiny shows on the CPU that the parts work.")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        run_part(args.part, Scale(args.tiny, args.models), args.out)
        return 0
    names = args.only or [name for name in PARTS if name not in IF_NAMED and (name not in NEED_VLLM or args.engine)]
    if args.models:
        return int(run_parts(names, args))
    with tempfile.TemporaryDirectory() as folder:
        args.models = Path(folder)
        return int(run_parts(names, args))


def run_parts(names: Sequence[str], args: argparse.Namespace) -> bool:
    """Run each part in a process of its own; True if one failed."""
    failed = False
    for name in names:
        path, limit = args.out / f"{name}.json", PARTS[name][1] * (3 if args.tiny else 1)
        path.unlink(missing_ok=True)
        options = ["--out", str(args.out), "--models", str(args.models), *["--tiny"] * args.tiny]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, __file__, "--part", name, *options], timeout=limit, check=False)
        if not path.exists():
            path.write_text(json.dumps({"part": name, "status": "failed", "reason": f"not done in {limit} s, or died"}))
        result = json.loads(path.read_text())
        failed |= result["status"] == "failed"
        print(json.dumps(result), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
