"""A whole run on two nodes of a Ray cluster, and its resume: placement, shared folder, database, weight sync.

    python benchmarks/two_nodes.py --database postgresql://user:password@host/database

Both nodes are on this machine: two raylets, each with its own /dev/shm (`unshare -m`), so that nothing can pass through
shared memory unnoticed. Needs Linux, root, and an empty PostgreSQL database; no GPU. Two engines and two trainer
workers are spread over both nodes and take 4 steps of GRPO on the small model; a second start resumes and takes 2 more.
Prints what each start took, the gap between the trainer's and the engines' log-probs after each step's sync, and the
audit of the store. Exits with 1 unless both starts succeed, all 6 steps changed the weights, and the audit is clean.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured import BENCHMARK, ROOT, make_tiny

from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.results.audit import audit_runs

sys.path.insert(0, str(ROOT / "tests"))
from run.ray_clusters import ray_cluster

SHOWN = ("actor/grad_norm", "weight_sync/check_gap", "rollout_gap/mean")
SETTINGS = (
    "cluster.node_num=2", "cluster.gpu_per_node=0", "continue_from_checkpoint=true", "trainer.save_interval=2",
    "trainer.torch_compile=false", "explorer.rollout_model.enforce_eager=true", "synchronizer.sync_method=checkpoint",
    "explorer.rollout_model.kv_cache_gib=0.5", "buffer.batch_size=4", "algorithm.entropy_loss_fn=default",
    "algorithm.entropy_loss_fn_args.entropy_coef=0.01",
)  # fmt: skip
"""No answer is right before the model is trained: the entropy bonus gives each step a gradient."""


def start(steps: int, address: str, database: str, environment: dict[str, str]) -> bool:
    """Run up to a step; prints how long it took."""
    command = [sys.executable, "-m", "trinity_core.run", "--config", BENCHMARK, *SETTINGS]
    store = f"buffer.trainer_input.experience_buffer.path={database}"
    command += [f"cluster.ray_address={address}", f"buffer.total_steps={steps}", store]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    print(f"up to step {steps}: exit code {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print(done.stderr[-4000:])
    return done.returncode == 0


def row(line: MetricLine) -> str:
    """A step's numbers."""
    numbers = ", ".join(f"{name} {line.metrics[name]:.2g}" for name in SHOWN if name in line.metrics)
    return f"  {line.source} {line.step}: {numbers}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", required=True, help="URL of an empty PostgreSQL database")
    database = parser.parse_args().database
    if os.getuid() or not shutil.which("unshare"):
        sys.exit("needs Linux and root: each node gets a /dev/shm of its own")
    make_tiny()
    with tempfile.TemporaryDirectory(prefix="two") as folder, ray_cluster(Path(folder), own_memory=True) as cluster:
        address, environment = cluster
        environment |= {"TRINITY_CHECKPOINT_ROOT_DIR": folder}
        good = start(4, address, database, environment) and start(6, address, database, environment)
        job = Path(folder) / "benchmarks/rft"
        lines = read_metrics(job)
        print("\n".join(row(line) for line in lines if any(name in line.metrics for name in SHOWN)))
        audits = audit_runs(job, url=database)
        clean = all(audit.clean for audit in audits.values())
        print(f"audit: {'clean' if clean else 'NOT clean'}")
        norms = {line.step: line.metrics["actor/grad_norm"] for line in lines if line.source == "trainer"}
        whole = norms.keys() == {*range(1, 7)} and all(norms.values())
    sys.exit(not (good and clean and whole))


if __name__ == "__main__":
    main()
