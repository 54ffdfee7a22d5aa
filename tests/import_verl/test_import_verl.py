"""veRL's command lines and Hydra files as configurations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, ConfigError, config_from_text, load_config, source, train_settings
from trinity_core.config.import_verl import import_to, import_verl
from trinity_core.config.import_verl.reinforced import GpuLayout, gpu_layout
from trinity_core.config.import_verl.script import trace

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="scripts are run by bash within bubblewrap")
HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "configs/verl_align"
COMMAND = "python3 -m verl.trainer.main_ppo"
MODEL = "actor_rollout_ref.model.path=org/model"
LOSS, CORRECTION = "actor_rollout_ref.actor.policy_loss", "algorithm.rollout_correction"


def imported(tmp_path: Path, text: str, *arguments: str, name: str = "run.sh") -> tuple[Config, str]:
    """The configuration of a script, and what was left out."""
    (tmp_path / name).write_text(text)
    draft = import_verl(tmp_path / name, arguments)
    return config_from_text(draft.text), "\n".join(draft.left_out)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a \\\n  'b c' # c\n", ["a", "b c"]),
        ("run ${A:-x} ${A:-\"${HOME}/y\"} ${A:+z} $UNSET_ ''", ["x", "/home/me/y", ""]),
        ("all=(\n  a=1 # don't\n  'b=2 3'\n)\nrun \"${all[@]}\" $((1024 * 2))", ["a=1", "b=2 3", "2048"]),
        ("M=org/model.x\nrun $(basename $M .x) $(date +%Y | wc -l)", ["model", "1"]),
        ("X=1 run a 2>&1 b | tee x > /dev/null", ["a", "b"]),
        ("run a b > train.log 2>&1 &\nwait", ["a", "b"]),
        ("first=$1\nshift\nrun $first $@ $#", ["8", "a=b", "c", "2"]),
        ("while getopts \"n:\" o; do N=$OPTARG; done\nrun ${N:-no} $OPTIND", ["no", "1"]),
        ("D=$(cd \"$(dirname \"$0\")/..\" && pwd)\nrun ${D##*/} $(cat \"$D/known\")", ["above", "7"]),
        ("export PATH=$PATH:/x\nset -euxo pipefail\nmodule load cuda\nfalse | run $V\n", []),
        ("nohup bash -c 'exec python3 run 1' 2>&1 | tee log", ["1"]),
        ("ray job submit -- python3 run 1\nsleep 99", ["1"]),
    ],
)  # fmt: skip
def test_words_of_a_shell_script(text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (script := tmp_path / "above/below/run.sh").parent.mkdir(parents=True)
    (tmp_path / "above/known").write_text("7")
    script.write_text(text)
    ran = next(command for command in trace(script, ["8", "a=b", "c"]).commands if "run" in command)
    assert ran[ran.index("run") + 1 :] == words


@pytest.mark.parametrize("text", ["run 'a", "if true; then run", "done"])
def test_a_script_that_bash_does_not_read_to_its_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.sh").write_text(f"set -x\n{text}\n{COMMAND} {MODEL}\n")
    with pytest.raises(ConfigError) as caught:
        import_verl(tmp_path / "run.sh")
    (problem,) = caught.value.problems
    assert problem.code == "unreadable" and problem.line is not None


@pytest.mark.parametrize("text", ["/usr/bin/touch {0}", "> {0}", "trap 'echo > {0}' EXIT"])
def test_a_script_changes_nothing_outside(tmp_path: Path, text: str) -> None:
    (tmp_path / "kept").write_text("kept")
    for name in ("made", "kept"):
        (tmp_path / "a.sh").write_text(f"{text.format(tmp_path / name)}\nrun\n")
        trace(tmp_path / "a.sh", [])
    assert {path.name for path in tmp_path.iterdir()} == {"a.sh", "kept"} and (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("sandbox", ["", "#!/bin/sh\necho bwrap: No permissions >&2; exit 1\n"])
def test_a_script_is_not_run_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str) -> None:
    """Bubblewrap is missing, or the system permits no namespaces."""
    (tmp_path / "run.sh").write_text(f"{COMMAND} {MODEL}\n")
    (tmp_path / "bash").symlink_to("/bin/bash")
    if sandbox:
        (tmp_path / "bwrap").write_text(sandbox)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_verl(tmp_path / "run.sh")
    assert "trinity import-verl --" in str(caught.value)


@pytest.mark.campaign
def test_a_script_that_does_not_end_is_cut_off(tmp_path: Path) -> None:
    config, _ = imported(tmp_path, f"{COMMAND} {MODEL} trainer.nnodes=2\nwhile :; do :; done\n")
    assert config.cluster.node_num == 2


def test_a_command_is_read_as_the_script_that_holds_it(tmp_path: Path) -> None:
    """`trinity import-verl -- python3 -m verl.trainer.main_ppo …`, within the script that bash runs."""
    words = [*COMMAND.split(), MODEL, "trainer.nnodes=2", "data.train_files=['a', 'b']"]
    config, _ = imported(tmp_path, f"{COMMAND} {MODEL} trainer.nnodes=2 \"data.train_files=['a', 'b']\"\n")
    assert config_from_text(import_verl(Path(words[0]), words[1:]).text) == config and config.cluster.node_num == 2


def test_guide_ppo_script_is_the_guide_recipe(tmp_path: Path) -> None:
    config = config_from_text(import_verl(HERE / "documents/verl_ppo.sh").text)
    recipe = load_config(RECIPES / "ppo_example.yaml")
    _same_run(config, recipe)
    assert config.explorer.auxiliary_models == recipe.explorer.auxiliary_models
    workflows = {taskset.default_workflow_type for taskset in config.buffer.explorer_input.tasksets}
    assert workflows == {"math_rm_workflow"}
    ours, theirs = train_settings(config), train_settings(recipe)
    assert ours.critic is not None and theirs.critic is not None
    for name in ("optimizer", "micro_batch_size", "gradient_checkpointing", "model_path"):
        assert getattr(ours.critic, name) == getattr(theirs.critic, name), name
    assert ours.micro_batch_size == theirs.micro_batch_size == 16
    assert not ours.use_dynamic_bsz, "veRL counts rows unless it is set to count tokens"


def test_guide_grpo_script_is_the_guide_recipe() -> None:
    imported_script = import_verl(HERE / "documents/verl_grpo.sh")
    assert [line for line in imported_script.left_out if "data_source" not in line and line.startswith("- ")] == []
    config = config_from_text(imported_script.text)
    recipe = load_config(RECIPES / "grpo_example.yaml")
    _same_run(config, recipe)
    for run in (config, recipe):
        assert (run.algorithm.kl_loss_fn, run.algorithm.kl_loss_fn_args["kl_coef"]) == ("low_var_kl", 0.001)
    ours, theirs = train_settings(config), train_settings(recipe)
    assert (ours.max_tokens, ours.reference_offload) == (theirs.max_tokens, theirs.reference_offload) == (24000, True)


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (out := tmp_path / "mine.yaml").write_text("edited by hand")
    with pytest.raises(TrinityError):
        import_to(HERE / "documents/verl_grpo.sh", (), out)
    assert out.read_text() == "edited by hand"


def _same_run(config: Config, recipe: Config) -> None:
    """What the guide writes for a script is what is imported from it, but for prompts that are too long: the guide
    keeps their tasks without a loss, veRL drops them beforehand; and but for evaluations and checkpoints, which veRL
    counts in steps of its own, four of the guide's."""
    assert recipe.model.enable_prompt_truncation and not config.model.enable_prompt_truncation
    config = config.with_values({"model.enable_prompt_truncation": True})
    assert (config.project, config.name) == (recipe.project, recipe.name)
    assert (config.model, config.cluster, config.monitor) == (recipe.model, recipe.cluster, recipe.monitor)
    for name in ("batch_size", "train_batch_size", "total_epochs"):
        assert getattr(config.buffer, name) == getattr(recipe.buffer, name), name
    for name in ("algorithm_type", "repeat_times", "optimizer", "advantage_fn", "kl_penalty_fn", "kl_loss_fn"):
        assert getattr(config.algorithm, name) == getattr(recipe.algorithm, name), name
    assert config.explorer.eval_interval == 4 * recipe.explorer.eval_interval
    assert config.trainer.save_interval == 4 * recipe.trainer.save_interval
    for name in ("rollout_model", "eval_on_startup"):
        assert getattr(config.explorer, name) == getattr(recipe.explorer, name), name
    for name in ("gradient_checkpointing", "max_token_len_per_gpu"):
        assert getattr(config.trainer, name) == getattr(recipe.trainer, name), name
    assert config.synchronizer.sync_interval == recipe.synchronizer.sync_interval == 4
    assert config.algorithm.rollout_correction == recipe.algorithm.rollout_correction == "bypass"
    sets = config.buffer.explorer_input
    assert [one.name for one in sets.tasksets] == [one.name for one in recipe.buffer.explorer_input.tasksets]
    assert len(sets.eval_tasksets) == len(recipe.buffer.explorer_input.eval_tasksets)


