"""Log-probs and entropy in slices of the vocabulary against the plain computation: peak memory and time of a pass.

Usage: logprob_memory.py [--vocabulary 152000] [--positions 2048] [--hidden 896] [--dtype float32] [--repeats 3]
       [--device cpu|cuda] [--no-entropy]
Prints one JSON line: peak bytes of each computation beyond what exists before and after it (inputs and their gradients,
the same for both), seconds (medians, taken in turn), the ratios, the largest differences of results, and the errors of
log-probs and entropies against float64 on 64 positions. On a CPU the peak is that of the allocator as the profiler
records it, so other processes do not disturb it. Exits 1 unless memory <= 1/10 and time <= 1.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trinity_core.algorithms.logprobs import token_logprobs_and_entropy

Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The plain computation: all logits, log_softmax, gather."""
    logits = hidden @ weight.t()
    logprobs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def plain_without_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The plain computation without entropy, by the cheapest exact formula."""
    logits = (hidden @ weight.t()).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, -1), logits.new_zeros(len(targets))


def run(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, ...]:
    """One forward and backward; results and gradients."""
    hidden.grad = weight.grad = None
    logprobs, entropies = way(hidden, weight, targets)
    upstream = torch.linspace(-1, 1, len(targets), device=hidden.device)
    ((logprobs * upstream).sum() + (0.01 * entropies.sum() if entropy else 0)).backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Peak of allocated bytes during a run, minus those still allocated at its end."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del kept
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    level, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del kept
    return peak - level


def main() -> int:
    """Measure and print; the exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-entropy", dest="entropy", action="store_false")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.positions, args.hidden, device=args.device).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.hidden, device=args.device) * args.hidden**-0.5).to(dtype)
    weight.requires_grad_()
    targets = torch.randint(args.vocabulary, (args.positions,), device=args.device)

    def sliced(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        kernels = args.device == "cuda"
        return token_logprobs_and_entropy(hidden, weight, targets, with_entropy=args.entropy, kernels=kernels)

    ways: dict[str, Way] = {"plain": plain if args.entropy else plain_without_entropy, "sliced": sliced}
    results, peaks = {}, {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        results[name] = run(way, hidden, weight, targets, args.entropy)
        peaks[name] = peak_bytes(lambda way=way: run(way, hidden, weight, targets, args.entropy), args.device)
    for _ in range(args.repeats):
        for name, way in ways.items():
            times[name].append(seconds(lambda way=way: run(way, hidden, weight, targets, args.entropy), args.device))
    exact = plain(hidden.detach()[:64].double(), weight.detach().double(), targets[:64])[: 2 if args.entropy else 1]
    errors = {
        name: [float((got[:64] - true).abs().max()) for got, true in zip(results[name], exact, strict=False)]
        for name in ways
    }
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    differences = {
        n: float((a.float() - b.float()).abs().max())
        for n, a, b in zip(names, results["plain"], results["sliced"], strict=True)
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    memory_ratio, time_ratio = peaks["sliced"] / peaks["plain"], medians["sliced"] / medians["plain"]
    report = {
        "vocabulary": args.vocabulary, "positions": args.positions, "hidden": args.hidden, "dtype": args.dtype,
        "device": args.device, "entropy": args.entropy, "peak_bytes": peaks, "seconds": medians,
        "memory_ratio": round(memory_ratio, 4), "time_ratio": round(time_ratio, 3), "largest_difference": differences,
        "error_to_float64": {name: dict(zip(names, values, strict=False)) for name, values in errors.items()},
    }  # fmt: skip
    print(json.dumps(report))
    return 0 if memory_ratio <= 0.1 and time_ratio <= 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
