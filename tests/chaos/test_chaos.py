"""A real run whose processes are killed, and nobody helps it but by starting it again.

`tests/flows/test_flows_whole.py` kills each kind of process of a pipeline that trains all weights, and compares its
weights with the undisturbed pipeline's; `benchmarks/chaos.py` kills at random moments. This run trains an adapter, and
its engine and trainer take turns on one GPU (on the CPU nothing moves).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.comparing import TIMED
from chaos.killing import ChaosRun, Kill

from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.adapters import read_config
from trinity_core.exchange.checkpoints.convert import convert_all
from trinity_core.exchange.tracking.metrics_file import read_metrics

STEPS = 6
ADAPTER = (
    "model.lora_configs=[{lora_rank: 4, lora_alpha: 16}]",
    *("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={kl_coef: 0.01}"),
    *("trainer.zero_stage=2", "trainer.save_interval=4"),
)
TURNS = ("cluster.colocate=true", "synchronizer.sync_interval=2", "synchronizer.sync_timeout=120")
HANGING = ("buffer.default_workflow_type=stopping", "explorer.engine_timeout=5")
"""The engine stops once, during the second explore step."""


def numbers_of(run: ChaosRun, step: int) -> dict[str, float]:
    """The trainer's metrics of a step, but for times."""
    metrics = [line.metrics for line in read_metrics(run.job) if line.source == "trainer" and line.step == step]
    return {name: value for name, value in metrics[-1].items() if not name.startswith(TIMED)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_death_keeps_the_other_side_from_a_shared_gpu_or_changes_an_adapter(
    tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    """Each side fails while it has the GPU: the engine hangs; the trainer dies between two checkpoints, most likely."""
    with ChaosRun(
        tmp_path, tiny_folders.model, tiny_folders.data, STEPS, overrides=(*ADAPTER, *TURNS, *HANGING)
    ) as run:
        run.kill(Kill("trainer", STEPS - 1))
        before = numbers_of(run, STEPS - 1)
        run.go()
    assert (run.kills, run.attempts) == (1, 1), run.log.read_text()
    assert (run.root / "plugins/stopped").exists()
    assert run.faults() == []
    assert run.steps_of("trainer") == run.steps_of("explorer") == list(range(1, STEPS + 1))
    assert numbers_of(run, STEPS - 1) == before and "actor/kl_loss" in before
    lines = read_metrics(run.job)
    assert max(line.metrics.get("engine_restarts", 0) for line in lines) == 1
    explored = {line.step: line.metrics for line in lines if line.source == "explorer"}
    assert "timing_s/wake" in explored[3] and "timing_s/wake" not in explored[4], "a turn has two steps"
    assert any("timing_s/reload" in line.metrics for line in lines if line.source == "trainer")
    gaps = [gap for line in lines if (gap := line.metrics.get("weight_sync/check_gap"))]
    assert gaps and max(gaps) < 1e-4
    run.digest()
    [folder] = convert_all(run.job / f"global_step_{STEPS}")
    assert folder.name == "lora_adapter" and read_config(folder)["r"] == 4
    held = sum(path.stat().st_size for path in folder.parent.glob("*.pt"))
    assert held < sum(path.stat().st_size for path in tiny_folders.model.glob("*.safetensors")) / 2
