"""The schema describes itself: docs, the reference page, JSON Schema; and importing it stays light."""

from __future__ import annotations

import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from trinity_core.config import Config, config_from_dict, load_config, notices, public_dict, to_yaml
from trinity_core.config.fields import settings
from trinity_core.config.json_schema import json_schema
from trinity_core.config.reference import PAGE, page
from trinity_core.config.schema import AuxiliaryModelConfig, OptimizerConfig
from trinity_core.config.verl import spellings

RECIPES = Path(__file__).parents[2] / "configs"


def sections(cls: type = Config) -> Iterator[type]:
    yield cls
    for setting in settings(cls):
        if setting.section is not None:
            yield from sections(setting.section)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m trinity_core.config.reference"


@pytest.mark.parametrize("cls", dict.fromkeys(sections()), ids=lambda cls: cls.__name__)
def test_every_setting_says_what_it_is(cls: type) -> None:
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")
    for setting in settings(cls):
        assert setting.doc.endswith((".", "`")), f"{cls.__name__}.{setting.name}"


def test_settings_describe_themselves() -> None:
    found = {setting.name: setting for setting in settings(OptimizerConfig)}
    assert (found["lr"].kind, found["lr"].default, str(found["lr"].bounds)) == ("number", 1e-6, "more than 0")
    assert found["warmup_style"].choices == ("constant", "cosine", "linear")
    assert found["lr_warmup_steps"].unit == "steps"
    inherited = {setting.name: setting for setting in settings(AuxiliaryModelConfig)}
    assert inherited["engine_num"].doc and inherited["max_model_len"].derived and inherited["name"].optional


def test_json_schema() -> None:
    schema = json_schema()
    interpolation = {"$ref": "#/$defs/Interpolation"}
    mode, repeats = schema["properties"]["mode"], schema["$defs"]["AlgorithmConfig"]["properties"]["repeat_times"]
    assert mode["anyOf"] == [{"enum": ["both", "train", "explore", "serve", "bench"], "type": "string"}, interpolation]
    assert repeats["anyOf"] == [{"type": "integer", "minimum": 1}, interpolation, {"type": "null"}]
    assert schema["$defs"]["StageConfig"]["properties"]["stage_name"]["type"] == ["string", "number", "boolean"]
    assert not {"given", "_given"} & schema["properties"].keys()


def test_verl_spellings_name_existing_settings() -> None:
    for key in spellings().values():
        cls: type = Config
        for name in key.split("."):
            (setting,) = [setting for setting in settings(cls) if setting.name == name]
            cls = setting.section or cls
        assert setting.section is None


def test_defaults_fit_their_own_schema() -> None:
    for cls in set(sections()):
        for setting in settings(cls):
            if setting.default is not None:
                assert getattr(cls.model_validate({setting.name: setting.default}), setting.name) is not None


def test_secrets_are_masked() -> None:
    config = load_config(
        RECIPES / "gsm8k/gsm8k.yaml",
        [
            "monitor.monitor_args={api_key: abc, uri: 'https://me:abc@host'}",
            "explorer.env_vars.JUDGE_API_KEY=abc",
            "explorer.env_vars.GITHUB_PAT=abc",
            "buffer.trainer_input.experience_buffer.path=postgresql://me:abc@host/db",
        ],
    )
    shown = public_dict(config)
    assert shown["monitor"]["monitor_args"] == {"api_key": "***", "uri": "https://me:***@host"}
    assert "abc" not in str(shown)
    assert shown["model"]["max_prompt_tokens"] == 1024
    assert config.monitor.monitor_args["api_key"] == "abc"


