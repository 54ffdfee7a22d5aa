"""Weight sync through shared memory against one copy of the same bytes, and what the weight check adds.

Prints milliseconds (median over alternating rounds) of: publishing; loading as views; copying these views, whose pages
have not been touched yet, into the engine's own tensors. The claim: all three, without the digests, within 3 copies.
Then the digests, of which each sync takes four: bytes and values as published, bytes as they arrived, values as they
are in the engine; and their share of a step of `--step-seconds`. The claim: below 3 %. Everything is done by one
thread, as in an engine or a trainer with a core of its own; `--threads 2` lets two share each copy, but not the page
faults.

    python benchmarks/weight_sync.py --megabytes 80
    python benchmarks/weight_sync.py --megabytes 4 --step-seconds 0.86
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from trinity_core.exchange.sync.memory import MemoryVersions, memory_root
from trinity_core.exchange.sync.tensorfile import value_digest


def named(megabytes):
    """A transformer's mixture of sizes: a few large matrices, many small vectors."""
    elements = megabytes * 250_000
    made = [("embed", torch.randn(elements // 4)), ("lm_head", torch.randn(elements // 4))]
    rest = elements // 2
    for i in range(24):
        made += [(f"layers.{i}.weight", torch.randn(rest // 24 - 1000)), (f"layers.{i}.norm", torch.randn(1000))]
    return made


def timed(work):
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


def one_round(version, source, engine, versions, reader):
    """Milliseconds of: one copy, publish, load, copying the views into the engine, and the digests of the values."""
    copy, _ = timed(lambda: [engine[name].copy_(tensor) for name, tensor in source])
    publish, _ = timed(lambda: versions.publish(version, source))
    load, views = timed(lambda: dict(reader.load(version)))
    fill, _ = timed(lambda: [engine[name].copy_(tensor) for name, tensor in views.items()])
    values, _ = timed(lambda: [value_digest(tensor) for tensor in engine.values()])
    return copy, publish - values, load, fill, values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, help="of a step with a model of this size")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = named(args.megabytes)
    engine = {name: torch.empty_like(tensor) for name, tensor in source}
    with tempfile.TemporaryDirectory() as job:
        versions, reader = MemoryVersions(memory_root(Path(job))), MemoryVersions(memory_root(Path(job)))
        first = timed(lambda: versions.publish(0, source))[0]
        rounds = [one_round(version, source, engine, versions, reader) for version in range(1, args.rounds + 4)]
        versions.remove()
    # After three rounds every slot exists and its pages are in place.
    columns = [statistics.median(column) for column in zip(*rounds[3:], strict=True)]
    copy, publish, load, fill, values = columns
    result = {
        "megabytes": args.megabytes, "threads": torch.get_num_threads(), "copy_ms": copy, "first_publish_ms": first,
        "publish_ms": publish, "load_views_ms": load, "copy_into_engine_ms": fill,
        "ratio": (publish + load + fill) / copy,
        "values_ms": values, "checks_ms": 2 * values,
    }  # fmt: skip
    if args.step_seconds:
        result["checks_share"] = result["checks_ms"] / args.step_seconds / 1e3
    for name, value in result.items():
        print(f"{name:30s} {value:10.2f}" if isinstance(value, float) else f"{name:30s} {value:10d}")
    print(f"weight sync without digests / copy = {result['ratio']:.2f} (claim: at most 3)")
    if args.step_seconds:
        print(f"digests / step = {result['checks_share']:.2%} (claim: below 3 %)")


if __name__ == "__main__":
    main()
