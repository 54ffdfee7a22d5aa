"""Files of Trinity-RFT and veRL: each key works, or is accepted with a notice, or is refused for one reason."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from field_keys import FIELD_KEYS

from trinity_core.config import Config, ConfigError, config_from_dict, config_from_text, notices, stages, to_yaml
from trinity_core.config.fields import types_of
from trinity_core.config.foreign.actions import Dropped, Moved
from trinity_core.config.foreign.table import KEYS
from trinity_core.config.notices import remarks
from trinity_core.config.source import merge

GOOD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "documents/quick_start.yaml").read_text())
INPUT = "buffer.explorer_input"
TRAIN, EVAL = f"{INPUT}.taskset", f"{INPUT}.eval_tasksets.0"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
ENGINES = "explorer.rollout_model"
VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor_rollout_ref.actor"


def made(*overrides: str, **sections: Any) -> Config:
    return config_from_dict(merge(GOOD, sections), overrides)


def refused(*overrides: str, **sections: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        made(*overrides, **sections)
    return [(problem.key, problem.message) for problem in caught.value.problems]


WORKS: list[tuple[str, str, Any]] = [
    # written, key here, its value
    ("mode=colocate", "mode", "both"),
    ("mode=BOTH", "mode", "both"),
    ("checkpoint_root_dir=''", "checkpoint_root_dir", str(Path("checkpoints").absolute())),
    ("algorithm_type=grpo", "algorithm.algorithm_type", "grpo"),
    ("algorithm.algorithm_type=grpo_verl", "algorithm.algorithm_type", "grpo"),
    ("algorithm.sample_strategy=warmup", "algorithm.sample_strategy", "default"),
    ("algorithm.add_strategy=step_wise_grpo", "algorithm.advantage_fn", "step_wise_grpo"),
    ("algorithm.policy_loss_fn_args.loss_agg_mode=seq-mean-token-sum", "algorithm.loss_agg_mode", "seq-mean-token-sum"),
    ("algorithm.rollout_correction={rollout_is: sequence}", "algorithm.rollout_correction", "tis_sequence"),
    ("algorithm.rollout_correction={rollout_is: null}", "algorithm.rollout_correction", "none"),
    (
        "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 0.5_5.0, rollout_rs: null}",
        "algorithm.rollout_correction_args",
        {"low": 0.5, "high": 5.0},
    ),
    (
        "buffer.default_workflow_type=tool_call_workflow",
        "buffer.explorer_input.default_workflow_type",
        "toolcall_workflow",
    ),
    ("synchronizer.sync_style=dynamic_by_explorer", "synchronizer.sync_style", "explorer_driven"),
    ("synchronizer.sync_style=dynamic_by_trainer", "synchronizer.sync_style", "trainer_driven"),
    (f"{EXPERIENCES}.use_priority_queue=true", f"{EXPERIENCES}.replay_buffer.enable", True),
    (f"{EXPERIENCES}.reuse_cooldown_time=60", f"{EXPERIENCES}.replay_buffer.reuse_cooldown_time", 60.0),
    ("algorithm.bypass_old_logprobs=true", "algorithm.rollout_correction", "bypass"),
    ("algorithm.bypass_old_logprobs=false", "algorithm.rollout_correction", "tis_token"),
    ("algorithm.optimizer.lr_scheduler_type=cosine", "algorithm.optimizer.warmup_style", "cosine"),
    ("algorithm.optimizer.lr_warmup_steps=-1", "algorithm.optimizer.lr_warmup_steps", 0),
    ("algorithm.optimizer.min_lr_ratio=null", "algorithm.optimizer.min_lr_ratio", 0.0),
    ("algorithm.optimizer={lr: 1e-6, beta1: 0.8, beta2: 0.95}", "algorithm.optimizer.betas", (0.8, 0.95)),
    ("model.min_response_tokens=0", "model.min_response_tokens", 0),
    ("model.checkpoint_path=/c", "checkpoint_root_dir", "/c"),
    (f"{ENGINES}.enable_thinking=false", "model.enable_thinking", False),
    (f"{ENGINES}.chat_template=x", "model.custom_chat_template", "x"),
    (f"{TRAIN}.format.enable_thinking=true", "model.enable_thinking", True),
    ("buffer.train_batch_size=0", "buffer.train_batch_size", 1024),
    ("explorer.runner_num=32", "explorer.runner_per_model", 16),
    ("explorer.proxy_port=8010", "explorer.api_port", 8010),
    ("explorer.bench_on_latest_checkpoint=false", "explorer.bench_on_latest_checkpoint", False),
    ("explorer.gpu_memory_utilization=0.5", f"{ENGINES}.gpu_memory_utilization", 0.5),
    ("synchronizer.sync_method=NCCL", "synchronizer.sync_method", "nccl"),
    ("synchronizer.sync_style=fully_async", "synchronizer.sync_style", "trainer_driven"),
    ("synchronizer.sync_style=fully_async", "synchronizer.sync_in_flight", True),
    ("algorithm={algorithm_type: grpo, policy_loss_fn: m2po}", "algorithm.advantage_fn", "m2po"),
    (
        "algorithm={algorithm_type: grpo, policy_loss_fn: m2po, "
        "policy_loss_fn_args: {m2_threshold: 0.1, log_ratio_clip: 20.0}}",
        "algorithm.advantage_fn_args",
        {"m2_threshold": 0.1},
    ),
    ("algorithm={algorithm_type: raft, repeat_times: 1}", "algorithm.advantage_fn_args", {"selection": "all"}),
    ("synchronizer={sync_iteration_interval: 4}", "synchronizer.sync_interval", 4),
    (f"{EXPERIENCES}.storage_type=QUEUE", f"{EXPERIENCES}.storage_type", "queue"),
    ("trainer.max_token_len_per_gpu=null", "trainer.max_token_len_per_gpu", 16384),
    ("trainer.ppo_max_token_len_per_gpu=9000", "trainer.max_token_len_per_gpu", 9000),
    ("trainer.max_checkpoints_to_keep=0", "trainer.max_checkpoints_to_keep", None),
    ("trainer.actor_grad_clip=0.5", "trainer.grad_clip", 0.5),
    ("trainer.param_offload=true", f"{ACTOR}.fsdp_config.param_offload", True),
    ("trainer.critic_warmup=3", f"{VERL}.trainer.critic_warmup", 3),
    ("trainer.actor_use_kl_loss=false", "algorithm.kl_loss_fn", "none"),
    (f"{VERL}.trainer.val_before_train=false", "explorer.eval_on_startup", False),
    (f"{VERL}.trainer.resume_mode=disable", "continue_from_checkpoint", False),
    (f"{VERL}.critic.fsdp.param_offload=true", f"{VERL}.critic.model.fsdp_config.param_offload", True),
    (f"{VERL}.algorithm.rollout_correction.rollout_is=null", "algorithm.rollout_correction", "none"),
    (f"{ACTOR}.optim.lr_scheduler_type=cosine", "algorithm.optimizer.warmup_style", "cosine"),
    ("log.level=debug", "log.level", "DEBUG"),
]


@pytest.mark.parametrize(("override", "key", "value"), WORKS)
def test_a_key_of_the_field_sets_what_it_is_called_here(override: str, key: str, value: Any) -> None:
    tree = merge(GOOD, {})
    for name in ("name", "checkpoint_root_dir"):
        if key == name:
            tree.pop(name)
    assert attrgetter(key)(config_from_dict(tree, [override])) == value


@pytest.mark.parametrize(
    ("override", "args"),
    [
        (f"{ENGINES}.enable_chunked_prefill=false", {"enable_chunked_prefill": False}),
        ("explorer.enable_chunked_prefill=true", {"enable_chunked_prefill": True}),
        (f"{ENGINES}.max_num_batched_tokens=4096", {"max_num_batched_tokens": 4096}),
        (f"{ENGINES}.quantization=fp8", {"quantization": "fp8"}),
        (f"{ENGINES}.enable_expert_parallel=true", {"enable_expert_parallel": True}),
        (f"{ENGINES}.block_size=null", {}),
    ],
)
def test_argument_of_vllm_is_passed_to_engines(override: str, args: dict[str, Any]) -> None:
    assert made(override, "cluster.gpu_per_node=2").explorer.rollout_model.extra_engine_args == args
    if any(args.values()):
        assert refused(override, "cluster.gpu_per_node=0")
    else:  # as engines on the CPU are anyway
        assert made(override, "cluster.gpu_per_node=0").explorer.rollout_model.extra_engine_args == args


NOTED = [
    ("group=a", "group"),
    (f"{TRAIN}.rollout_args.logprobs=20", f"{TRAIN}.rollout_args.logprobs"),
    ("explorer.max_repeat_times_per_runner=2", "explorer.max_repeat_times_per_runner"),
    ("buffer.max_retry_interval=3", "buffer.max_retry_interval"),
    (f"{EXPERIENCES}.schema_type=sft", f"{EXPERIENCES}.schema_type"),
    (f"{EXPERIENCES}.data_selector.selector_type=sequential", f"{EXPERIENCES}.data_selector"),
    (f"{ACTOR}={{clip_ratio: 0.1, entropy_coeff: 0.2}}", f"{ACTOR}.entropy_coeff"),
    (f"{VERL}.data.max_prompt_length=512", f"{VERL}.data"),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron"),
    ("explorer.max_inflight_batches=4", "explorer.max_inflight_batches"),
]


@pytest.mark.parametrize(("override", "key"), NOTED)
def test_a_key_without_effect_is_told(override: str, key: str) -> None:
    config = made(override)
    assert key in [remark.key for remark in remarks(config)]
    assert config == config_from_text(to_yaml(config))


QUIET = [
    "group=''", "cluster.total_gpu_num=0", "explorer.over_rollout={return_partial_tasks: false}",
    "algorithm.optimizer.fused=true", f"{TRAIN}.rollout_args.logprobs=0",
    "model.lora_configs=null", "model.tinker={enable: false}", "model.external_model={enable: false}",
    "explorer.concurrent_mode=asynchronous", f"{TRAIN}.format.image_key=null", f"{TRAIN}.enable_progress_bar=false",
    f"{ENGINES}.use_v1=true", f"{ENGINES}.repetition_penalty=1.0", "trainer.enable_preview=true", "data_processor={}",
    "monitor.monitor_args=null", f"{VERL}.reward_model={{enable: false, model: {{path: a}}}}",
    f"{VERL}.actor_rollout_ref.model.lora_adapter_path=''",
    f"{ACTOR}.freeze_vision_tower=false", "data_processor.task_pipeline=null", f"{INPUT}.default_eval_workflow_type=''",
    f"{EXPERIENCES}.replay_buffer=null", "explorer.auxiliary_models=[]", "service.data_juicer=null",
]  # fmt: skip


@pytest.mark.parametrize("override", QUIET)
def test_a_value_that_asks_for_nothing_is_dropped(override: str) -> None:
    assert made(override) == made() and notices(made(override)) == notices(made())


CORRECTED = "algorithm.rollout_correction"
REFUSED = [
    (f"{VERL}.critic.model.lora_rank=8", f"{VERL}.critic.model.lora_rank"),
    (f"{VERL}.critic.model.lora_adapter_path=a", f"{VERL}.critic.model.lora_adapter_path"),
    ("model.tinker={enable: true, rank: 16}", "model.tinker.enable"),
    ("model.rope_scaling={type: yarn}", "model.rope_scaling"),
    ("explorer.rollout_model.data_parallel_size=2", "explorer.rollout_model.data_parallel_size"),
    (f"{TRAIN}.format.image_key=images", f"{TRAIN}.format.image_key"),
    (f"{TRAIN}.format.teacher_hint_key=w", f"{TRAIN}.format.teacher_hint_key"),
    ("trainer.trainer_strategy=megatron", "trainer.trainer_strategy"),
    (f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy"),
    ("buffer.trainer_input.sft_warmup_steps=5", "buffer.trainer_input.sft_warmup_steps"),
    ("algorithm={policy_loss_fn: m2po, advantage_fn: rloo}", "algorithm.policy_loss_fn"),
    *(
        (f"algorithm={{policy_loss_fn: m2po, {other}}}", "algorithm.policy_loss_fn")
        for other in (
            "repeat_times: 2",
            "algorithm_type: dr_grpo",
            "algorithm_type: grpo, rollout_correction: {rollout_is: token}",
            "algorithm_type: grpo, policy_loss_fn_args: {loss_agg_mode: seq-mean-token-mean}",
        )
    ),
    (
        "data_processor.task_pipeline={inputs: [x], operators: [{name: human_preference_annotation_mapper}]}",
        "data_processor.task_pipeline.operators[0].name",
    ),
    ("algorithm.optimizer.optimizer_type=sgd", "algorithm.optimizer.optimizer_type"),
    ("algorithm.use_token_level_loss=false", "algorithm.use_token_level_loss"),
    (f"{VERL}.trainer.resume_mode=resume_path", f"{VERL}.trainer.resume_mode"),
    (f"{VERL}.reward_model.enable=true", f"{VERL}.reward_model.enable"),
    ("data_processor.dj_process_desc=x", "data_processor.dj_process_desc"),
    ("model.custom_chat_template=a " + f"{ENGINES}.chat_template=b", f"{ENGINES}.chat_template"),
    (f"{CORRECTED}={{rollout_is: token, rollout_is_batch_normalize: true}}", CORRECTED),
    (f"{CORRECTED}={{rollout_is: sequence, rollout_is_threshold: 0.5_2}}", CORRECTED),
    (f"{CORRECTED}={{bypass_mode: true, loss_type: reinforce, rollout_is: token}}", CORRECTED),
    (f"{CORRECTED}={{rolout_is: token}}", CORRECTED),
    (f"{VERL}.algorithm.rollout_correction.rollout_rs=token_k1", f"{VERL}.algorithm.rollout_correction"),
    (f"{TRAIN}.path='  '", f"{TRAIN}.path"),
    (f"{TRAIN}.path=null", f"{TRAIN}.path"),
]


@pytest.mark.parametrize(("overrides", "key"), REFUSED)
def test_what_cannot_be_had_is_refused_for_one_reason(overrides: str, key: str) -> None:
    refusals = refused(*([overrides] if "{" in overrides or "'" in overrides else overrides.split(" ")))
    assert [place for place, _ in refusals] == [key] and "known key" not in refusals[0][1]


@pytest.mark.parametrize("section", FIELD_KEYS)
@pytest.mark.parametrize("value", [None, 7, {"a": 1}], ids=str)
def test_every_key_of_the_field_is_known(section: str, value: Any) -> None:
    inner: dict[str, Any] = dict.fromkeys(FIELD_KEYS[section].split(), value)
    for name in reversed(section.split(".") if section else []):
        inner = {name: inner}
    try:
        config_from_dict(merge(GOOD, inner))
    except ConfigError as error:
        below = ".a", "[0]"
        unknown = [one.key for one in error.problems if "known key" in one.message and not one.key.endswith(below)]
        assert unknown == []


def test_m2po_beside_a_malformed_algorithm_is_reported() -> None:
    for wrong in ([1], {"a": 1}, 7):
        keys = [key for key, _ in refused(algorithm={"algorithm_type": wrong, "policy_loss_fn": "m2po"})]
        assert "algorithm.algorithm_type" in keys or "algorithm.policy_loss_fn" in keys


def test_a_stage_translates_keys_with_what_it_inherits() -> None:
    above = {"algorithm_type": "grpo", "optimizer": {"lr": 1e-6, "beta1": 0.8}}
    config = config_from_dict(merge(GOOD, {
        "algorithm": above,
        "stages": [
            {"stage_name": "first", "algorithm": {"policy_loss_fn": "m2po", "optimizer": {"beta2": 0.99}}},
            {"stage_name": "second", "algorithm": {"algorithm_type": "grpo", "repeat_times": 3}},
        ],
    }))  # fmt: skip
    first, second = (stage.algorithm for stage in stages(config))
    assert (first.advantage_fn, first.policy_loss_fn) == ("m2po", "importance_sampling")
    assert first.rollout_correction == "bypass"
    assert first.optimizer.betas == (0.8, 0.99) and second.optimizer.betas[0] == 0.8
    assert second.advantage_fn == "grpo"
    stage = {"stage_name": "third", "algorithm": {"algorithm_type": "rloo", "policy_loss_fn": "m2po"}}
    assert [key for key, _ in refused(algorithm=above, stages=[stage])] == ["stages[0].algorithm.policy_loss_fn"]


def test_a_stage_changes_one_of_two_inherited_betas() -> None:
    above = {"optimizer": {"betas": [0.8, 0.95]}}
    listed = [{"stage_name": name, "algorithm": {"optimizer": {name: 0.7}}} for name in ("beta1", "beta2")]
    first, second = stages(config_from_dict(merge(GOOD, {"algorithm": above, "stages": listed})))
    assert first.algorithm.optimizer.betas == (0.7, 0.95) and second.algorithm.optimizer.betas == (0.8, 0.7)


ENDPOINT = {"enable": True, "base_url_env": "OWN_ADDRESS", "model_name": "m"}
ADDRESS = "http://127.0.0.1:1/v1"


def test_an_endpoint_is_scored_at_the_address_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_ADDRESS", "http://127.0.0.1:2/v1")
    tree = {"model": {"external_model": ENDPOINT}, "mode": "bench"}
    for explorer, address in (({}, "http://127.0.0.1:2/v1"), ({"env_vars": {"OWN_ADDRESS": ADDRESS}}, ADDRESS)):
        external = made(**tree, explorer=explorer).explorer.external_model
        assert external is not None and (external.base_url, external.model_name) == (address, "m")
        assert external.api_key_env == "OPENAI_API_KEY"
    monkeypatch.delenv("OWN_ADDRESS")
    assert [key for key, _ in refused(**tree)] == ["model.external_model"]


def test_an_unknown_key_of_an_endpoint_is_refused() -> None:
    env_vars = {"env_vars": {"OWN_ADDRESS": ADDRESS}}
    refusals = refused(mode="bench", model={"external_model": {**ENDPOINT, "enabel": 5}}, explorer=env_vars)
    assert [key for key, _ in refusals] == ["model.external_model"]


def test_an_endpoint_is_refused_where_nothing_is_scored() -> None:
    explorer, model = {"env_vars": {"OWN_ADDRESS": ADDRESS}}, {"external_model": ENDPOINT}
    assert [key for key, _ in refused(model=model, explorer=explorer)] == ["model.external_model"]
    stage = {"stage_name": "a", "model": model}
    refusals = refused(explorer=explorer, stages=[stage, {**stage, "stage_name": "b", "mode": "bench"}])
    assert [key for key, _ in refusals] == ["stages[0].model.external_model"]
    config = config_from_dict(merge(GOOD, {"mode": "bench", "explorer": explorer, "stages": [stage]}))
    assert [stage.external_model is not None for stage in stages(config)] == [True]
    above = {"model": model, "explorer": explorer, "stages": [{"stage_name": "c", "mode": "bench"}]}
    assert [stage.external_model is not None for stage in stages(config_from_dict(merge(GOOD, above)))] == [True]


def test_verdicts_leave_the_settings_to_the_schema() -> None:
    for section, verdicts in KEYS.items():
        for name in verdicts.keys() & types_of(section).keys():
            assert not isinstance(verdicts[name], Dropped | Moved), f"{section.__name__}.{name}"


def test_expert_data_of_the_warmup_key_is_mixed_in() -> None:
    config = made(
        "algorithm={algorithm_type: mix, mu: 0.5, repeat_times: 8}",
        "algorithm.policy_loss_fn_args={use_dynamic_bsz: true, ngpus_trainer: 4}",
        "buffer.expert_data_ratio=0.25",
        "buffer.trainer_input.sft_warmup_dataset={path: x, algorithm_type: sft}",
    )
    assert (
        config.algorithm.policy_loss_fn_args["mu"] == 0.5
        and "ngpus_trainer" not in config.algorithm.policy_loss_fn_args
    )
    assert config.algorithm.sample_strategy_args["expert_data_ratio"] == 0.25
    assert config.buffer.trainer_input.auxiliary_buffers["sft_warmup_dataset"].path == "x"


def test_defaults_of_task_sets_yield_to_what_each_says() -> None:
    config = made(
        f"{INPUT}.system_prompt=think", f"{INPUT}.default_eval_workflow_type=math_boxed_workflow",
        f"{EVAL}.default_workflow_type=null", f"{EVAL}.format.system_prompt=own", f"{EVAL}.rollout_args.n=4",
    ).buffer.explorer_input  # fmt: skip
    assert config.tasksets[0].format.system_prompt == "think" and config.eval_tasksets[0].format.system_prompt == "own"
    assert config.tasksets[0].default_workflow_type == "math_workflow"
    assert config.eval_tasksets[0].default_workflow_type == "math_boxed_workflow"
    assert config.eval_tasksets[0].repeat_times == 4


def test_a_response_may_fill_the_model_beside_a_shorter_prompt() -> None:
    limits = {"max_model_len": 2048, "max_response_tokens": 2048, "max_prompt_tokens": 1024}
    assert made(model=limits).model.max_response_tokens == 2048
    assert refused(model=limits | {"max_prompt_tokens": None})[0][0] == "model.max_response_tokens"


def test_stages_are_read_in_the_same_words() -> None:
    config = made(
        stages=[
            {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft", "optimizer": {"beta1": 0.8}},
             "buffer": {"trainer_input": {"experience_buffer": {"path": "x", "schema_type": "sft"}}}},
            {"stage_name": "rft", "trainer": {"actor_grad_clip": 0.25}},
        ]
    )  # fmt: skip
    first, second = stages(config)
    assert first.algorithm.optimizer.betas == (0.8, 0.999) and second.trainer.grad_clip == 0.25
    assert any("schema_type" in notice for notice in notices(first))


def test_a_moved_key_is_reported_at_its_line() -> None:
    text = (Path(__file__).parent / "documents/quick_start.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        config_from_text(text.replace("  engine_num: 1", "  engine_num: 1\n    max_response_tokens: -3"))
    (problem,) = caught.value.problems
    assert problem.line == 1 + text[: text.index("  engine_num: 1")].count("\n") + 1, problem


VERL_FILE = """
actor_rollout_ref:
  actor:
    _target_: a.B
    strategy: fsdp
    ppo_mini_batch_size: 256
    use_dynamic_bsz: false
    ppo_micro_batch_size_per_gpu: 4
    checkpoint: {save_contents: [model], load_contents: '${.save_contents}'}
    optim: {_target_: a.B, optimizer: AdamW, lr: 2e-6, lr_scheduler_type: cosine, warmup_style: null}
    profiler: {tool: '${oc.select:global_profiler.tool,null}', ranks: []}
  ref: {log_prob_use_dynamic_bsz: '${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}'}
  rollout: {name: "???", prompt_length: '${oc.select:data.max_prompt_length,512}', qat: '${nowhere.at_all}'}
  model: {path: x, lora_rank: 0, mtp: {enable: false, method: mtp}}
