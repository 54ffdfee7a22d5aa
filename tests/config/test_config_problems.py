"""Every mistake is reported by key and code, with its value, file and line, and all of them at once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.algorithms import ADVANTAGES
from trinity_core.config import ConfigError, Finding, config_from_dict, config_from_text, load_config
from trinity_core.config.source import merge

GOOD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "documents/quick_start.yaml").read_text())
SFT: dict[str, Any] = {
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {"trainer_input": {"experience_buffer": {"storage_type": "file", "path": "data"}}},
}
AUXILIARY = "buffer.trainer_input.auxiliary_buffers"
BUFFER = "buffer.trainer_input.experience_buffer"
EXTRA = "explorer.rollout_model.extra_engine_args"
INPUT = "buffer.explorer_input"
STYLE = "synchronizer.sync_style=trainer_driven"


def problems(*changes: dict[str, Any], overrides: tuple[str, ...] = ()) -> list[Finding]:
    """What is reported of a good configuration with these changes; empty if it is accepted."""
    tree: dict[str, Any] = GOOD
    for change in changes:
        tree = merge(tree, change)
    try:
        config_from_dict(tree, overrides)
    except ConfigError as error:
        return error.problems
    return []


def mistake(code: str, changes: str, suggestion: str = "", key: str | None = None) -> Any:
    """Overrides of a good configuration, separated by ` & `, and what is reported: by default for the first one."""
    overrides = tuple(changes.split(" & "))
    key = overrides[0].partition("=")[0] if key is None else key
    return pytest.param(overrides, (key, code, suggestion), id=f"{key} {code}"[:60])


TABLE = [
    mistake("unknown-key", "algorithm.repeat_time=8", suggestion="repeat_times"),
    mistake("unknown-key", "modle.model_path=x", suggestion="model", key="modle"),
    mistake("unknown-choice", "explorer.rollout_model.tool_call_parser=hermis", suggestion="hermes"),
    mistake("unknown-choice", "explorer.rollout_model.reasoning_parser=qwen", suggestion="qwen3"),
    mistake("missing", "explorer.rollout_model.enable_auto_tool_choice=true"),
    mistake("out-of-range", "explorer.api_port=70000"),
    mistake("unknown-choice", "mode=trian", suggestion="train"),
    mistake("unknown-choice", "algorithm.algorithm_type=grop", suggestion="grpo"),
    mistake("unknown-name", "algorithm.kl_loss_fn=low_var_k", suggestion="low_var_kl"),
    mistake("unknown-argument", "algorithm.entropy_loss_fn_args.entropy_coeff=0.1", suggestion="entropy_coef"),
    mistake(
        "unknown-argument",
        "algorithm.policy_loss_fn_args={clip_rnage: 0.1}",
        suggestion="clip_range",
        key="algorithm.policy_loss_fn_args.clip_rnage",
    ),
    mistake("wrong-type", "algorithm.policy_loss_fn_args.clip_range=wide"),
    mistake("out-of-range", "algorithm.policy_loss_fn_args.clip_range=-1"),
    mistake("out-of-range", "algorithm.kl_loss_fn_args.kl_coef=-0.1"),
    mistake("unknown-choice", "algorithm.advantage_fn_args.std_cal_level=grup", suggestion="group"),
    mistake(
        "unknown-argument",
        "algorithm.advantage_fn_args.overlong={max_lenght: 9}",
        suggestion="max_length",
        key="algorithm.advantage_fn_args.overlong.max_lenght",
    ),
    mistake("wrong-type", "algorithm.advantage_fn_args.overlong=9"),
    mistake(
        "unknown-choice",
        f"algorithm.algorithm_type=mix & {AUXILIARY}.e.path=x & algorithm.sample_strategy_args={{inner: [a]}}",
        key="algorithm.sample_strategy_args.inner",
    ),
    mistake("unknown-argument", "algorithm.advantage_fn_args.epsilon=1 & algorithm.advantage_fn=rloo"),
    mistake("unknown-argument", "algorithm.kl_loss_fn_args.kl_coeff=0", suggestion="kl_coef"),
    mistake(
        "unknown-argument",
        "algorithm.sample_strategy_args.max_stalenes=2 & algorithm.sample_strategy=staleness_control",
        suggestion="max_staleness",
    ),
    mistake(
        "out-of-range",
        "synchronizer.max_staleness=3 & synchronizer.sync_interval=4 & synchronizer.sync_offset=1",
        suggestion="4",
    ),
    mistake(
        "out-of-range",
        "synchronizer.max_staleness=0 & synchronizer.sync_style=trainer_driven & synchronizer.sync_interval=4",
        suggestion="3",
    ),
    mistake("conflict", "synchronizer.max_staleness=9 & buffer.train_batch_size=8"),
    mistake("unknown-name", f"{BUFFER}.replay_buffer.priority_fn=linear_decy", suggestion="linear_decay"),
    mistake(
        "out-of-range",
        f"{BUFFER}.replay_buffer={{priority_fn: decay_limit_randomization, priority_fn_args: {{sigma: -1}}}}",
        key=f"{BUFFER}.replay_buffer.priority_fn_args.sigma",
    ),
    mistake(
        "two-spellings",
        f"{BUFFER}.reuse_cooldown_time=60 & {BUFFER}.replay_buffer={{enable: true, reuse_cooldown_time: 30}}",
        key=f"{BUFFER}.reuse_cooldown_time",
    ),
    mistake("conflict", f"{BUFFER}.replay_buffer.enable=true & algorithm.sample_strategy=staleness_control"),
    mistake(
        "conflict",
        f"{BUFFER}.replay_buffer.enable=true & algorithm.algorithm_type=mix & {AUXILIARY}.e.path=x & "
        "algorithm.sample_strategy_args={inner: staleness_control}",
    ),
    mistake("conflict", "synchronizer.max_staleness=1 & algorithm.sample_strategy=priority"),
    mistake(
        "two-spellings",
        "synchronizer.max_staleness=1 & algorithm.sample_strategy=staleness_control & "
        "algorithm.sample_strategy_args.max_staleness=2",
    ),
    mistake("out-of-range", "synchronizer.max_staleness=-1"),
    mistake("conflict", "synchronizer.sync_in_flight=true"),
    mistake(
        "conflict",
        "synchronizer.sync_in_flight=true & synchronizer.sync_style=explorer_driven & synchronizer.sync_method=memory",
    ),
    mistake("unknown-argument", "algorithm.sample_strategy_args.decay=1"),
    mistake("unknown-argument", "algorithm.rollout_correction_args.cpa=1", suggestion="cap"),
    mistake("conflict", "algorithm.repeat_times=1"),
    mistake("conflict", "algorithm.policy_loss_fn=dpo"),
    mistake("wrong-type", "algorithm.repeat_times=eight"),
    mistake("out-of-range", "buffer.batch_size=1" + "0" * 350),
    mistake("wrong-type", "algorithm.repeat_times=2.5"),
    mistake("wrong-type", "algorithm.optimizer.lr=.nan"),
    mistake("wrong-type", "algorithm.optimizer.lr=true"),
    mistake("wrong-type", "algorithm.optimizer.betas=[0.9]"),
    mistake("wrong-type", "algorithm.optimizer=3"),
    mistake("wrong-type", f"{INPUT}.taskset.path=[a.jsonl, '']"),
    mistake("wrong-type", f"{INPUT}.taskset.path=[a|b.jsonl]"),
    mistake("wrong-type", f"{INPUT}.taskset.path=[a, 3]"),
    mistake(
        "conflict", f"{INPUT}.taskset.path=[a.db, b.db] & {INPUT}.taskset.storage_type=queue & buffer.total_steps=2"
    ),
    mistake("conflict", f"{BUFFER}.path=[a.db, b.db] & {BUFFER}.storage_type=sql"),
    mistake("wrong-type", "explorer.eval_on_startup=2"),
    mistake("invalid", "name=a/b"),
    mistake("wrong-type", "seed=null"),
    mistake("out-of-range", "seed=4294967296"),
    mistake(
        "two-spellings",
        f"{INPUT}.taskset.task_selector.seed=1 & {INPUT}.taskset.data_selector.seed=2",
        key=f"{INPUT}.taskset.data_selector.seed",
    ),
    mistake("two-spellings", f"{INPUT}.taskset.weight_by_step={{1: 1}} & {INPUT}.taskset.weight=1"),
    mistake("out-of-range", f"{INPUT}.taskset.weight_by_step={{1: 1, 0: 2}}"),
    mistake("wrong-type", "model.model_path="),
    mistake("missing", "model.model_path=''"),
    mistake("missing", "model.model_path='???'"),
    mistake("missing", "model.max_model_len=null"),
    mistake("conflict", "model.min_response_tokens=1024"),
    mistake("conflict", f"{INPUT}.taskset.rollout_args.temperature=0.7 & model.top_p=0.9"),
    mistake("conflict", "model.max_response_tokens=2048"),
    mistake("conflict", "model.max_prompt_tokens=4096"),
    mistake("unresolved", "model.model_path=${oc.env:NOT_SET_ANYWHERE}"),
    mistake("unresolved", "model.model_path=${model.path}"),
    mistake("unresolved", "model.model_path=${model.model_path}"),
    mistake("unresolved", "model.model_path=${model"),
    mistake("unreadable", "explorer.env_vars=&x {a: *x}"),
    mistake("duplicate-key", "explorer.env_vars={a: b, a: c}", key="explorer.env_vars.a"),
    mistake("two-spellings", "model.chat_template_path=b & model.custom_chat_template=a"),
    mistake("conflict", "cluster.gpu_per_node=1 & cluster.colocate=false", key="explorer.rollout_model.engine_num"),
    mistake(
        "conflict",
        "cluster.gpu_per_node=1 & synchronizer.sync_style=trainer_driven",
        key="explorer.rollout_model.engine_num",
    ),
    mistake("invalid", f"{EXTRA}.quantization=awq"),
    mistake("unknown-key", f"{EXTRA}.quantisation=fp8", suggestion="quantization"),
    mistake("conflict", f"{EXTRA}.enforce_eager=true"),
    mistake("invalid", f"{EXTRA}.speculative_config={{method: eagle}}"),
    mistake("invalid", f"{EXTRA}.speculative_config={{method: ngram, rejection_sample_method: synthetic}}"),
    mistake("conflict", f"{EXTRA}.quantization=fp8 & cluster.gpu_per_node=0"),
    mistake("conflict", f"algorithm.rollout_correction=none & {EXTRA}.quantization=fp8"),
    mistake("conflict", "cluster.colocate=true"),
    mistake("conflict", "cluster.colocate=true & cluster.gpu_per_node=1 & synchronizer.sync_style=trainer_driven"),
    mistake("conflict", "cluster.colocate=true & cluster.gpu_per_node=1 & trainer.zero_stage=3"),
    mistake(
        "conflict",
        "cluster.colocate=true & cluster.gpu_per_node=1 & "
        f"{BUFFER}.replay_buffer={{enable: true, reuse_cooldown_time: 1}}",
    ),
    mistake("conflict", "explorer.rollout_model.engine_num=3"),
    mistake("conflict", f"monitor.stop.target=0.9 & {INPUT}.eval_tasksets=[]"),
    mistake("conflict", "monitor.stop.patience=2 & explorer.eval_interval=0"),
    mistake(
        "conflict",
        "cluster.node_num=4 & cluster.gpu_per_node=4 & cluster.ray_address=auto & "
        f"{BUFFER}.path=null & explorer.auxiliary_models=[{{model_path: m, tensor_parallel_size: 8}}]",
        key="explorer.auxiliary_models[0].tensor_parallel_size",
    ),
    mistake("conflict", "trainer.worker_num=2"),
    mistake(
        "conflict", "trainer.worker_num=2 & cluster.gpu_per_node=1 & explorer.rollout_model.gpu_memory_utilization=0.5"
    ),
    mistake(
        "conflict",
        "cluster.gpu_per_node=0 & explorer.auxiliary_models=[{model_path: m, tensor_parallel_size: 2}]",
        key="explorer.auxiliary_models[0].tensor_parallel_size",
    ),
    mistake("two-spellings", "trainer.total_steps=6 & buffer.total_steps=5"),
    mistake("two-spellings", f"{INPUT}.tasksets=[{{name: a, path: b}}]"),
    mistake("missing", f"{INPUT}.taskset=null"),
    mistake("missing", f"{INPUT}.taskset.path=''"),
    mistake("conflict", f"{INPUT}.taskset.repeat_times=1"),
    mistake(
        "duplicate-name",
        f"{INPUT}.eval_tasksets=[{{name: a, path: b}}, {{name: a, path: c}}]",
        key=f"{INPUT}.eval_tasksets[1].name",
    ),
    mistake("missing", f"{INPUT}.eval_tasksets=[] & mode=bench"),
    mistake("conflict", "mode=explore", suggestion="checkpoint", key="synchronizer.sync_method"),
    mistake("conflict", "synchronizer.sync_method=champion", suggestion="checkpoint"),
    mistake("conflict", "cluster.node_num=2"),
    mistake("conflict", "synchronizer.sync_method=memory & cluster.node_num=2 & cluster.ray_address=auto"),
    mistake("out-of-range", "synchronizer.sync_interval=0"),
    mistake("conflict", "algorithm.algorithm_type=sft", key="mode"),
    mistake("missing", "algorithm.algorithm_type=mix", key=AUXILIARY),
    mistake("conflict", f"{AUXILIARY}.e.held_out=true & {AUXILIARY}.e.path=x"),
    mistake("conflict", f"{BUFFER}.held_out=true"),
    mistake(
        "conflict",
        f"{AUXILIARY}.e.held_out=true & mode=train & algorithm.algorithm_type=sft & {BUFFER}.path=x & "
        f"{BUFFER}.storage_type=file & {AUXILIARY}.e.path=x & {AUXILIARY}.e.share=1",
    ),
    mistake(
        "out-of-range",
        f"algorithm.sample_strategy_args.expert_data_ratio=1 & algorithm.algorithm_type=mix & {AUXILIARY}.e.path=x",
    ),
    mistake(
        "missing", f"algorithm.algorithm_type=mix & {AUXILIARY}.expert.split=train", key=f"{AUXILIARY}.expert.path"
    ),
    mistake("conflict", "algorithm.sample_strategy=mix"),
    mistake(
        "conflict",
        f"algorithm.algorithm_type=mix & {AUXILIARY}.expert={{path: x, storage_type: queue}}",
        key=f"{AUXILIARY}.expert.storage_type",
    ),
    mistake("conflict", f"{BUFFER}.human_verdicts.enable=true"),
    mistake(
        "conflict",
        f"algorithm.algorithm_type=mix & {AUXILIARY}.expert={{path: x, human_verdicts: {{enable: true}}}}",
        key=f"{AUXILIARY}.expert.human_verdicts.enable",
    ),
    mistake(
        "missing",
        "explorer.auxiliary_models=[{name: j}] & cluster.gpu_per_node=4",
        key="explorer.auxiliary_models[0].model_path",
    ),
    mistake("conflict", f"{BUFFER}.storage_type=file"),
    mistake("two-spellings", "algorithm.optimizer.lr_warmup_steps_ratio=0.1 & algorithm.optimizer.lr_warmup_steps=5"),
    mistake("conflict", "trainer.torch_compile=true & trainer.zero_stage=3"),
    mistake("conflict", "trainer.ulysses_sequence_parallel_size=2 & trainer.worker_num=1"),
    mistake("conflict", "trainer.ulysses_sequence_parallel_size=2 & cluster.gpu_per_node=0"),
    mistake("conflict", "trainer.ulysses_sequence_parallel_size=4 & cluster.gpu_per_node=8"),
    mistake("unknown-key", "trainer.trainer_config.actor_rollout_ref.actor.grad_clp=1", suggestion="grad_clip"),
    mistake("out-of-range", "trainer.trainer_config.actor_rollout_ref.actor.grad_clip=-1"),
    mistake("unsupported-key", "trainer.trainer_config.trainer.resume_from_path=x"),
    mistake("unreadable", "trainer.trainer_config_path=nowhere.yaml"),
    mistake("two-spellings", "trainer.trainer_config_path=a.yaml & trainer.trainer_config.trainer.critic_warmup=1"),
    mistake(
        "unknown-argument",
        "monitor.monitor_type=mlflow & monitor.monitor_args={url: 'http://localhost:5000'}",
        suggestion="uri",
        key="monitor.monitor_args.url",
    ),
    mistake("duplicate-name", "stages=[{stage_name: a}, {stage_name: a}]", key="stages[1].stage_name"),
    mistake("invalid", "stages=[{mode: both}]", key="stages[0].stage_name"),
    mistake("unknown-key", "stages=[{stage_name: a, modell: {}}]", suggestion="model", key="stages[0].modell"),
    mistake(
        "unknown-key",
        "stages=[{stage_name: a, algorithm: {repeat_time: 2}}]",
        suggestion="repeat_times",
        key="stages[0].algorithm.repeat_time",
    ),
    mistake(
        "conflict", "stages=[{stage_name: a, mode: explore}]", suggestion="checkpoint", key="synchronizer.sync_method"
    ),
    mistake("missing", f"{BUFFER}.path=null & mode=train & algorithm.algorithm_type=sft & {BUFFER}.storage_type=file"),
    mistake("conflict", f"{BUFFER}.storage_type=queue & mode=train & algorithm.algorithm_type=sft & {BUFFER}.path=x"),
    mistake("invalid", f"{BUFFER}.path=backup.json & {BUFFER}.storage_type=sql"),
    mistake(
        "conflict",
        "buffer.train_batch_size=7 & mode=train & algorithm.algorithm_type=dpo & "
        f"{BUFFER}.path=x & {BUFFER}.storage_type=file",
    ),
    mistake(
        "conflict",
        f"{BUFFER}.format.prompt_type=messages & mode=train & algorithm.algorithm_type=cpt & "
        f"{BUFFER}.path=x & {BUFFER}.storage_type=file",
    ),
    mistake("bad-override", "buffer.batch_size", key=""),
    mistake("bad-override", f"{INPUT}.eval_tasksets.none.path=1"),
    mistake("bad-override", "model.lora_configs.0.lora_rank=8"),
    mistake("unreadable", "project=["),
]


@pytest.mark.parametrize(("overrides", "reported"), TABLE)
def test_mistakes_are_reported_with_key_and_suggestion(
    overrides: tuple[str, ...], reported: tuple[str, str, str]
) -> None:
    (problem,) = problems(overrides=overrides)
    assert (problem.key, problem.code, problem.suggestion) == reported


@pytest.mark.parametrize(
    "path",
    ["foo", "x.parquet", "sqlite://foo.db", "sqlite:///:memory:", "postgres://me:secret@host/db"],
)
def test_store_path_must_be_a_database(path: str) -> None:
    (problem,) = problems({"buffer": {"trainer_input": {"experience_buffer": {"path": path}}}})
    assert (problem.key, problem.code) == (f"{BUFFER}.path", "invalid") and "secret" not in str(problem)


def test_supervised_runs_may_inherit_any_sync_method() -> None:
    assert config_from_dict(merge(GOOD, SFT)).synchronizer.sync_method == "nccl"


def test_engine_and_one_worker_may_share_the_only_gpu() -> None:
    config_from_dict(GOOD, ["cluster.gpu_per_node=1", "trainer.worker_num=1"])


def test_all_problems_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "project: p\n"
        "algorithm:\n"
        "  algorithm_type: grpo\n"
        "  repeat_time: 8\n"
        "model:\n"
        "  max_model_len: lots\n"
        "buffer:\n"
        "  explorer_input:\n"
        "    eval_tasksets:\n"
        "      - name: a\n"
        "        path: x\n"
        "      - name: a\n"
        "        path: ${oc.env:NOT_SET_ANYWHERE}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["synchronizer.sync_interval=0"])
    by_place = {(problem.key, problem.line): problem for problem in caught.value.problems}
    lines = {
        ("algorithm.repeat_time", 4),
        ("model.max_model_len", 6),
        ("model.model_path", 5),
        ("buffer.explorer_input.eval_tasksets[1].path", 13),
        ("buffer.explorer_input.eval_tasksets[1].name", 12),
        ("buffer.explorer_input.taskset", 8),
        ("synchronizer.sync_interval", None),
    }
    assert set(by_place) == lines
    assert by_place["synchronizer.sync_interval", None].file == "override 'synchronizer.sync_interval=0'"
    assert by_place["algorithm.repeat_time", 4].value == 8
    assert f"{path}:4: algorithm.repeat_time" in str(caught.value)


def test_stage_problem_has_the_stages_line() -> None:
    text = yaml.safe_dump(GOOD, sort_keys=False)
    line = len(text.splitlines())
    text += "stages:\n  - stage_name: warm\n    mode: train\n    algorithm:\n      algorithm_type: stf\n"
    (problem,) = [problem for problem in _of_text(text) if problem.suggestion == "sft"]
    assert (problem.key, problem.line) == ("stages[0].algorithm.algorithm_type", line + 5)


@pytest.mark.parametrize("stage", ["", "stages.a."])
def test_an_unknown_section_of_an_override_is_at_the_override(stage: str) -> None:
    override = f"{stage}algorithm.optimiser.lr=1"
    (problem,) = problems({"stages": [{"stage_name": "a"}]}, overrides=(override,))
    assert problem.file == f"override '{override}'"
    assert problem.key == stage.replace(".a.", "[0].") + "algorithm.optimiser" and problem.suggestion == "optimizer"


def test_problem_shared_by_stages_is_reported_once() -> None:
    reported = problems({"stages": [{"stage_name": "a"}, {"stage_name": "b"}]}, overrides=("model.max_model_len=-3",))
    assert [problem.key for problem in reported] == ["model.max_model_len"]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("a: [1", "unreadable", 1),
        ("seed: 1\nproject: 'x\nname: y\n", "unreadable", 2),
        ("seed: 1\nproject:x\nname: y", "unreadable", 2),
        ("a: `b`", "unreadable", 1),
        ("mode: both\nmode: train", "duplicate-key", 2),
        ("mode: both\nmodel: &m\n  model_path: *m", "unreadable", None),
        ("a: &a {b: 1}\nc: &c {b: 2}\nmodel:\n  <<: *a\n  d: 1\n  <<: *c", "duplicate-key", 6),
        ("? [a, b]\n: 1", "unreadable", 1),
        ("a: " + "[" * 2000 + "]" * 2000, "unreadable", None),
    ],
)
def test_invalid_yaml_is_reported(text: str, code: str, line: int | None) -> None:
    assert (code, line) in [(problem.code, problem.line) for problem in _of_text(text)]


def test_an_override_does_not_hide_a_key_given_twice() -> None:
    text = "mode: both\nmode: train\nmodel:\n  model_path: a\n  model_path: b\n"
    for overrides in (("mode=bench",), ("model.model_path=c",), ("model={model_path: c}",), ("model=null",)):
        duplicates = [problem for problem in _of_text(text, *overrides) if problem.code == "duplicate-key"]
        assert [(problem.key, problem.line) for problem in duplicates] == [("mode", 2), ("model.model_path", 5)]


def _of_text(text: str, *overrides: str) -> list[Finding]:
    with pytest.raises(ConfigError) as caught:
        config_from_text(text, overrides)
    return caught.value.problems


def test_missing_and_unreadable_files_are_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert [problem.code for problem in caught.value.problems] == ["unreadable"]


def test_a_verl_file_in_place_of_a_configuration_is_refused() -> None:
    """Its sections refer to each other; some of their keys are unknown here."""
    text = "critic: {model: {fsdp_config: {unknown: {a: '${critic.ppo_epochs}'}}}, ppo_epochs: 1}\n"
    for overrides in ((), ("trainer.trainer_config.critic=null",)):
        assert ("critic", "unknown-key") in [(problem.key, problem.code) for problem in _of_text(text, *overrides)]


def test_empty_file_lists_required_settings() -> None:
    assert {problem.key for problem in _of_text("")} == {
        "model.model_path",
        "model.max_model_len",
        "buffer.explorer_input.taskset",
    }


def test_the_error_survives_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text("")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.problems == caught.value.problems


def test_plugin_names_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load_plugins(folder: str) -> None:
        loaded.append(folder)
        monkeypatch.setitem(ADVANTAGES, "my_own", lambda rewards, group_ids, mask, tau=1.0: None)

    overrides = ["plugin_dir=mine", "algorithm.advantage_fn=my_own"]
    assert config_from_dict(GOOD, overrides).algorithm.advantage_fn == "my_own", "trusted while no plugin is loaded"
    config = config_from_dict(GOOD, overrides, load_plugins)
    assert loaded == [str(Path("mine").absolute())] and config.algorithm.advantage_fn == "my_own"


@pytest.mark.parametrize(
    ("override", "key", "code", "suggestion"),
    [
        ("policy_loss_fn=ppoo", "policy_loss_fn", "unknown-name", "ppo"),
        ("advantage_fn=my_wn", "advantage_fn", "unknown-name", "my_own"),
        ("advantage_fn_args={tua: 1}", "advantage_fn_args.tua", "unknown-argument", "tau"),
        ("advantage_fn_args={tau: high}", "advantage_fn_args.tau", "wrong-type", ""),
    ],
)
def test_a_plugin_folder_excuses_no_misspelling(
    monkeypatch: pytest.MonkeyPatch, override: str, key: str, code: str, suggestion: str
) -> None:
    """Defect: with plugin_dir set, unknown names and arguments passed and failed at the trainer's start."""

    def my_own(rewards, group_ids, mask, tau: float = 1.0): ...  # type: ignore[no-untyped-def]

    def load_plugins(folder: str) -> None:
        monkeypatch.setitem(ADVANTAGES, "my_own", my_own)

    chosen = [] if override.startswith("advantage_fn=") else ["algorithm.advantage_fn=my_own"]
    with pytest.raises(ConfigError) as caught:
        config_from_dict(GOOD, ["plugin_dir=mine", *chosen, f"algorithm.{override}"], load_plugins)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code, problem.suggestion) == (f"algorithm.{key}", code, suggestion)
    assert problem.file == f"override 'algorithm.{override}'"