def test_ineffective_settings_get_a_notice() -> None:
    quiet = load_config(RECIPES / "gsm8k/gsm8k.yaml")
    assert notices(quiet) == []
    loud = load_config(
        RECIPES / "gsm8k/gsm8k.yaml",
        ["buffer.train_batch_size=100", "trainer.max_token_len_per_gpu=64", "trainer.trainer_config.critic.strategy=x"],
    )
    ignored, batches, budget = notices(loud)
    assert "critic.strategy" in ignored and "1024 experiences" in batches and "2048 tokens" in budget
    unread = load_config(RECIPES / "gsm8k/gsm8k.yaml", ["service.data_juicer.auto_start=true"])
    assert notices(unread) == ["Accepted, but without effect here: service.data_juicer."]
    filtered = ["data_processor.experience_pipeline.operators=[{name: reward_filter}]"]
    assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", filtered)) == []
    trainer = load_config(RECIPES / "gsm8k/trainer.yaml", filtered)
    assert notices(trainer) == ["Accepted, but without effect here: data_processor.experience_pipeline."]
    other = load_config(RECIPES / "gsm8k/gsm8k.yaml", ["monitor.monitor_args={uri: a, mode: offline, api_key: b}"])
    keys = "monitor.monitor_args.mode, monitor.monitor_args.api_key"
    assert notices(other) == [f"Accepted, but without effect here: {keys}."]
    backup = load_config(RECIPES / "gsm8k/gsm8k.yaml", ["buffer.trainer_input.experience_buffer.path=backup.json"])
    assert notices(backup) == ["Accepted, but without effect here: buffer.trainer_input.experience_buffer.path."]
    assert notices(load_config(RECIPES / "sft/sft.yaml")) == []
    bypass = "algorithm.rollout_correction=bypass"
    assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [*filtered, bypass])) == []
    without_ratio = load_config(RECIPES / "gsm8k/gsm8k.yaml", [*filtered, bypass, "algorithm.algorithm_type=opmd"])
    assert notices(without_ratio) == ["Accepted, but without effect here: algorithm.rollout_correction."]
    queue = "buffer.trainer_input.experience_buffer"
    waiting = f"{queue}.reuse_cooldown_time"
    reuse = load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{waiting}=60"])
    assert notices(reuse) == [f"Accepted, but without effect here: {waiting}."]
    for used in (
        "buffer.trainer_input.experience_buffer.use_priority_queue=true",
        "algorithm.sample_strategy=priority",
    ):
        assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{waiting}=60", used])) == []
    stale = load_config(
        RECIPES / "gsm8k/gsm8k.yaml",
        [f"{queue}.use_priority_queue=true", "algorithm.sample_strategy=staleness_control"],
    )
    assert notices(stale) == [f"Accepted, but without effect here: {queue}.use_priority_queue."]
    idle = load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{queue}.replay_buffer.reuse_cooldown_time=60"])
    assert notices(idle) == [f"Accepted, but without effect here: {queue}.replay_buffer.reuse_cooldown_time."]
    replay = f"{queue}.replay_buffer={{enable: true, reuse_cooldown_time: 60}}"
    assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [replay])) == []
    given = load_config(RECIPES / "sft/sft.yaml", [replay])
    assert notices(given) == [f"Accepted, but without effect here: {queue}.replay_buffer.enable."]
    other = "buffer.trainer_input.auxiliary_buffers.other"
    alone = load_config(RECIPES / "sft/sft.yaml", [f"{other}.path=x"])
    assert notices(alone) == [f"Accepted, but without effect here: {other}."]
    joined = load_config(RECIPES / "sft/sft.yaml", [f"{other}={{path: x, share: 3}}", f"{queue}.name=own"])
    assert notices(joined) == ["The rows of a batch come from several data sets: 25% from 'own', 75% from 'other'."]
    actor = "trainer.trainer_config.actor_rollout_ref.actor.fsdp_config"
    offload = [f"{actor}.param_offload=true", f"{actor}.optimizer_offload=true"]
    for changes, keys in (
        (["trainer.zero_stage=0", "trainer.dtype=float32"], [f"{actor}.param_offload", f"{actor}.optimizer_offload"]),
        (["trainer.zero_stage=0"], [f"{actor}.param_offload"]),
        (["trainer.zero_stage=2"], [f"{actor}.param_offload"]),
        (["trainer.zero_stage=3"], []),
    ):
        said = notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [*offload, *changes]))
        assert said == ([f"Accepted, but without effect here: {', '.join(keys)}."] if keys else [])
    tasks = "buffer.explorer_input"
    unmixed = [f"{tasks}.taskset.weight=2", f"{tasks}.eval_tasksets.0.task_selector.selector_type=shuffle"]
    keys = f"{tasks}.eval_tasksets[0].task_selector, {tasks}.taskset.weight"
    said = notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", unmixed))
    assert said == [f"Accepted, but without effect here: {keys}."]
    pushed = [f"synchronizer.sync_style={style}" for style in ("explorer_driven", "dynamic_by_explorer")]
    for style in pushed:
        [said_once] = notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [style, "synchronizer.sync_method=nccl"]))
        assert said_once.startswith("With sync_method nccl the trainer decides")
        assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [style, "synchronizer.sync_method=memory"])) == []
    offset = "synchronizer.sync_offset"
    assert notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{offset}=2"])) == []
    ahead = load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{offset}=2", "synchronizer.sync_style=trainer_driven"])
    assert notices(ahead) == [f"Accepted, but without effect here: {offset}."]
    dpo = load_config(RECIPES / "sft/sft.yaml", ["algorithm.algorithm_type=dpo", "algorithm.repeat_times=4"])
    assert notices(dpo) == ["algorithm.repeat_times is 2 for dpo; the 4 given is not used."]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ((), ["actor", "critic"]),
        (("trainer.use_dynamic_bsz=false",), []),
        (("{verl}.critic.use_dynamic_bsz=false",), ["actor"]),
        (("{verl}.critic.use_dynamic_bsz=false", "{verl}.critic.ppo_micro_batch_size_per_gpu=null"), []),
    ],
)
def test_micro_batch_rows_are_announced_if_unused(changes: tuple[str, ...], keys: list[str]) -> None:
    verl = "trainer.trainer_config"
    config = load_config(RECIPES / "verl_align/ppo_example.yaml", [change.format(verl=verl) for change in changes])
    said = notices(config)[0]
    for key in ("actor", "critic"):
        path = f"{verl}.actor_rollout_ref.actor" if key == "actor" else f"{verl}.critic"
        assert (f"{path}.ppo_micro_batch_size_per_gpu" in said) == (key in keys)


