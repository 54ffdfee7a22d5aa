"""What a configuration names is looked up before anything starts, and again where it is used."""

import re
import sys
from types import SimpleNamespace

import psutil
import pytest
import yaml
from raising import raising

from trinity_core.config import ConfigError, stages
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.run.configuration import load_checked
from trinity_core.workflows import REWARD_FNS, WORKFLOWS, AgentWorkflow

TREE = {
    "model": {"model_path": "m", "max_model_len": 128},
    "buffer": {
        "explorer_input": {
            "tasksets": [{"name": "a", "path": "x"}, {"name": "b", "path": "x"}],
            "eval_tasksets": [{"name": "e", "path": "x"}],
        }
    },
}
INPUT = "buffer.explorer_input"
SET = f"{INPUT}.tasksets.a"
OPERATORS = "data_processor.experience_pipeline.operators"


@pytest.fixture
def load(tmp_path):
    def make(*overrides):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(TREE))
        return load_checked(path, overrides)

    return make


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{INPUT}.tasksets.b.default_reward_fn_type=math_rewrad", f"{INPUT}.tasksets[1].default_reward_fn_type"),
        (f"{INPUT}.eval_tasksets.e.default_workflow_type=maths", f"{INPUT}.eval_tasksets[0].default_workflow_type"),
        (f"{INPUT}.default_reward_fn_type=x", f"{INPUT}.default_reward_fn_type"),
        ("buffer.default_workflow_type=x", "buffer.default_workflow_type"),
        (f"{OPERATORS}=[{{name: dynamic_smapling}}]", f"{OPERATORS}[0].name"),
        (f"{OPERATORS}=[{{name: dynamic_sampling, args: {{row: 9}}}}]", f"{OPERATORS}[0].args.row"),
        (
            f"{OPERATORS}=[{{name: data_juicer, args: {{operators: [{{document_deduplicator: {{}}}}]}}}}]",
            f"{OPERATORS}[0].name",
        ),
        (f"{SET}.reward_fn_args.format_wieght=1", f"{INPUT}.tasksets[0].reward_fn_args.format_wieght"),
        (f"{SET}.reward_fn_args.format_weight=high", f"{INPUT}.tasksets[0].reward_fn_args.format_weight"),
        (f"{SET}.task_selector.selector_type=shufle", f"{INPUT}.tasksets[0].task_selector.selector_type"),
        (f"{SET}.task_selector.kwargs.tau=1", f"{INPUT}.tasksets[0].task_selector.kwargs.tau"),
        (
            f"{SET}.task_selector={{selector_type: difficulty_based, kwargs: {{lamb: 2}}}}",
            f"{INPUT}.tasksets[0].task_selector.kwargs.lamb",
        ),
        (f"{SET}.task_selector.feature_keys=[x]", f"{INPUT}.tasksets[0].task_selector.feature_keys"),
        (f"{SET}.default_workflow_type=simple_workflow", f"{INPUT}.tasksets[0].default_reward_fn_type"),
    ],
)
def test_what_is_named_wrongly_is_told(load, override, key):
    with raising(ConfigError, key=key) as caught:
        load(override)
    (problem,) = caught.value.problems
    assert "run.yaml" in problem.file or "override" in problem.file


@pytest.mark.parametrize(
    "mistake",
    [
        f"{OPERATORS}=[{{name: overlong_penalty}}]",
        f"{OPERATORS}=[{{name: overlong_penalty, args: {{max_response_length: text, cache_length: 4}}}}]",
        "algorithm.policy_loss_fn_args.clip_range=text",
        "data_processor.task_pipeline={inputs: [x], operators: [{name: text_length_filter, args: {min_len: text}}]}",
    ],
)
def test_mistake_that_all_stages_inherit_is_told_as_if_one_had_it(load, mistake):
    def messages(*overrides):
        with pytest.raises(ConfigError) as caught:
            load(mistake, "algorithm.algorithm_type=grpo", *overrides)
        return [(problem.key, problem.message) for problem in caught.value.problems]

    assert messages("stages=[{stage_name: a}, {stage_name: b}, {stage_name: c}]") == messages()


@pytest.mark.parametrize(
    ("kind", "name", "args", "model"),
    [
        ("reward_fn", "llm_judge", "reward_fn_args", True),
        ("reward_fn", "reward_model", "reward_fn_args", True),
        ("workflow", "rubric_judge_workflow", "reward_fn_args", True),
        ("workflow", "math_ruler_workflow", "workflow_args", True),
        ("workflow", "on_policy_distill_math_workflow", "workflow_args", False),
    ],
)
def test_a_judge_that_the_run_does_not_have_is_named(load, kind, name, args, model):
    override = f"{INPUT}.tasksets.a.default_{kind}_type={name}"
    with raising(ConfigError, key=f"{INPUT}.tasksets[0].default_{args.removesuffix('_args')}_type"):
        load(override)
    judge = "explorer.auxiliary_models=[{model_path: /models/judge, name: judge}]"
    load(override, judge)
    load(override, "mode=train", "buffer.total_steps=1")
    if model:
        load(override, judge, f"{INPUT}.tasksets.a.{args}.model=judge")
        with raising(ConfigError, key=f"{INPUT}.tasksets[0].{args}.model"):
            load(override, judge, f"{INPUT}.tasksets.a.{args}.model=jugde")