DAPO = f"""
bsz=64; mini=16
NNODES=${{NNODES:-2}}
CKPTS_DIR="/ckpts/DAPO/long"
ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo {MODEL} \\
    data.train_batch_size=$bsz +data.gen_batch_size=$((bsz * 3)) actor_rollout_ref.actor.ppo_mini_batch_size=$mini \\
    actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo data.max_response_length=2048 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \\
    reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.n=4 trainer.project_name=DAPO trainer.experiment_name=long \\
    trainer.nnodes="$NNODES" trainer.total_training_steps=100 trainer.default_local_dir="$CKPTS_DIR" $@
"""


def test_dapo_recipe(tmp_path: Path) -> None:
    config, left_out = imported(tmp_path, DAPO, "trainer.test_freq=7")
    clipping = {"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 10.0}
    assert config.algorithm.policy_loss_fn_args.items() >= clipping.items()
    assert (config.buffer.batch_size, config.buffer.train_batch_size, config.synchronizer.sync_interval) == (16, 128, 4)
    assert (config.buffer.total_steps, config.algorithm.optimizer.lr_warmup_steps) == (400, 40), "steps of four updates"
    assert (config.explorer.max_refill_rounds, config.explorer.eval_interval, config.trainer.save_interval) == (
        9,
        28,
        0,
    )
    assert config.data_processor.experience_pipeline.operators[0].name == "dynamic_sampling"
    (tasks,), (evaluation,) = config.buffer.explorer_input.tasksets, config.buffer.explorer_input.eval_tasksets
    assert tasks.default_reward_fn_type == "math_dapo_reward"
    assert tasks.reward_fn_args == {
        "wrong_score": -1.0, "enable_overlong_penalty": True, "max_response_length": 2048, "cache_length": 512,
        "penalty_factor": 1.0,
    }  # fmt: skip
    assert (evaluation.repeat_times, evaluation.rollout_args.temperature) == (4, 0.7)
    assert (config.checkpoint_root_dir, config.job_dir) == ("/ckpts", Path("/ckpts/DAPO/long"))
    assert (config.cluster.node_num, config.cluster.ray_address) == (2, "auto")
    assert "data.gen_batch_size=192" in left_out


@pytest.mark.parametrize(
    ("settings", "synchronizer"),
    [
        ("", {"sync_style": "trainer_driven", "max_staleness": 9, "sync_in_flight": True}),
        ("async_training.partial_rollout=False", {"sync_in_flight": False}),
        ("async_training.staleness_threshold=0", {"sync_style": "fixed", "sync_offset": 0, "sync_in_flight": False}),
    ],
)
def test_rollouts_on_gpus_of_their_own_stay_asynchronous(
    tmp_path: Path, settings: str, synchronizer: dict[str, Any]
) -> None:
    """By veRL's docs/advance/fully_async.md."""
    script = (
        f"python -m verl.experimental.fully_async_policy.fully_async_main {MODEL} data.train_batch_size=0 "
        "data.gen_batch_size=1 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
        "trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4 rollout.total_rollout_steps=6400 rollout.test_freq=5 "
        "async_training.trigger_parameter_sync_step=4 async_training.require_batches=2 "
        f"async_training.staleness_threshold=0.25 {settings} algorithm.adv_estimator=grpo\n"
    )
    config, left_out = imported(tmp_path, script)
    sync = config.synchronizer
    assert {name: getattr(sync, name) for name in synchronizer} == synchronizer and sync.sync_interval == 8
    assert (config.buffer.batch_size, config.buffer.train_batch_size, config.buffer.total_steps) == (32, 128, 200)
    assert (config.cluster.gpu_per_node, config.explorer.rollout_model.engine_num) == (8, 2)
    assert (config.algorithm.optimizer.lr_warmup_steps, config.explorer.eval_interval) == (20, 40)
    assert config.algorithm.rollout_correction == "bypass" and "async_training" not in left_out


MODEL_KEYS = [
    ("reward_model.enable=True", "reward.reward_model.enable=True"),
    ("reward_model.model.path=org/rm", "reward.reward_model.model_path=org/rm"),
]
OVERLONG = [
    (f"reward_model.reward_kwargs.overlong_buffer_cfg.{one}", f"reward.reward_kwargs.overlong_buffer_cfg.{one}")
    for one in ("enable=True", "len=512")
]
SPLIT = "ulysses_sequence_parallel_size=2"
RENAMED = [("reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo"), *OVERLONG]


@pytest.mark.parametrize("pairs", [MODEL_KEYS, RENAMED])
def test_keys_that_verl_moved_give_the_same_run(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    """The file's comments have the names of the script."""
    actor = "actor_rollout_ref.actor"
    pairs = [*pairs, (f"{actor}.{SPLIT}", f"{actor}.fsdp_config.{SPLIT}")]
    old, new = (" ".join(names) for names in zip(*pairs, strict=True))
    (before, _), (after, left_out) = (imported(tmp_path, f"{COMMAND} {MODEL} {given}\n") for given in (old, new))
    assert after == before and after.trainer.ulysses_sequence_parallel_size == 2 and "reward.reward" not in left_out
    text = import_verl(tmp_path / "run.sh").text
    assert (
        "reward.reward_" in text and "# reward_model.reward_manager" not in text and "# reward_model.enable" not in text
    )


@pytest.mark.parametrize("value", ["$1", "$(ls models)", "'${other.key}'"])
def test_a_model_or_data_set_that_is_not_known_is_never_verls_own(tmp_path: Path, value: str) -> None:
    keys = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files", "actor_rollout_ref.actor.optim.lr")
    script = f"{COMMAND} {' '.join(f'{key}={value}' for key in keys)}\n"
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, script)
    where = "buffer.explorer_input"
    wanted = {
        "model.model_path",
        f"{where}.tasksets[0].path",
        f"{where}.eval_tasksets[0].path",
        "algorithm.optimizer.lr",
    }
    assert {problem.key for problem in error.value.problems} == wanted
    left_out = "\n".join(import_verl(tmp_path / "run.sh").left_out)
    assert all(f"{key}=" in left_out for key in keys)


@pytest.mark.parametrize(
    ("given", "interval"), [("rollout.test_freq=5", 40), ("trainer.test_freq=5", 40), ("trainer.test_freq=-1", 0)]
)
def test_an_asynchronous_run_evaluates_and_saves_by_weight_versions(tmp_path: Path, given: str, interval: int) -> None:
    config, _ = imported(
        tmp_path,
        f"python -m verl.experimental.fully_async_policy.fully_async_main {MODEL} {given} trainer.save_freq=3 "
        "async_training.trigger_parameter_sync_step=4 async_training.require_batches=2\n",
    )
    assert (config.explorer.eval_interval, config.trainer.save_interval) == (interval, 24)


def test_one_step_off_is_one_step_ahead(tmp_path: Path) -> None:
    script = (
        f"python -m verl.experimental.one_step_off_policy.main_ppo {MODEL} data.train_batch_size=512 rollout.nnodes=2"
    )
    config, _ = imported(tmp_path, f"{script} actor_rollout_ref.actor.ppo_mini_batch_size=128 trainer.nnodes=3\n")
    assert (config.synchronizer.sync_interval, config.synchronizer.sync_offset) == (4, 4)
    assert (config.cluster.node_num, config.cluster.gpu_per_node, config.explorer.rollout_model.engine_num) == (5, 8, 8)


SFT = """
nproc_per_node=$1
shift
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \\
    data.train_files="[$HOME/a/train.parquet, $HOME/b/train.parquet]" data.prompt_key=extra_info \\
    data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 model.partial_pretrain=org/model optim.lr=1e-4 model.lora_rank=32 $@
"""


def test_supervised_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, left_out = imported(tmp_path, SFT, "4", "trainer.total_epochs=2", "trainer.logger=console")
    assert (config.mode, config.algorithm.algorithm_type, config.model.model_path) == ("train", "sft", "org/model")
    assert (config.cluster.gpu_per_node, config.buffer.total_epochs, config.buffer.train_batch_size) == (4, 2, 256)
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.warmup_style) == (1e-4, (0.9, 0.95), "cosine")
    first = config.buffer.trainer_input.experience_buffer
    (name, second), = config.buffer.trainer_input.auxiliary_buffers.items()  # fmt: skip
    assert (first.name, first.path, name, second.path) == (
        "a",
        "/home/me/a/train.parquet",
        "b",
        "/home/me/b/train.parquet",
    )
    assert (first.format.prompt_key, first.format.response_key) == ("extra_info.question", "extra_info.answer")
    assert train_settings(config).micro_batch_size == 4
    assert config.model.lora is not None and "lora" not in left_out
    assert (config.model.lora.lora_rank, config.model.lora.lora_alpha) == (32, 16)


