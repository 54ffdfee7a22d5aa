"""Notices on a valid configuration: settings that change another setting, or that do nothing."""

from __future__ import annotations

from trinity_core.config import dialects
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.experience_rules import AUXILIARY, BUFFER
from trinity_core.config.named import bypasses_in_vain, unread_monitor_args
from trinity_core.config.paths import is_backup
from trinity_core.config.resolve import draws_by, expert_share, shares
from trinity_core.config.rules import RAFT, eval_tasksets, training_tasksets
from trinity_core.config.schema import Config
from trinity_core.config.schema.buffer import EarlierRolloutsConfig, HumanVerdictsConfig, TaskSelectorConfig
from trinity_core.config.schema.synchronizer import BY_EXPLORER
from trinity_core.config.task_output import PIPELINE, pipeline_given, uses_pipeline
from trinity_core.config.verl import ROOT

POLICY_ONLY = ("custom_chat_template", "chat_template_path", "enable_thinking")
"""Settings of `model` that an endpoint, which renders prompts itself, does not take."""


def notices(config: Config) -> list[str]:
    """One sentence each, for a log or a terminal; empty for most configurations."""
    return [
        *_ignored(config),
        *_other_words(config),
        *_raft(config),
        *_mixed(config),
        *_repeats(config),
        *_batches(config),
        *_budget(config),
        *_pushed(config),
    ]


def _ignored(config: Config) -> list[str]:
    keys = _unread(config)
    return [f"Accepted, but without effect here: {', '.join(keys)}."] if keys else []


def _other_words(config: Config) -> list[str]:
    """Keys of Trinity-RFT and veRL that have no effect here, by reason."""
    found = dialects.notes(config.given)
    return [f"Accepted, but without effect here: {_listed(keys)}. {why}" for why, keys in found.items()]


