"""What only a GPU can show, using the project's own functions, in three calls on one machine.

Each part is a process with its own time limit, which writes OUT/PART.json at once, even if it fails, and prints what it
has seen as it goes. A call has a limit too: parts for which no time is left are cut, and say so. A part that lacks a
package says so. Without a GPU, nothing is done, unless `--tiny` runs the parts at a small size on the CPU.
`gpu_bundles.sh` makes what a bare machine without a network needs.

    python benchmarks/gpu.py --call training      torch, transformers, DeepSpeed
    python benchmarks/gpu.py --call engine        vLLM as well
    python benchmarks/gpu.py --call one_gpu       and Ray: two steps of configs/gsm8k/one_gpu.yaml, and one resumed
    python benchmarks/gpu.py --only lora_7b --only qlora_7b --only push      what is done only if named

`qlora_7b` needs requirements/qlora.txt, `push` (weights by NCCL) two GPUs: `tests/sync/test_sync_nccl.py` has gloo.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch

sys.modules.setdefault("gpu", sys.modules[__name__])  # what `gpu_engine` imports

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
    from trinity_core.exchange.sync.tensorfile import value_digest

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
    from trinity_core.exchange.sync.memory import MemoryVersions, memory_root

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
    """Packed against padded log-probs and gradients."""
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
    from trinity_core.hosting.placement import Machine, place
    from trinity_core.run.preflight.memory import processes_of
    from trinity_core.run.preflight.needs import total

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


PARTS: dict[str, tuple[Callable[[Scale], Result] | str, int]] = {
    "digests": (part_digests, 30),
    "sync": (part_sync, 50),
    "paths": (part_paths, 70),
    "host": (part_host, 50),
    "steps": (part_steps, 250),
    "resume": (part_resume, 90),
    "engine": ("gpu_engine:part_engine", 300),
    "one_gpu": ("gpu_engine:part_one_gpu", 200),
    "lora_7b": ("gpu_engine:part_lora_7b", 420),
    "qlora_7b": ("gpu_engine:part_qlora_7b", 420),
    "push": ("gpu_engine:part_push", 180),
}
"""What each does (a name: once it is needed), and its limit in seconds."""
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "training": (170, ("steps", "host", "resume", "paths", "sync", "digests")),
    "engine": (300, ("engine",)),
    "one_gpu": (200, ("one_gpu",)),
}
"""Seconds of each call, and its parts, the most wanted first: the three fit into a GPU lent for 15 minutes."""
MARGIN = 5
"""Seconds without which no part is begun."""


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
    """Do a part in this process, and write its result."""
    began = time.perf_counter()
    share_heads()
    result: Result = {"part": name, "tiny": scale.tiny, "torch": torch.__version__}
    result["device"] = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    try:
        part = PARTS[name][0]
        result |= {"status": "done", **(resolve_name(part) if isinstance(part, str) else part)(scale)}
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
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU if there is no GPU")
    parser.add_argument("--call", choices=CALLS, default="training", help="parts that fit into one loan of a GPU")
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
    seconds, names = (math.inf, args.only) if args.only else CALLS[args.call]
    if args.models:
        return int(run_parts(names, seconds, args))
    with tempfile.TemporaryDirectory() as folder:
        args.models = Path(folder)
        return int(run_parts(names, seconds, args))


def run_parts(names: Sequence[str], seconds: float, args: argparse.Namespace) -> bool:
    """Run each part in a process of its own, all within `seconds`; True if one failed."""
    failed, slowness = False, 3 if args.tiny else 1
    end = time.monotonic() + seconds * slowness
    for name in names:
        path, left = args.out / f"{name}.json", end - time.monotonic()
        path.unlink(missing_ok=True)
        if left < MARGIN:
            path.write_text(json.dumps({"part": name, "status": "cut", "reason": f"{seconds} s of the call are over"}))
            print(path.read_text(), flush=True)
            continue
        limit = min(PARTS[name][1] * slowness, left)
        options = ["--out", str(args.out), "--models", str(args.models), *["--tiny"] * args.tiny]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, __file__, "--part", name, *options], timeout=limit, check=False)
        if not path.exists():
            reason = f"not done in {limit:.0f} s, or died"
            path.write_text(json.dumps({"part": name, "status": "failed", "reason": reason}))
        result = json.loads(path.read_text())
        failed |= result["status"] == "failed"
        print(json.dumps(result), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
