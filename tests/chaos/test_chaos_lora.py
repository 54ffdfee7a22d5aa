"""A run that trains a LoRA adapter, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.killing import ChaosRun, Kill

from trinity_core.adapters import read_config
from trinity_core.checkpoints.convert import convert_all
from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking import read_metrics

STEPS = 4
LORA = "model.lora_configs=[{lora_rank: 4, lora_alpha: 16}]"


@pytest.mark.slow
def test_a_killed_run_with_an_adapter_ends_with_the_same_adapter(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Two workers train it with a KL term; engines load it by each sync; the kill comes between two checkpoints."""
    ended = {}
    for name, kills in (("undisturbed", ()), ("killed", (Kill("trainer", 3),))):
        overrides = (LORA, "trainer.worker_num=2", "trainer.zero_stage=2", "trainer.save_interval=2")
        overrides += ("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={kl_coef: 0.01}")
        with ChaosRun(tmp_path / name, tiny_folders.model, tiny_folders.data, STEPS, overrides=overrides) as run:
            run.go(kills)
            assert run.faults() == [] and run.attempts == 1 + len(kills)
            ended[name] = run.digest()
            folders = convert_all(run.job / f"global_step_{STEPS}")
            assert [folder.name for folder in folders] == ["lora_adapter"]
            assert read_config(folders[0])["r"] == 4
            held = sum(path.stat().st_size for path in (run.job / f"global_step_{STEPS}/actor").glob("*.pt"))
            assert held < sum(path.stat().st_size for path in tiny_folders.model.glob("*.safetensors")) / 2
            gaps = [gap for line in read_metrics(run.job) if (gap := line.metrics.get("weight_sync/check_gap"))]
            assert gaps and max(gaps) < 1e-4
    assert ended["killed"] == ended["undisturbed"]
