"""Every YAML that the guides show to users loads, and means what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trinity_core.config import (
    config_from_dict,
    config_from_text,
    load_config,
    stages,
    store_url,
    to_yaml,
    train_settings,
)
from trinity_core.config.notices import remarks

DOCUMENTS = Path(__file__).parent / "documents"
RECIPES = Path(__file__).parents[2] / "configs"
ASYNC = ("explorer", "trainer", "explorer_new")


def text(name: str) -> str:
    return (DOCUMENTS / f"{name}.yaml").read_text()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)
    monkeypatch.setenv("MODEL_PATH", "/models/policy")
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "/data/tasks")
    monkeypatch.setenv("TRINITY_SFT_DATASET_PATH", "/data/sft")
    monkeypatch.setenv("TRINITY_DATASET_PATH", "/data/warm_up")


@pytest.mark.usefixtures("places")
def test_the_guide_loads_with_every_section() -> None:
    config = config_from_text(text("guide"))
    assert config.model.critic_model_path == config.model.model_path == "/models/policy"
    assert config.buffer.total_steps == 1000
    assert config.needs_critic and config.needs_reference
    (tasks,) = config.buffer.explorer_input.tasksets
    assert (tasks.name, tasks.path, tasks.repeat_times) == ("countdown_train", "/data/tasks", 8)
    (evaluation,) = config.buffer.explorer_input.eval_tasksets
    assert (evaluation.repeat_times, evaluation.rollout_args.temperature) == (1, 0.1)
    pipeline = config.data_processor.task_pipeline
    assert pipeline is not None and pipeline.operators[0].args["min_score"] == 0.0
    assert pipeline.inputs == ("/data/tasks",)
    conversations = config.buffer.trainer_input.auxiliary_buffers["other_buffer"]
    assert conversations.format.enable_concatenated_multi_turn and conversations.storage_type == "file"


@pytest.mark.usefixtures("places")
def test_guide_stages_load() -> None:
    config = config_from_text(text("guide") + text("guide_stages"))
    warm_up, rft = stages(config)
    assert [stage.name for stage in (warm_up, rft)] == ["example_sft_warmup", "example_rft"]
    assert warm_up.job_dir.parent == rft.job_dir.parent
    assert (warm_up.mode, warm_up.algorithm.policy_loss_fn, warm_up.algorithm.repeat_times) == ("train", "sft", 1)
    assert warm_up.algorithm.kl_loss_fn == "none" and not warm_up.needs_critic
    assert (warm_up.buffer.total_steps, rft.buffer.total_steps) == (100, 1000)
    buffer = warm_up.buffer.trainer_input.experience_buffer
    assert (buffer.storage_type, buffer.path) == ("file", "/data/warm_up")
    assert rft.algorithm.advantage_fn == "ppo" and rft.buffer.train_batch_size == 256


def test_quick_start_loads() -> None:
    config = config_from_text(text("quick_start"))
    assert config.buffer.train_batch_size == 1024
    assert config.model.max_prompt_tokens == 1024
    assert config.algorithm.optimizer.lr == 1e-5
    assert config.synchronizer.sync_method == "nccl"
    assert store_url(config) == f"sqlite:///{config.job_dir / 'buffer' / 'gsm8k.db'}"
    assert config.job_dir == Path("checkpoints/<project_name>/<experiment_name>").absolute()


def test_quick_start_stages_load() -> None:
    warm_up, rft = stages(config_from_text(text("quick_start") + text("quick_start_stages")))
    assert (warm_up.buffer.train_batch_size, warm_up.buffer.total_steps, warm_up.buffer.batch_size) == (128, 10, 128)
    assert rft.buffer.total_steps is None and rft.buffer.trainer_input.experience_buffer.name == "gsm8k_buffer"


def test_gsm8k_recipe_equals_quick_start() -> None:
    recipe, shown = (
        yaml.safe_load(path.read_text()) for path in (RECIPES / "gsm8k/gsm8k.yaml", DOCUMENTS / "quick_start.yaml")
    )
    tasks = recipe["buffer"]["explorer_input"]
    sets = (tasks["taskset"], *tasks["eval_tasksets"])
    rewards = [taskset.pop("default_reward_fn_type") for taskset in sets]
    assert set(rewards) == {"math_reward"}, "math_workflow's own, named to say so"
    (asked,) = {taskset["format"].pop("system_prompt") for taskset in sets}
    assert "####" in asked, "the form of an answer that math_reward reads"
    assert shown["explorer"].pop("runner_per_model") == 16, "on a GPU the default is a whole step"
    assert (shown["synchronizer"].pop("sync_method"), recipe["synchronizer"].pop("sync_method")) == ("nccl", "memory")
    assert recipe["synchronizer"].pop("sync_offset") == 1, "else each GPU waits while the other one works"
    assert recipe["trainer"].pop("max_token_len_per_gpu") == 12288, "16,384 would take all of a GPU of 80 GB"
    named = {"project": recipe["project"], "name": recipe["name"]}
    assert recipe == {**shown, **named}


@pytest.mark.parametrize(
    ("override", "thinks"),
    [
        ("default_workflow_type=math_workflow", True),
        ("default_workflow_type=async_math_workflow", True),
        ("workflow_args={with_think: false}", False),
        ("default_workflow_type=null", None),
        ("default_reward_fn_type=math_reward", None),
        ("default_workflow_type=simple_workflow", None),
    ],
)
def test_a_math_workflow_without_a_reward_is_that_of_trinity_rft(override: str, thinks: bool | None) -> None:
    """Trinity-RFT's example of GRPO on GSM8K names `math_workflow` and no reward: there it has a system prompt and a
    reward for a format."""
    config = load_config(DOCUMENTS / "quick_start.yaml", [f"buffer.explorer_input.taskset.{override}"])
    tasks = config.buffer.explorer_input
    assert tasks.tasksets[0].workflow_args.get("with_think") is thinks
    assert tasks.eval_tasksets[0].workflow_args["with_think"]
    keys = [notice.key for notice in remarks(config)]
    assert ("buffer.explorer_input.taskset.workflow_args" in keys) is (thinks is True)
    again = config_from_text(to_yaml(config))
    assert again == config


@pytest.mark.parametrize("written", [True, False])
def test_a_list_of_task_sets_that_writes_with_think_gets_no_notice(written: bool) -> None:
    tree = yaml.safe_load((DOCUMENTS / "quick_start.yaml").read_text())
    inputs = tree["buffer"]["explorer_input"]
    inputs["tasksets"] = [inputs.pop("taskset") | {"workflow_args": {"with_think": True} if written else {}}]
    keys = [notice.key for notice in remarks(config_from_dict(tree))]
    assert ("buffer.explorer_input.tasksets[0].workflow_args" in keys) is not written


def test_asynchronous_runs_share_their_folder_and_store() -> None:
    explorer, trainer, newcomer = (load_config(RECIPES / "gsm8k" / f"{name}.yaml") for name in ASYNC)
    assert explorer.job_dir == trainer.job_dir == newcomer.job_dir
    assert store_url(explorer) == store_url(trainer) == store_url(newcomer)
    assert [run.explorer.name for run in (explorer, newcomer)] == ["explorer", "explorer_new"]
    assert (trainer.buffer.batch_size, trainer.buffer.train_batch_size) == (64, 512)


def test_verl_ppo_recipe() -> None:
    config = load_config(RECIPES / "verl_align/ppo_example.yaml")
    assert [taskset.name for taskset in config.buffer.explorer_input.tasksets] == ["gsm8k", "math"]
    assert config.model.max_model_len == 1536
    assert config.trainer.gradient_checkpointing
    assert not config.needs_reference
    trained = train_settings(config)
    assert trained.micro_batch_size == 16 and trained.critic is not None
    assert trained.critic.optimizer.lr == 1e-5 and trained.critic.optimizer.lr_warmup_steps_ratio == 0.05
    assert trained.critic.micro_batch_size == 32 and trained.critic.gradient_checkpointing
    assert "trainer.trainer_config.actor_rollout_ref.rollout" in [notice.key for notice in remarks(config)]
    assert config.algorithm.rollout_correction == "bypass", "no weights: clipped against the policy that sampled"


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads(path: Path) -> None:
    for stage in stages(load_config(path)):
        if stage.explorer.external_model is None:
            assert stage.model.max_model_len > stage.model.max_response_tokens
