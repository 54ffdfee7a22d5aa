"""A run that trains a LoRA adapter, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.killing import ChaosRun, Kill

from trinity_core.adapters import read_config
from trinity_core.checkpoints.convert import convert_all
from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking import read_metrics

STEPS = 6
OVERRIDES = (
    "model.lora_configs=[{lora_rank: 4, lora_alpha: 16}]",
    *("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={kl_coef: 0.01}"),
    *("trainer.worker_num=2", "trainer.zero_stage=2", "trainer.save_interval=4"),
)


def numbers_of(run: ChaosRun, step: int) -> dict[str, float]:
    """The trainer's metrics of a step, but for times."""
    found = [line.metrics for line in read_metrics(run.job) if line.source == "trainer" and line.step == step]
    return {name: value for name, value in found[-1].items() if not name.startswith("timing")}


@pytest.mark.slow
def test_a_killed_run_with_an_adapter_takes_the_same_steps_again(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Two workers train it with a KL term, engines load it by each sync; all is killed between two checkpoints."""
    with ChaosRun(tmp_path, tiny_folders.model, tiny_folders.data, STEPS, overrides=OVERRIDES) as run:
        run.kill(Kill("flow", 5))
        before = numbers_of(run, 5)
        run.go()
        assert run.faults() == [] and run.attempts == 2
        assert numbers_of(run, 5) == before and "actor/kl_loss" in before
        run.digest()
        [folder] = convert_all(run.job / f"global_step_{STEPS}")
        assert folder.name == "lora_adapter" and read_config(folder)["r"] == 4
        held = sum(path.stat().st_size for path in folder.parent.glob("*.pt"))
        assert held < sum(path.stat().st_size for path in tiny_folders.model.glob("*.safetensors")) / 2
        gaps = [gap for line in read_metrics(run.job) if (gap := line.metrics.get("weight_sync/check_gap"))]
        assert gaps and max(gaps) < 1e-4