critic: {ppo_micro_batch_size: null, forward_micro_batch_size: '${.ppo_micro_batch_size}', enable: null}
data: {max_prompt_length: 512}
algorithm: {rollout_correction: {rollout_is: null}, kl_ctrl: {kl_coef: 0.1}}
trainer: {project_name: p, default_local_dir: 'c/${trainer.project_name}', resume_mode: auto, val_before_train: true}
global_profiler: {tool: null}
"""


@pytest.mark.parametrize("by", ["path", "inline"])
def test_a_whole_trainer_file_of_verl_is_read(tmp_path: Path, by: str) -> None:
    (tmp_path / "verl.yaml").write_text(VERL_FILE)
    path = {"trainer_config_path": str(tmp_path / "verl.yaml")}
    tree = merge(GOOD, {"trainer": path if by == "path" else {"trainer_config": yaml.safe_load(VERL_FILE)}})
    tree["algorithm"].pop("optimizer")
    config = config_from_dict(tree)
    optimizer, actor = config.algorithm.optimizer, config.trainer.trainer_config.actor_rollout_ref.actor
    assert (optimizer.lr, optimizer.warmup_style, config.trainer.use_dynamic_bsz) == (2e-6, "cosine", False)
    assert actor.ppo_micro_batch_size_per_gpu == 4 and config.algorithm.rollout_correction == "none"
    assert config.model.model_path == GOOD["model"]["model_path"].split(",")[1].rstrip("}")
    assert {f"{VERL}.data", f"{VERL}.algorithm"} <= {remark.key for remark in remarks(config)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.optiimzer={lr: 1}", "is not a known key. Did you mean 'optimizer'?"),
        ("explorer.enable_thinkng=true", "is not a known key."),
        ("trainer.enable_thinking=true", "is not a known key; `model.enable_thinking` is."),
        ("trainer.seed=3", "is not a known key."),
        ("model.learning=3", "is not a known key."),
    ],
)
def test_suggestions_are_near_or_elsewhere(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(overrides)
    assert str(caught.value.problems[0]).endswith(f": {message}")