@pytest.mark.parametrize(
    ("given", "held_out", "interval"),
    [
        ("data.val_files=$HOME/a/test.parquet trainer.test_freq=20", {"a_eval": "/home/me/a/test.parquet"}, 20),
        ("data.val_files=[$HOME/v.parquet,w.parquet]", {"v_eval": "/home/me/v.parquet", "w_eval": "w.parquet"}, 0),
        ("data.val_files=null trainer.test_freq=-1", {}, 0),
        ("", {}, 0),
    ],
)
def test_validation_rows_of_a_supervised_run_are_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, held_out: dict[str, str], interval: int
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, left_out = imported(tmp_path, SFT.replace("$@", given), "4")
    buffers = config.buffer.trainer_input.auxiliary_buffers
    assert {name: buffer.path for name, buffer in buffers.items() if buffer.held_out} == held_out
    assert buffers["b"].share == 1 and not buffers["b"].held_out
    assert all(buffers[name].format == buffers["b"].format for name in held_out)
    assert config.explorer.eval_interval == interval
    assert not any(key in left_out for key in ("val_files", "test_freq"))


HYDRA = """
defaults: [ppo_trainer, _self_]
actor_rollout_ref:
  _target_: some.Class
  actor: {ppo_mini_batch_size: 32, use_dynamic_bsz: true, grad_clip: 0.5, clip_ratio: 0.3}
  rollout:
    'n': 4
    response_length: ${oc.select:data.max_response_length,512}
    log_prob_use_dynamic_bsz: ${actor_rollout_ref.actor.use_dynamic_bsz}
    multi_turn: {enable: false, format: hermes}
  ref: {log_prob_max_token_len_per_gpu: "${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,9000}"}
  model: {path: "${oc.env:HOME}/model", lora_rank: 0, lora_alpha: 16}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: true, kl_ctrl: {type: adaptive}}
data: {train_files: ~/data/train.parquet, max_response_length: 100, train_batch_size: 64, shuffle: false}
trainer:
  project_name: p
  experiment_name: e
  default_local_dir: out/${trainer.project_name}/${trainer.experiment_name}
"""