def test_importing_is_light(tmp_path: Path) -> None:
    """The modules are compiled by the first of three runs, if not before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    program = (
        "import sys, time; start = time.process_time(); import trinity_core.config\n"
        "took = time.process_time() - start\n"
        "heavy = {'torch', 'ray', 'vllm', 'prefect', 'transformers', 'datasets', 'mlflow', 'deepspeed', 'omegaconf'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "print(took)"
    )
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=environment) for _ in range(3)]
    times = [float(run.stdout) for run in runs]
    assert min(times) < 0.5


def test_unknown_settings_raise_in_code() -> None:
    config = config_from_dict({"model": {"model_path": "m", "max_model_len": 8}, "mode": "train"})
    with pytest.raises(AttributeError):
        config.model.max_len  # type: ignore[attr-defined]  # noqa: B018
    for key in ("model.max_len", "modle.max_model_len", "modle"):
        with pytest.raises((ValidationError, AttributeError)):
            config.with_values({key: 3})


def test_a_configuration_is_immutable() -> None:
    config = load_config(RECIPES / "gsm8k/gsm8k.yaml")
    before = to_yaml(config)
    for change in (
        lambda: setattr(config, "name", "other"),
        lambda: setattr(config.buffer.explorer_input.tasksets[0], "repeat_times", 3),
        lambda: delattr(config.model, "model_path"),
        lambda: config.algorithm.policy_loss_fn_args.update(clip_range=0.1),
        lambda: config.explorer.env_vars.setdefault("A", "b"),
        lambda: operator.setitem(config.buffer.explorer_input.tasksets, 0, None),
    ):
        with pytest.raises((ValidationError, TypeError)):
            change()
    assert to_yaml(config) == before


def test_with_values_returns_another_configuration() -> None:
    config = load_config(RECIPES / "gsm8k/gsm8k.yaml")
    other = config.with_values({"name": "other", "synchronizer.sync_method": "memory", "trainer.worker_num": "2"})
    assert (other.name, other.synchronizer.sync_method, other.trainer.worker_num) == ("other", "memory", 2)
    assert config.synchronizer.sync_method == "nccl" and other.given == config.given
    back = {"name": config.name, "synchronizer": config.synchronizer, "trainer": config.trainer}
    assert other.with_values(back) == config
    with pytest.raises(ValidationError, match="memroy"):
        config.with_values({"synchronizer.sync_method": "memroy"})
    again = pickle.loads(pickle.dumps(other))
    assert again == other and again.given == config.given