@pytest.mark.parametrize(
    ("workflow", "args"), [("command_workflow", "workflow_args.command=x"), ("agent_of_a_plugin", "name=a")]
)
def test_an_agent_needs_the_api_or_an_endpoint(load, workflow, args):
    @WORKFLOWS.register("agent_of_a_plugin")
    class Agent(AgentWorkflow):
        pass

    agent = (f"{INPUT}.tasksets.a.default_workflow_type={workflow}", f"{INPUT}.tasksets.a.{args}")
    load(*agent, "explorer.rollout_model.enable_openai_api=true")
    load(*agent, "mode=train", "buffer.total_steps=1")
    load(*agent, "mode=bench", "explorer.external_model={base_url: 'http://127.0.0.1:1/v1', model_name: m}")
    with pytest.raises(ConfigError) as caught:
        load(*agent)
    assert [problem.key for problem in caught.value.problems] == ["explorer.rollout_model.enable_openai_api"]


def test_agents_are_not_forced_into_the_grammar_of_their_task_set(load):
    key, api = f"{INPUT}.tasksets.a", "explorer.rollout_model.enable_openai_api=true"
    agent = (api, f"{key}.default_workflow_type=command_workflow", f"{key}.workflow_args.command=x")
    forced = f"{key}.rollout_args.structured_output={{choice: [a, b]}}"
    load(api, forced)
    with raising(ConfigError, key=f"{INPUT}.tasksets[0].rollout_args.structured_output"):
        load(*agent, forced)


def test_turns_of_an_environment_fit_the_algorithm(toy_games, load):
    overrides = (f"{INPUT}.tasksets.a.default_workflow_type=env_workflow", "algorithm.algorithm_type=multi_step_grpo")
    args = f"{INPUT}.tasksets.a.workflow_args={{environment: frozen_lake, step_wise: true%s}}"
    load(*overrides, args % ", turn_rewards: rollout")
    with raising(ConfigError, key=f"{INPUT}.tasksets[0].workflow_args.turn_rewards"):
        load(*overrides, args % "")


@pytest.mark.parametrize(
    ("workflow", "args", "key"),
    [
        ("env_workflow", "environment: frozen_lake, step_wise: true", "workflow_args.discount"),
        ("env_workflow", "environment: frozen_lake, step_wise: true, discount: 0.95", "workflow_args.discount"),
        (
            "env_workflow",
            "environment: frozen_lake, step_wise: true, turn_rewards: rollout",
            "workflow_args.turn_rewards",
        ),
        ("env_workflow", "environment: frozen_lake, step_wise: true, discount: 0", None),
        ("env_workflow", "environment: frozen_lake", None),
        ("frozen_lake_workflow", "step_wise: true", "workflow_args.discount"),
        ("multi_turn_workflow", "step_wise: true", "workflow_args.discount"),
        ("multi_turn_workflow", "step_wise: true, discount: 1", "workflow_args.discount"),
        ("multi_turn_workflow", "step_wise: true, discount: 0", None),
        ("multi_turn_workflow", "max_turns: 3", None),
        ("toolcall_workflow", "step_wise: true", "workflow_args.discount"),
        ("command_workflow", "command: agent", "default_workflow_type"),
    ],
)
def test_gigpo_adds_up_the_rewards_of_turns_itself(toy_games, load, workflow, args, key):
    """A turn's reward must be its own: returns would be discounted twice, and a reward that each turn repeats would
    count as often as there are turns, so that dawdling pays."""
    overrides = (f"{INPUT}.tasksets.a.default_workflow_type={workflow}", f"{INPUT}.tasksets.a.workflow_args={{{args}}}")
    engine = "explorer.rollout_model={enable_openai_api: true, tool_call_parser: hermes}"
    load(*overrides, engine)
    if key is None:
        load(*overrides, engine, "algorithm.algorithm_type=gigpo")
        return
    with pytest.raises(ConfigError) as caught:
        load(*overrides, engine, "algorithm.algorithm_type=gigpo")
    [problem] = caught.value.problems
    assert problem.key.endswith(f"tasksets[0].{key}"), problem
    load(*overrides, engine, "algorithm.algorithm_type=gigpo", "mode=train", "buffer.total_steps=1")