def test_hydra_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, left_out = imported(tmp_path, HYDRA, "++trainer.nnodes=1", "~trainer.save_freq", name="run.yaml")
    assert (config.model.model_path, config.model.max_response_tokens) == ("/home/me/model", 100)
    assert config.checkpoint_root_dir == str(Path("out").absolute())
    assert (config.buffer.batch_size, config.synchronizer.sync_interval, config.algorithm.repeat_times) == (32, 2, 4)
    assert config.algorithm.advantage_fn_args["std_normalize"] is False
    assert config.algorithm.kl_penalty_fn == "k1"
    wanted = {"kl_coef": 0.001, "adaptive": True, "target_kl": 0.1, "horizon": 10000}
    assert config.algorithm.kl_penalty_fn_args.items() >= wanted.items()
    assert (config.trainer.grad_clip, config.trainer.use_dynamic_bsz) == (0.5, True)
    assert config.algorithm.policy_loss_fn_args["clip_range_high"] == 0.3
    assert config.trainer.trainer_config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 9000
    (tasks,) = config.buffer.explorer_input.tasksets
    assert (tasks.path, tasks.task_selector.selector_type) == ("/home/me/data/train.parquet", "sequential")
    assert "lora_alpha" not in left_out and "hermes" not in left_out, "switched off, so they say nothing"
    assert "veRL's own defaults" in left_out


