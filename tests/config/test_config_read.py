"""Every setting of the schema is read by the code that runs, or a notice says that it has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel
from setting_reads import SCHEMA, Read, setting_reads

from trinity_core.config import config_from_dict, notices, source
from trinity_core.config.annotations import types_of
from trinity_core.config.fields import settings

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "trinity_core/config"
GOOD = source.read(Path(__file__).parent / "documents/quick_start.yaml").tree
SAYING = ("schema", "dialects", "import_verl")
"""Folders of `config` that declare, rename or describe settings."""
CHECKING = ("rules", "notices", "reference", "json_schema", "listing")
"""Files of `config`, by the end of their names, that check or describe them."""

ENGINES = ("RolloutModelConfig", "AuxiliaryModelConfig")
OTHERWISE_READ = (
    ("inference/settings.py takes them over by name", ENGINES, "gpu_memory_utilization kv_cache_gib enforce_eager"),
    ("inference/settings.py takes it over by name", ENGINES, "enable_prefix_caching"),
    ("both of its values mean the same here, as its doc says", ENGINES, "engine_type"),
    ("both of its values mean the same here, as its doc says", ["TrainerConfig"], "trainer_type"),
    ("config/load.py puts the file in its place", ["TrainerConfig"], "trainer_config_path"),
    ("the schema's property weight_points reads it", ["TasksetConfig"], "weight_by_step"),
    ("config/resolve.py merges the stage's sections into the run's", ["StageConfig"],
     "model cluster buffer explorer trainer synchronizer data_processor"),
)  # fmt: skip
"""Why, section, settings: read, but not as an attribute of their section."""

WITHOUT_EFFECT = {
    Read("AuxiliaryModelConfig", "enable_history"): [
        "cluster.gpu_per_node=4",
        "explorer.auxiliary_models=[{model_path: /m, enable_history: true}]",
    ],
    Read("TrainerConfig", "ulysses_sequence_parallel_size"): [
        "cluster.gpu_per_node=4",
        "trainer.ulysses_sequence_parallel_size=2",
        "trainer.worker_num=2",
    ],
    Read("TaskPipelineConfig", "num_process"): ["data_processor.task_pipeline={inputs: [/d], num_process: 2}"],
}
"""Settings that are accepted with a notice, and how to give them."""


def running_files() -> list[Path]:
    """The source but what only declares or checks settings."""
    files = [path for top in ("trinity_core", "flows", "tasks") for path in sorted((ROOT / top).rglob("*.py"))]
    return [
        path
        for path in files
        if path.parent.name not in SAYING and not (path.parent == CONFIG and path.stem.endswith(CHECKING))
    ]


def spelled(section: type[BaseModel]) -> set[str]:
    """The settings that are other spellings of native ones, or hold nothing else."""
    return {
        each.name
        for each in settings(section)
        if each.same_as or (each.section and spelled(each.section) == set(types_of(each.section)))
    }


def test_every_setting_is_read_or_has_a_notice() -> None:
    read = setting_reads(running_files())
    unread = {
        Read(name, setting)
        for name, cls in SCHEMA.items()
        for setting in types_of(cls).keys() - spelled(cls)
        if Read(name, setting) not in read
    }
    others = {Read(name, each) for _, names, given in OTHERWISE_READ for name in names for each in given.split()}
    assert unread == {*others, *WITHOUT_EFFECT}


@pytest.mark.parametrize("setting", WITHOUT_EFFECT, ids="-".join)
def test_a_setting_without_effect_has_a_notice(setting: Read) -> None:
    made = config_from_dict(GOOD, WITHOUT_EFFECT[setting])
    assert any(setting.name in notice for notice in notices(made) if notice.startswith("Accepted, but without effect"))


def test_reads_are_told_apart_by_section(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def one(config: Config, models: list[RolloutModelConfig]):\n"
        "    given = config.buffer.explorer_input\n"
        "    for each, model in zip(given.eval_tasksets, models):\n"
        "        print(each.format.prompt_key, each.split, model.seed, other.path, other.node_num)\n"
        "    return [part.name for part in config.explorer.auxiliary_models]\n"
    )
    assert setting_reads([file]) - {Read("Config", "buffer"), Read("Config", "explorer")} == {
        Read("BufferConfig", "explorer_input"),
        Read("ExplorerInputConfig", "eval_tasksets"),
        Read("TasksetConfig", "format"),
        Read("FormatConfig", "prompt_key"),
        Read("TasksetConfig", "split"),
        Read("RolloutModelConfig", "seed"),
        Read("AuxiliaryModelConfig", "seed"),
        Read("ClusterConfig", "node_num"),
        Read("ExplorerConfig", "auxiliary_models"),
        Read("AuxiliaryModelConfig", "name"),
    }