def test_an_environments_tasks_take_no_reward_function(toy_games, load):
    tasks = f"{INPUT}.tasksets.a"
    lake = (f"{tasks}.default_workflow_type=env_workflow", f"{tasks}.workflow_args={{environment: frozen_lake}}")
    load(*lake, f"{INPUT}.default_reward_fn_type=math_reward")
    for override in (f"{tasks}.default_reward_fn_type=math_reward", f"{tasks}.reward_fn_args={{x: 1}}"):
        with raising(ConfigError, key=override.partition("=")[0].replace("tasksets.a", "tasksets[0]")):
            load(*lake, override)
    alone = [
        f"{INPUT}.tasksets=[{{path: d, workflow_args: {{environment: frozen_lake}}}}]",
        f"{INPUT}.eval_tasksets=[]",
    ]
    for place in (INPUT, "buffer"):
        default = f"{place}.default_reward_fn_type=math_reward"
        with raising(ConfigError, key=f"{place}.default_reward_fn_type"):
            load(*alone, f"{INPUT}.default_workflow_type=env_workflow", default)


def test_plugins_load_before_names_are_checked(load, tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "brought_names.py").write_text(
        "from dataclasses import replace\n"
        "from trinity_core.config.algorithm_types import ALGORITHMS, register_algorithm\n"
        "from trinity_core.workflows import REWARD_FNS, WORKFLOWS, Workflow\n"
        "register_algorithm(replace(ALGORITHMS['grpo'], name='brought'))\n"
        "WORKFLOWS.register('brought')(Workflow)\n"
        "@REWARD_FNS.register('brought')\n"
        "def reward(*, response, limit: int = 3, **args): ...\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    for registry in (ALGORITHMS, WORKFLOWS, REWARD_FNS):
        monkeypatch.setitem(registry, "brought", None)
        registry.pop("brought")
    names = [f"buffer.default_{name}=brought" for name in ("workflow_type", "reward_fn_type")]
    args = f"{INPUT}.tasksets.a.reward_fn_args={{limit: '4', other: 1}}"
    try:
        config = load(f"plugin_dir={tmp_path}/plugins", "algorithm.algorithm_type=brought", *names, args)
    finally:
        sys.modules.pop("brought_names", None)
    assert config.buffer.explorer_input.tasksets[0].reward_fn_args == {"limit": 4, "other": 1}
    assert stages(config) == [config]


ROLLOUTS = ("explorer.rollout_model.tool_call_parser=hermes", "explorer.rollout_model.enable_openai_api=true")
JUDGED = "default_reward_fn_type: llm_judge, reward_fn_args"


@pytest.mark.parametrize(
    ("taskset", "key"),
    [
        ("default_workflow_type: math_workflow, workflow_args: {max_turns: 3}", "workflow_args.max_turns"),
        ("default_workflow_type: math_rm_workflow, workflow_args: {a: 3}", "workflow_args.a"),
        ("default_workflow_type: multi_turn_workflow, workflow_args: {discount: 0.5}", "workflow_args"),
        ("default_workflow_type: toolcall_workflow, workflow_args: {time_limit: 3}", "workflow_args"),
        ("default_workflow_type: command_workflow, workflow_args: {command: ''}", "workflow_args"),
        (f"{JUDGED}: {{base_url: 'http://judge/v1'}}", "reward_fn_args.model_name"),
        (f"{JUDGED}: {{base_url: 'http://judge/v1', model_name: a, model: b}}", "reward_fn_args.model"),
        (f"{JUDGED}: {{api_key_env: KEY}}", "reward_fn_args.api_key_env"),
        (f"{JUDGED}: {{temperature: -1}}", "reward_fn_args.temperature"),
    ],
)
def test_arguments_without_effect_are_refused(load, taskset, key):
    with raising(ConfigError, key=f"{INPUT}.tasksets[0].{key}"):
        load(
            f"{INPUT}.tasksets=[{{name: a, path: x, {taskset}}}]",
            "explorer.auxiliary_models=[{model_path: b}]",
            *ROLLOUTS,
        )


def test_databases_on_a_network_file_system_are_refused(load, tmp_path, monkeypatch):
    mounts = [SimpleNamespace(mountpoint=str(tmp_path.resolve()), device="host:/export", fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    there = f"checkpoint_root_dir={tmp_path}"
    with pytest.raises(ConfigError) as caught:
        load(there)
    store, mlflow = sorted(caught.value.problems, key=lambda problem: problem.key)
    assert store.key == "buffer.trainer_input.experience_buffer.path"
    assert re.search(r"network file system \(nfs4: .*explorer_output.db\).*postgresql://", store.message)
    assert mlflow.key == "monitor.monitor_args.uri"
    assert re.search(r"network file system \(nfs4: .*mlflow.db\).*http://host:5000", mlflow.message)
    for path in ("postgresql://me@host/db", "sqlite:////var/lib/run.db"):
        store_elsewhere = f"{store.key}={path}"
        for uri in ("http://host:5000", "postgresql://me@host/mlflow", "sqlite:////var/lib/mlflow.db"):
            load(there, store_elsewhere, f"{mlflow.key}={uri}")
    load(there, store_elsewhere, "monitor.monitor_type=tensorboard")
    with raising(ConfigError, key="monitor.monitor_args.uri"):
        load(there, "mode=bench", f"{mlflow.key}=sqlite:///{tmp_path}/other.db")