@pytest.mark.parametrize(("rank", "expected"), [("", 32), ("actor_rollout_ref.model.lora_rank=64", 64)])
def test_run_that_starts_from_an_adapter_trains_one(tmp_path: Path, rank: str, expected: int) -> None:
    """Without `lora_rank` veRL reads the rank in the adapter's folder, as the check before a run does here."""
    adapter = f"actor_rollout_ref.model.lora_adapter_path=/old/adapter {rank}"
    config, left_out = imported(tmp_path, f"python3 -m verl.trainer.main_ppo {adapter}")
    assert config.model.lora is not None and "lora" not in left_out
    assert (config.model.lora.path, config.model.lora.lora_rank) == ("/old/adapter", expected)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ("algorithm.adv_estimator=opo actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=opo"),
        (f"{LOSS}.loss_mode=kl_cov", "loss_mode=kl_cov"),
        (f"algorithm.adv_estimator=rloo {LOSS}.loss_mode=clip_cov", "loss_mode=clip_cov"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "megatron.tensor_model_parallel_size=4"),
        ("data.image_key=images", "data.image_key=images"),
        ("custom_reward_function.path=my.py custom_reward_function.name=score", "custom_reward_function.path"),
        ('trainer.logger=\'["console","swanlab"]\'', "trainer.logger"),
        ("actor_rollout_ref.rollout.temperature=0.6 actor_rollout_ref.rollout.top_p=0.9", "rollout.top_p=0.9"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "multi_turn.enable=True"),
        ("trainer.nnodes=$SLURM_NODES", "trainer.nnodes="),
        ("nonsense.key=1", "nonsense.key=1"),
        ("actor_rollout_ref.rollout.quantization=torchao", "rollout.quantization=torchao"),
        ("data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=48", "96 tasks"),
        ("--config-name=other_trainer", "--config-name=other_trainer"),
        ("stray", "'stray'"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rollout_rs=token_k1"),
        (f"{CORRECTION}.bypass_mode=True {CORRECTION}.loss_type=reinforce", "loss_type=reinforce"),
        (f"{CORRECTION}.bypass_mode=True {CORRECTION}.loss_type=reinforce {CORRECTION}.rollout_is=token", "is=token"),
        ("actor_rollout_ref.rollout.agent.num_workers=8", "agent.num_workers=8"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5", "multi_turn.max_assistant_turns=5"),
        ("distillation.enabled=True", "distillation.enabled=True"),
    ],
)
def test_what_is_not_here_is_listed(tmp_path: Path, settings: str, left_out: str) -> None:
    _, listed = imported(tmp_path, f"{COMMAND} {MODEL} {settings}\n")
    assert left_out in " ".join(listed.split())