def test_what_makes_no_sense_while_serving_is_refused() -> None:
    serving = {
        "mode": "serve",
        "synchronizer": {"max_staleness": 2, "sync_method": "checkpoint"},
        "buffer": {"total_steps": 3, "total_epochs": 2},
    }
    reported = problems(serving)
    assert {problem.key for problem in reported} == {
        "explorer.rollout_model.enable_openai_api", "buffer.explorer_input.taskset", "buffer.total_steps",
        "buffer.total_epochs", "synchronizer.max_staleness",
    }  # fmt: skip
    assert {problem.code for problem in reported} == {"conflict"}


def test_serving_needs_no_tasks() -> None:
    model = {"model_path": "m", "max_model_len": 64}
    serving = {"mode": "serve", "model": model, "explorer": {"rollout_model": {"enable_openai_api": True}}}
    config = config_from_dict({**serving, "algorithm": {"algorithm_type": "reinforceplusplus"}})
    assert config.synchronizer.sync_method == "checkpoint" and config.explores_alone and not config.is_synchronous
    for section, change, key in (
        ("algorithm", {"algorithm_type": "grpo", "repeat_times": 1}, "algorithm.repeat_times"),
        ("synchronizer", {"sync_method": "memory"}, "synchronizer.sync_method"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_from_dict({**serving, section: change})
        assert (key, "conflict") in [(problem.key, problem.code) for problem in caught.value.problems]


QUEUE: dict[str, Any] = {"storage_type": "queue", "path": ""}
DISTILL = "algorithm.algorithm_type=on_policy_distill"
GRAMMAR = {"regex": "[0-9]+"}


@pytest.mark.parametrize(
    ("tasksets", "keys"),
    [
        (({"weight": 1}, {}), ["[1].weight"]),
        (({"weight": 0}, {"weight": 0}), ["[0].weight"]),
        (({"weight_by_step": {1: 1, 5: 0}}, {"weight_by_step": {9: 0, 12: 1}}), ["[0].weight"]),
        (({"weight_by_step": {1: 1, 5: 0}}, {"weight_by_step": {4: 0, 6: 1}}), []),
        (({"weight": 0}, {"weight": 2}), []),
        ((QUEUE, {}), ["[0].weight"]),
        (({**QUEUE, "weight_by_step": {"first": 1}}, {}), ["[0].weight_by_step"]),
    ],
)
def test_task_sets_fit_together(tasksets: tuple[dict[str, Any], ...], keys: list[str]) -> None:
    named = [{"name": str(i), "path": "x", **taskset} for i, taskset in enumerate(tasksets)]
    reported = problems({"buffer": {"total_steps": 5, "explorer_input": {"taskset": None, "tasksets": named}}})
    assert [problem.key for problem in reported] == [f"{INPUT}.tasksets{key}" for key in keys]


@pytest.mark.parametrize(
    ("changes", "key", "code"),
    [
        (("buffer.total_steps=null",), "buffer.total_steps", "missing"),
        ((f"{INPUT}.taskset.task_selector.selector_type=shuffle",), f"{INPUT}.taskset.task_selector", "conflict"),
        ((f"{INPUT}.taskset.path=postgresql://h/db",), f"{INPUT}.taskset.path", "invalid"),
        (("synchronizer.max_staleness=4", STYLE), "synchronizer.max_staleness", "conflict"),
        ((f"{INPUT}.eval_tasksets.0.storage_type=queue",), f"{INPUT}.eval_tasksets[0].storage_type", "conflict"),
        ((), "", ""),
    ],
)
def test_queues_of_tasks_fit_the_run(changes: tuple[str, ...], key: str, code: str) -> None:
    queue = (f"{INPUT}.taskset.storage_type=queue", f"{INPUT}.taskset.path=''", "buffer.total_steps=9")
    unselected = {"buffer": {"explorer_input": {"taskset": {"task_selector": None}}}}
    reported = problems(unselected, overrides=(*queue, *changes))
    assert [(problem.key, problem.code) for problem in reported] == ([(key, code)] if key else [])


@pytest.mark.parametrize(
    ("gpus", "other", "keys"),
    [
        (2, {"temperature": 0.7}, ["tasksets[0].rollout_args.temperature"]),
        (2, {"temperature": 0.0}, []),
        (0, {"temperature": 0.7}, []),
    ],
)
@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("repetition_penalty", 1.2)])
def test_restricted_sampling_needs_temperature_1_of_all_on_gpu(
    gpus: int, other: dict[str, float], keys: list[str], name: str, value: float
) -> None:
    sets = [
        {"name": "a", "path": "x", "rollout_args": other},
        {"name": "b", "path": "x", "rollout_args": {name: value}},
    ]
    inputs = {"buffer": {"explorer_input": {"taskset": None, "tasksets": sets}}}
    reported = problems(inputs, {"cluster": {"gpu_per_node": gpus}})
    assert [problem.key for problem in reported] == [f"{INPUT}.{key}" for key in keys]


