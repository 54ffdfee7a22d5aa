"""Explorers and trainer of a run have files of their own, and must agree where one depends on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raising import raising
from run.lock_holders import other_process

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import read_json, write_json
from trinity_core.base.runlock import release
from trinity_core.config import Config, config_from_dict
from trinity_core.run.made_from import check_shared_settings
from trinity_core.run.stage import lock_names, lock_run

Make = Callable[..., Config]
STALENESS, STYLE, INTERVAL = (f"synchronizer.{key}=" for key in ("max_staleness", "sync_style", "sync_interval"))
LORA = "model.lora_configs=[{lora_rank: %s, target_modules: [q_proj, k_proj]}]"
STORE = "buffer.trainer_input.experience_buffer.path"
BATCH, TASKS = "buffer.train_batch_size=", "buffer.explorer_input.taskset"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Make]:
    """Makes the configuration of an explorer or a trainer; what it locks is released at the end."""
    configs: list[Config] = []

    def make(mode: str, *overrides: str) -> Config:
        taskset = {"path": "d", "rollout_args": {"temperature": 0.7}}
        tree = {
            "mode": mode,
            "checkpoint_root_dir": str(tmp_path),
            "algorithm": {"repeat_times": 4},
            "model": {"model_path": "m", "max_model_len": 8},
            "cluster": {"gpu_per_node": 0},
            "buffer": {"batch_size": 8, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        }
        configs.append(config_from_dict(tree, overrides))
        return configs[-1]

    yield make
    for config in configs:
        for name in lock_names(config, {"explore", "train"}):
            release(config.job_dir, name)


def start(config: Config) -> None:
    lock_run(config, {"explore" if config.mode == "explore" else "train"})


@pytest.mark.parametrize(
    ("theirs", "mine", "key"),
    [
        ([], [STALENESS + "2"], "synchronizer.max_staleness"),
        ([STALENESS + "1"], [STALENESS + "2"], "synchronizer.max_staleness"),
        ([STALENESS + "9", INTERVAL + "4"], [STALENESS + "9"], "synchronizer.sync_interval"),
        ([STALENESS + "9", STYLE + "explorer_driven"], [STALENESS + "9", BATCH + "16"], "synchronizer.sync_style"),
        ([LORA % "8"], [LORA % "4"], "model.lora_configs"),
        (["buffer.trainer_input.experience_buffer.path=postgresql://me:secret@host/db"], [], STORE),
    ],
)
def test_members_that_differ_are_refused(made: Make, theirs: list[str], mine: list[str], key: str) -> None:
    start(made("explore", *theirs))
    for again in (made("train", *mine), made("explore", "explorer.name=new", *mine), made("train", *mine)):
        with raising(TrinityError, key=key) as error:
            start(again)
        assert "secret" not in str(error.value)
    start(made("train", *theirs))


@pytest.mark.parametrize(
    "mine",
    [
        [INTERVAL + "4", STYLE + "trainer_driven", "synchronizer.sync_timeout=9"],
        [BATCH + "16", "buffer.batch_size=2"],
        [f"{TASKS}.rollout_args.temperature=0.9"],
        ["algorithm.repeat_times=2", "synchronizer.sync_in_flight=true"],
    ],
)
def test_members_may_differ_where_none_depends_on_it(made: Make, mine: list[str]) -> None:
    start(made("explore"))
    start(made("train", *mine))
    start(made("explore", "explorer.name=new", *mine))


def test_part_beside_another_with_other_software_is_told(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = made("train")
    start(trainer)
    start(made("explore", "explorer.name=first"))
    assert "trinity_core" not in caplog.text
    record = trainer.job_dir / ".training.settings.json"
    theirs = read_json(record)
    assert theirs is not None
    theirs["software"]["trinity_core"] = "0.0.9+4f1b2c"
    write_json(record, theirs)
    start(made("explore", "explorer.name=second"))
    assert "0.0.9+4f1b2c" in caplog.text


def test_an_explorer_may_look_as_often_as_it_likes(made: Make) -> None:
    for name, interval in (("a", 2), ("b", 5)):
        driven = [STALENESS + "2", STYLE + "explorer_driven", f"{INTERVAL}{interval}"]
        start(made("explore", f"explorer.name={name}", *driven))


def test_only_those_at_work_count(made: Make) -> None:
    """The file of a run that has ended may be changed; the other one is then started with the change, too."""
    before, after = made("train"), made("explore", STALENESS + "2")
    before.job_dir.mkdir(parents=True)
    trainer = other_process(before, "training")
    check_shared_settings(before, ["training"])
    try:
        with raising(TrinityError, key="synchronizer.max_staleness"):
            start(after)
    finally:
        trainer.kill()
        trainer.wait()
    start(after)
    with raising(TrinityError, key="synchronizer.max_staleness"):
        start(before)
    start(made("train", STALENESS + "2"))