GRPO = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=3.0", "rollout_correction", "tis_token"),
        (f"{CORRECTION}.rollout_is=sequence", "rollout_correction", "tis_sequence"),
        ("data.train_batch_size=512", "rollout_correction", "bypass"),
        (f"{CORRECTION}.bypass_mode=True {CORRECTION}.rollout_is=token", "rollout_correction", "bypass"),
        (
            f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold='0.5_2.0'",
            "rollout_correction_args",
            {"low": 0.5, "high": 2.0},
        ),
        (f"data.train_batch_size=512 {LOSS}.loss_mode=gpg", "rollout_correction", "none"),  # gpg has no ratio
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm_type", "reinforceplusplus"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "advantage_fn", "reinforceplusplus"),
        ("algorithm.adv_estimator=remax actor_rollout_ref.rollout.n=1", "advantage_fn", "remax"),
        (f"{GRPO} {LOSS}.loss_mode=clip_cov", "algorithm_type", "clip_cov"),
        (f"{GRPO} {LOSS}.loss_mode=clip_cov {LOSS}.clip_cov_lb=2", "advantage_fn_args", {"cov_low": 2.0}),
        (f"{GRPO} {LOSS}.loss_mode=kl_cov {LOSS}.ppo_kl_coef=2", "policy_loss_fn_args", {"kl_coef": 2.0}),
        (
            f"{LOSS}.loss_mode=dppo_kl actor_rollout_ref.actor.clip_ratio_low=0.1",
            "policy_loss_fn_args",
            {"divergence": "kl", "delta_low": 0.1, "delta_high": 0.2},
        ),
        (f"{GRPO} {LOSS}.loss_mode=dppo_tv", "algorithm_type", "dppo"),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1", "advantage_fn", "reinforce"),
        (f"{LOSS}.loss_mode=geo_mean", "policy_loss_fn", "gmpo"),
        (f"{LOSS}.loss_mode=gspo", "loss_agg_mode", "seq-mean-token-mean"),
        (f"{LOSS}.loss_mode=cispo", "loss_agg_mode", "token-mean"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "entropy_loss_fn", "default"),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse", "kl_loss_fn", "k2"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "loss_agg_mode", "seq-mean-token-sum"),
    ],
)
def test_parts_of_the_algorithm(tmp_path: Path, settings: str, key: str, value: str) -> None:
    config, _ = imported(tmp_path, f"{COMMAND} {MODEL} {settings}\n")
    written = getattr(config.algorithm, key)
    assert value.items() <= written.items() if isinstance(value, dict) else written == value