@pytest.mark.parametrize(
    ("sampling", "overrides", "keys"),
    [
        ({"temperature": None}, ("model.temperature=0.5", DISTILL), ["temperature"]),
        ({"temperature": 1.2}, (DISTILL,), ["temperature"]),
        ({}, ("model.temperature=1", DISTILL), []),
        ({"structured_output": {"json": {"type": "object"}}}, (), []),
        ({"structured_output": {"choice": ["yes", "no"], "regex": "y"}}, (), ["structured_output"]),
        ({"structured_output": {"schema": "{}"}}, (), ["structured_output"]),
        ({"structured_output": GRAMMAR, "temperature": 0.7}, (), ["temperature"]),
        ({"structured_output": GRAMMAR, "temperature": 0.7}, ("mode=bench",), []),
        ({"structured_output": GRAMMAR, "temperature": 0}, (), []),
    ],
)
def test_answers_are_scored_as_they_were_sampled(
    sampling: dict[str, Any], overrides: tuple[str, ...], keys: list[str]
) -> None:
    """At the temperature of the teacher or of the log-probs, and under one grammar."""
    reported = problems({"buffer": {"explorer_input": {"taskset": {"rollout_args": sampling}}}}, overrides=overrides)
    assert [problem.key for problem in reported] == [f"{INPUT}.taskset.rollout_args.{key}" for key in keys]


def test_a_recipe_of_trinity_rft_that_is_not_here_leads_to_those_that_are() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(Path("examples/grpo_gsm8k/gsm8k.yaml"))
    assert "configs/gsm8k/gsm8k.yaml" in str(error.value)