def _listed(keys: list[str]) -> str:
    """Keys in one line; those of one section together, as `section.{a, b}`."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return ", ".join(
        f"{section}.{{{', '.join(names)}}}"
        if section and len(names) > 1
        else ", ".join(f"{section}.{name}".lstrip(".") for name in names)
        for section, names in sections.items()
    )


def _unread(config: Config) -> list[str]:
    """Settings that are checked but not read in this run."""
    trainer, verl = config.trainer, config.trainer.trainer_config
    float32 = trainer.dtype == "float32" or (trainer.dtype is None and config.cluster.gpu_per_node == 0)
    whole = float32 and (trainer.zero_stage == 0 or (trainer.zero_stage is None and trainer.worker_num == 1))
    buffer, known = config.buffer.trainer_input.experience_buffer, ALGORITHMS[config.algorithm.algorithm_type]
    given = {
        f"{BUFFER}.path": bool(buffer.path)
        and (is_backup(buffer) or (buffer.storage_type == "file" and known.uses_rollouts and config.mode != "explore")),
        **_unused_replay(config),
        "algorithm.rollout_correction": bypasses_in_vain(config),
        f"{BUFFER}.share": buffer.share is not None and not config.is_supervised,
        **{
            f"{AUXILIARY}.{key}": config.is_supervised and each.share is None
            for key, each in config.buffer.trainer_input.auxiliary_buffers.items()
        },
        "explorer.external_model": config.explorer.external_model is not None and not config.external_model,
        "explorer.feedback_timeout": "feedback_timeout" in (config.given.get("explorer") or {})
        and config.mode != "serve",
        "explorer.max_refill_rounds": config.explorer.max_refill_rounds > 0 and config.mode not in ("both", "explore"),
        "service.data_juicer": config.service.data_juicer is not None and not _asks_data_juicer(config),
        "synchronizer.sync_offset": config.synchronizer.sync_offset > 0 and not config.is_synchronous,
        "trainer.ulysses_sequence_parallel_size": trainer.ulysses_sequence_parallel_size > 1,
        "data_processor.experience_pipeline": config.data_processor.experience_pipeline is not None
        and not config.explores,
        PIPELINE: config.data_processor.task_pipeline is not None and not uses_pipeline(config),
        f"{PIPELINE}.num_process": "num_process" in pipeline_given(config),
    }
    given |= dict.fromkeys(unread_monitor_args(config), True)
    given |= {
        f"explorer.auxiliary_models[{place}].enable_history": model.enable_history
        for place, model in enumerate(config.explorer.auxiliary_models)
    }
    given |= _orders(config) | _unserved(config)
    if config.external_model:
        given |= {f"model.{name}": bool(getattr(config.model, name)) for name in POLICY_ONLY}
    reference, actor = verl.actor_rollout_ref.ref.fsdp_config, verl.actor_rollout_ref.actor.fsdp_config
    given[f"{ROOT}.actor_rollout_ref.ref.fsdp_config.optimizer_offload"] = reference.optimizer_offload
    for name, fsdp in (("actor_rollout_ref.actor", actor), ("critic.model", verl.critic.model.fsdp_config)):
        given[f"{ROOT}.{name}.fsdp_config.param_offload"] = fsdp.param_offload and trainer.zero_stage != 3
        given[f"{ROOT}.{name}.fsdp_config.optimizer_offload"] = fsdp.optimizer_offload and whole
    return [key for key, there in (given | _rows(config)).items() if there]


def _asks_data_juicer(config: Config) -> bool:
    """Whether an operator of this run uses Data-Juicer."""
    given = config.data_processor
    used = ((given.experience_pipeline, config.explores), (given.task_pipeline, uses_pipeline(config)))
    return any(
        each.name == "data_juicer" for pipeline, runs in used if pipeline and runs for each in pipeline.operators
    )


def _unserved(config: Config) -> dict[str, bool]:
    """Keys about the OpenAI API, of models that are not served through it."""
    explorer = config.explorer
    keys: dict[str, bool] = {}
    models = {"explorer.rollout_model": explorer.rollout_model}
    models |= {f"explorer.auxiliary_models[{place}]": each for place, each in enumerate(explorer.auxiliary_models)}
    for key, model in models.items():
        calls = model is explorer.rollout_model and model.tool_call_parser is not None  # which workflows read too
        unserved = {
            "enable_auto_tool_choice": model.enable_auto_tool_choice,
            "enable_log_requests": model.enable_log_requests,
            "tool_call_parser": model.tool_call_parser is not None and not calls,
            "reasoning_parser": model.reasoning_parser is not None and not calls,
        }
        keys |= {f"{key}.{name}": there and not model.enable_openai_api for name, there in unserved.items()}
    listens = any(model.enable_openai_api for model in models.values()) and config.mode != "bench"
    given = config.given.get("explorer") or {}
    return keys | {f"explorer.{name}": name in given and not listens for name in ("listen_address", "api_port")}


def _orders(config: Config) -> dict[str, bool]:
    """Keys that order or mix tasks where there is nothing to order or mix."""
    training, evals = training_tasksets(config), eval_tasksets(config)
    explores = config.mode in ("both", "explore", "train")
    selected = evals + ([] if explores else training)
    mixed = [*evals, *(training if len(training) == 1 or not explores else [])]
    return {f"{key}.task_selector": each.task_selector != TaskSelectorConfig() for key, each in selected} | {
        f"{key}.{'weight_by_step' if each.weight_by_step else 'weight'}": each.weight_points is not None
        for key, each in mixed
    }


def _unused_replay(config: Config) -> dict[str, bool]:
    """Keys that ask for priorities or reuse where rollouts are not drawn by priority, or that choose among rollouts
    where there are none."""
    inputs = config.buffer.trainer_input
    unused = config.is_supervised or draws_by(config) != "priority"
    buffers = [(BUFFER, inputs.experience_buffer, unused)]
    buffers += [(f"{AUXILIARY}.{name}", buffer, True) for name, buffer in inputs.auxiliary_buffers.items()]
    found = {}
    for key, buffer, not_read in buffers:
        replay = buffer.replay_buffer
        found[f"{key}.reuse_cooldown_time"] = buffer.reuse_cooldown_time is not None and not_read
        found[f"{key}.use_priority_queue"] = buffer.use_priority_queue and not_read
        chooses = buffer.rollouts != EarlierRolloutsConfig()
        found[f"{key}.rollouts"] = chooses and buffer.storage_type != "rollouts"
        asks, about = buffer.human_verdicts.enable, buffer.human_verdicts != HumanVerdictsConfig()
        found[f"{key}.human_verdicts"] = about and not asks
        found[f"{key}.replay_buffer.enable"] = replay.enable and not_read
        found[f"{key}.replay_buffer.reuse_cooldown_time"] = replay.reuse_cooldown_time is not None and not replay.enable
    return found


def _rows(config: Config) -> dict[str, bool]:
    """Keys that give the rows of a micro-batch although micro-batches are filled by tokens."""
    dynamic, verl = config.trainer.use_dynamic_bsz, config.trainer.trainer_config
    actor, reference, critic = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.ref, verl.critic
    critics = dynamic if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    shared = config.needs_critic and not critics and not critic.ppo_micro_batch_size_per_gpu
    rows = "ppo_micro_batch_size_per_gpu"
    return {
        f"{ROOT}.actor_rollout_ref.actor.{rows}": bool(actor.ppo_micro_batch_size_per_gpu) and dynamic and not shared,
        f"{ROOT}.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": dynamic
        and bool(reference.log_prob_micro_batch_size_per_gpu),
        f"{ROOT}.critic.{rows}": critics and bool(critic.ppo_micro_batch_size_per_gpu),
    }


def _repeats(config: Config) -> list[str]:
    algorithm = config.algorithm
    given = (config.given.get("algorithm") or {}).get("repeat_times")
    known = ALGORITHMS[algorithm.algorithm_type]
    if given is None or known.uses_rollouts or given == algorithm.repeat_times:
        return []
    return [f"algorithm.repeat_times is {algorithm.repeat_times} for {known.name}; the {given} given is not used."]


def _raft(config: Config) -> list[str]:
    """RAFT chooses rollouts here; elsewhere the workflow does."""
    parts = config.algorithm
    if parts.algorithm_type != "raft" or "selection" in (
        (config.given.get("algorithm") or {}).get("advantage_fn_args") or {}
    ):
        return []
    return [f"raft learns from the best rollouts of each task; {RAFT}"]


def _mixed(config: Config) -> list[str]:
    found, inputs = shares(config), config.buffer.trainer_input
    if not config.is_supervised or len(found) == 1:
        return []
    names = {"": inputs.experience_buffer.name, **{key: each.name for key, each in inputs.auxiliary_buffers.items()}}
    parts = ", ".join(f"{share / sum(found.values()):.0%} from '{names[key]}'" for key, share in found.items())
    return [f"The rows of a batch come from several data sets: {parts}."]


def _batches(config: Config) -> list[str]:
    buffer, repeats = config.buffer, config.algorithm.repeat_times
    explored = buffer.batch_size * repeats
    taken = round(buffer.train_batch_size * (1 - expert_share(config.algorithm)))
    if config.mode != "both" or taken == explored:
        return []
    return [
        f"An explore step gives {explored} experiences (batch_size {buffer.batch_size} x repeat_times {repeats}), "
        f"a training step takes {taken}."
    ]


def _budget(config: Config) -> list[str]:
    trainer, longest = config.trainer, config.model.max_model_len
    budget = trainer.max_token_len_per_gpu
    if config.mode not in ("both", "train") or budget >= longest:
        return []
    return [f"A micro-batch holds up to {longest} tokens, one sequence of max_model_len, rather than {budget}."]


def _pushed(config: Config) -> list[str]:
    sync = config.synchronizer
    if config.mode != "both" or sync.sync_style not in BY_EXPLORER or sync.style == "explorer_driven":
        return []
    return [
        f"With sync_method {sync.sync_method} the trainer decides when it pushes weights, so {sync.sync_style} means "
        "trainer_driven. Other methods leave it to the explorer."
    ]