def test_arguments_of_vllm_are_passed_to_engines(tmp_path: Path) -> None:
    args = {"quantization": "fp8", "max_num_batched_tokens": 16384, "enable_chunked_prefill": False}
    settings = " ".join(f"actor_rollout_ref.rollout.{name}={value}" for name, value in args.items())
    config, left_out = imported(tmp_path, f"{COMMAND} {MODEL} {settings} {CORRECTION}.rollout_is=token\n")
    assert config.explorer.rollout_model.extra_engine_args == args
    assert not any(name in left_out for name in args)


def test_remax_has_the_workflow_that_samples_its_baseline(tmp_path: Path) -> None:
    config, listed = imported(tmp_path, f"{COMMAND} {MODEL} algorithm.adv_estimator=remax\n")
    [tasks], [held_out] = config.buffer.explorer_input.tasksets, config.buffer.explorer_input.eval_tasksets
    assert tasks.default_workflow_type == "greedy_baseline_workflow"
    assert held_out.default_workflow_type == "math_workflow"
    assert "remax" not in listed


def test_what_a_script_does_not_say_is_trained_as_veRL_would(tmp_path: Path) -> None:
    """The defaults of veRL's actor.yaml, critic.yaml, rollout.yaml and ppo_trainer.yaml, and torch's of AdamW."""
    config, _ = imported(tmp_path, f"{COMMAND} {MODEL} data.train_batch_size=256 algorithm.adv_estimator=gae\n")
    parts, model = config.algorithm, config.model
    assert (parts.advantage_fn_args, parts.rollout_correction) == ({"gamma": 1.0, "lam": 1.0}, "none")
    assert parts.policy_loss_fn == "ppo"
    assert parts.policy_loss_fn_args == {
        "clip_range": 0.2, "clip_range_low": 0.2, "clip_range_high": 0.2, "clip_ratio_c": 3.0
    }  # fmt: skip
    assert (parts.loss_agg_mode, parts.entropy_loss_fn) == ("token-mean", "none")
    assert (parts.kl_penalty_fn, parts.kl_loss_fn, config.needs_reference) == ("none", "none", False)
    sampling = (model.temperature, model.top_p, model.top_k, model.min_response_tokens)
    assert sampling == (1.0, 1.0, -1, 0) and parts.repeat_times == 1
    settings = train_settings(config)
    critic = settings.critic
    assert critic is not None
    for optimizer, rate in ((settings.optimizer, 1e-6), (critic.optimizer, 1e-5)):
        assert (optimizer.lr, optimizer.betas, optimizer.eps) == (rate, (0.9, 0.999), 1e-8)
        assert optimizer.weight_decay == 0.01
        assert (optimizer.lr_warmup_steps, optimizer.warmup_style) == (0, "constant")
    assert (settings.grad_clip, critic.grad_clip, critic.cliprange_value) == (1.0, 1.0, 0.5)
    assert (settings.epochs, critic.epochs) == (1, 1)
    grpo, _ = imported(tmp_path, f"{COMMAND} {MODEL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5\n")
    assert grpo.algorithm.advantage_fn_args == {"epsilon": 1e-6}


@pytest.mark.parametrize(
    ("total", "size", "reward_model", "layout"),
    [
        (8, 1, True, GpuLayout(2, 1, 2)),
        (1, 2, False, GpuLayout(1, 1)),
        (8, 8, False, GpuLayout(1, 4)),
        (64, 2, False, GpuLayout(8, 2)),
    ],
)
def test_gpus_are_shared_out(total: int, size: int, reward_model: bool, layout: GpuLayout) -> None:
    assert gpu_layout(total, size, reward_model) == layout


def test_recipe_configuration_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text("data: {max_prompt_length: 99}\nalgorithm: {adv_estimator: grpo}\n")
    text = f"{COMMAND} --config-path config --config-name mine {MODEL} actor_rollout_ref.rollout.n=4\n"
    config, _ = imported(tmp_path, text)
    assert (config.model.max_prompt_tokens, config.algorithm.algorithm_type) == (99, "grpo")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.sh", "echo hello\n", None),
        ("run.sh", f"if [ $# -lt 2 ]; then\n  exit 1\nfi\n{COMMAND} a.b=1\n", None),
        ("run.sh", f"{COMMAND} a.b=1\n{COMMAND} a.b=2\n", None),
        ("run.yaml", "model: {model_path: x}\n", None),
        ("run.yaml", "data: [\n", 2),
        ("none.sh", "", None),
    ],
)
def test_files_that_are_no_veRL_run(tmp_path: Path, name: str, text: str, line: int | None) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_verl(tmp_path / name)
    [problem] = caught.value.problems
    assert (problem.code, problem.line) == ("unreadable", line)


@pytest.mark.parametrize(
    "words",
    [
        "data.train_files=[] data.val_files=''", "algorithm.adv_estimator=[1] trainer.logger=[[1]]",
        "actor_rollout_ref.rollout.n={a:1}", "trainer.logger='\"a\\nb\"'",
        "trainer.experiment_name='\"\\u2028\"'", "data=text trainer=3", "actor_rollout_ref.actor.clip_ratio=!!float",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=[]", "+x.y.z=1 ~a.b",
        "bash -c 'python -m verl.trainer.main_ppo a=$(b main_ppo c=d)'",
    ],
)  # fmt: skip
def test_odd_values_give_a_file_that_can_be_read(tmp_path: Path, words: str) -> None:
    (tmp_path / "run.sh").write_text(f"{COMMAND} {MODEL} {words}\n")
    draft = import_verl(tmp_path / "run.sh")
    assert "model" in source.parse(draft.text).tree


def test_every_value_says_where_it_comes_from() -> None:
    text = import_verl(HERE / "documents/verl_grpo.sh").text
    values = [line for line in text.splitlines() if line.strip() and not line.startswith("#") and ": " in line]
    bare = [line.strip() for line in values if "  # " not in line]
    assert bare == [
        "algorithm_type: grpo", "- name: gsm8k", "storage_type: file", "- name: gsm8k_eval", "storage_type: file",
        "sync_offset: 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ("data.filter_overlong_prompts=True", False),
        ("data.truncation=error", False),
        ("data.filter_overlong_prompts=False data.truncation=left", True),
    ],
)
def test_prompts_that_are_too_long_are_dropped_or_cut(tmp_path: Path, settings: str, cut: bool) -> None:
    config, _ = imported(tmp_path, f"{COMMAND} {MODEL} {settings}\n")
    assert config.model.enable_prompt_truncation is cut


@pytest.mark.parametrize(
    ("program", "settings", "dynamic", "tokens"),
    [
        ("sft_trainer", "data.micro_batch_size_per_gpu=4", True, 8192),
        ("sft_trainer", "data.max_token_len_per_gpu=4096", True, 4096),
        ("sft_trainer", "data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=4", False, 8192),
        ("fsdp_sft_trainer", "data.micro_batch_size_per_gpu=4", False, None),
    ],
)
def test_supervised_batches_are_counted_as_by_the_program(
    tmp_path: Path, program: str, settings: str, dynamic: bool, tokens: int | None
) -> None:
    config, _ = imported(tmp_path, f"torchrun -m verl.trainer.{program} model.path=org/model {settings}\n")
    assert config.trainer.use_dynamic_bsz is dynamic
    assert tokens is None or config.trainer.max_token_len_per_gpu == tokens
