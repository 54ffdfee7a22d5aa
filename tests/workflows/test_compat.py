"""Workflow classes in Trinity-RFT's style, loaded as plugins and run by the real runner on a real engine."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from raising import raising
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task
from workflows.workflow_helpers import run as play_scripted

from trinity_core.base.errors import InputError, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.base.plugins import load_plugins
from trinity_core.compat.workflow import StepWiseRewardWorkflow
from trinity_core.config.schema.buffer import FormatConfig, RolloutArgs
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.rollouts import SampledRollout
from trinity_core.results.audit import audit_runs
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.rollout.metrics import eval_numbers, step_numbers
from trinity_core.rollout.records import drawn_tasks
from trinity_core.rollout.runner import Outcome, TaskRunner
from trinity_core.rollout.workflow_loops import WorkflowLoop
from trinity_core.workflows import REWARD_FNS, WORKFLOWS, RewardItem, RewardPool

PLUGIN = """
import copy
import time

import torch
from trinity.common.experience import EID, Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn
from trinity.common.rewards.math_reward import MathRewardFn
from trinity.common.workflows import WORKFLOWS, MultiTurnWorkflow, SimpleWorkflow, Task, Workflow
from trinity.common.workflows.step_wise_workflow import (
    AsyncStepWiseRewardWorkflow, RewardPropagationWorkflow, StepWiseRewardWorkflow,
)
from trinity.utils.log import get_logger

logger = get_logger(__name__)


@REWARD_FUNCTIONS.register_module("lengths")
class Lengths(RewardFn):
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, response, truth=None, **kwargs):
        return {"length": self.scale * len(response), "has_truth": float(truth is not None)}


@WORKFLOWS.register_module("up_simple")
class Simple(SimpleWorkflow):
    pass


@WORKFLOWS.register_module("up_two_turns")
class TwoTurns(MultiTurnWorkflow):
    can_repeat = True

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self):
        made = []
        for i in range(self.repeat_times):
            memory = [{"role": "user", "content": self.task.task_desc}]
            for word in ("again", "and more"):
                answer = self.model.chat(memory, n=1)[0].response_text
                memory.append({"role": "assistant", "content": answer.strip()})
                memory.append({"role": "user", "content": word})
            one = self.process_messages_to_experience(memory, 0.5 + i, {"rounds": 2, "note": "x"})
            one.eid.run = i + self.run_id_base
            made.append(one)
        return made


@WORKFLOWS.register_module("up_async")
class Waits(Workflow):
    is_async = True

    async def run_async(self):
        time.sleep(0.01)
        [answer] = await self.model.chat_async([{"role": "user", "content": self.task.task_desc}], temperature=1.0)
        made = Experience(
            tokens=answer.tokens, prompt_length=answer.prompt_length, logprobs=answer.logprobs, reward=2.0,
            action_mask=torch.zeros_like(answer.action_mask), info={"kind": "made"}, eid=EID(step=1),
        )
        answer.reward, answer.metrics["seen"] = 1.0, 3
        return [answer, made]


@WORKFLOWS.register_module("up_unsampled")
class Unsampled(Workflow):
    def run(self):
        by_token = [0.25] * 3
        return [
            Experience(tokens=[1, 2, 3, 4], reward=1.0, token_level_reward=by_token, eid=EID(step=0)),
            Experience(tokens=[1, 2, 3, 4], token_level_reward=by_token, eid=EID(step=1)),
            Experience(tokens=[1, 2, 3, 4], reward=2.0, eid=EID(step=2)),
            Experience(tokens=[1, 2, 3, 4], teacher_logprobs=[-1.0] * 3, eid=EID(step=4)),
            Experience(tokens=[1, 2, 3, 4], reward=float("nan"), token_level_reward=by_token, eid=EID(step=3)),
            Experience(tokens=[1, 2, 3, 4], eid=EID(step=5)),
        ]


@WORKFLOWS.register_module("up_rebuilt")
class Rebuilt(Workflow):
    def run(self):
        logprobs = [-1.0] * 3 if self.task.workflow_args["sampled"] else None
        return [
            Experience(tokens=[1, 2, 3, 4], eid=EID(step=0)),
            Experience(tokens=[1, 2, 3, 4], logprobs=logprobs, reward=0.5, eid=EID(step=1)),
        ]


@WORKFLOWS.register_module("up_judged")
class Judged(Workflow):
    def run(self):
        [answer] = self.model.chat([{"role": "user", "content": self.task.task_desc}])
        judge = self.auxiliary_models[0]
        verdict = judge.chat.completions.create(
            model=judge.model_path, messages=[{"role": "user", "content": "Good?"}], temperature=0, max_tokens=4
        )
        answer.reward = 1.0 + len(verdict.choices[0].message.content)
        answer.info["tokens"] = len(self.auxiliary_model_wrappers[0].logprobs(answer.tokens))
        return [answer]


@WORKFLOWS.register_module("up_asks")
class Asks(Workflow):
    def run(self):
        ask = self.model.get_openai_client().chat.completions.create
        ask(messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=4, **self.task.workflow_args)
        [answer] = self.model.extract_experience_from_history()
        answer.reward = 0.0
        return [answer]


@WORKFLOWS.register_module("up_steps")
class Steps(StepWiseRewardWorkflow):
    max_step_num = 3

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.memory = [{"role": "user", "content": task.task_desc}]

    def step(self, step_num):
        answer = self.client.chat.completions.create(model=self.client.model_path, messages=self.memory)
        said = answer.choices[0].message
        self.memory += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "go on"}]
        return step_num < 1

    def reward(self, exps, step_num):
        return 10.0 * step_num + len(exps)


@WORKFLOWS.register_module("up_async_steps")
class AsyncSteps(AsyncStepWiseRewardWorkflow):
    max_step_num = 2

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.memory = [{"role": "user", "content": task.task_desc}]

    async def step_async(self, step_num):
        [said] = await self.model.chat_async(self.memory)
        judge = self.auxiliary_models[0]
        await judge.chat.completions.create(model=judge.model_path, messages=self.memory, max_tokens=2)
        self.memory += [{"role": "assistant", "content": said.response_text}, {"role": "user", "content": "go on"}]
        return True

    async def reward_async(self, exps, step_num):
        return 10.0 * step_num + len(exps)


@WORKFLOWS.register_module("up_groups")
class Groups(SimpleWorkflow):
    def run(self):
        answers = super().run()
        question = [{"role": "user", "content": answers[0].response_text + " Good?"}]
        verdicts = [one for _ in answers for one in self.model.chat(question)]
        for i, one in enumerate(verdicts):
            one.eid.task, one.eid.run, one.reward = f"{self.task.task_id}-verdicts", i, 0.5
        return answers + verdicts


@WORKFLOWS.register_module("up_states")
class States(RewardPropagationWorkflow):
    max_step_num = 5

    def run(self):
        self.memory, self.rooms = [{"role": "user", "content": "Which way?"}], ["hall"]
        taken = super().run()
        for one, room in zip(taken, self.rooms):
            one.info["env_state_hash"] = hash_of[room]
            if "paid" in self.task.workflow_args:
                one.info["step_reward"] = self.task.workflow_args["paid"] * (room == "hall")
        return taken

    def step(self, step_num):
        said = self.model.chat(self.memory)[0].response_text
        self.memory += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        self.rooms.append("den" if said == "left" else "end")
        return self.rooms[-1] != "end"

    def reward(self, exps):
        return 1.0


hash_of = {"hall": 11, "den": 22}


@WORKFLOWS.register_module("up_checked")
class Checked(Workflow):
    def run(self):
        [answer] = self.model.chat([{"role": "user", "content": self.task.task_desc}])
        parts = MathRewardFn()(response=answer.response_text, truth=self.task.truth, with_think=True)
        answer.reward = sum(parts.values())
        return [answer]


@WORKFLOWS.register_module("up_history")
class History(Workflow):
    def run(self):
        client, memory = self.model.get_openai_client(), [{"role": "user", "content": "Which way?"}]
        for said in ("And now?", "Sure?"):
            answers = client.chat.completions.create(messages=memory, **self.task.workflow_args).choices
            memory += [{"role": "assistant", "content": answers[0].message.content}, {"role": "user", "content": said}]
        taken = self.model.extract_experience_from_history()
        for one in taken:
            one.reward = 1.0
        return taken
"""


def load(folder: Path, source: str, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    load_plugins(folder)


@pytest.fixture(autouse=True)
def nothing_is_left():
    path, finders = sys.path.copy(), sys.meta_path.copy()
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    WORKFLOWS.elsewhere.clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("trinity", "upstream_style")]:
        del sys.modules[name]


@pytest.fixture
def plugin(tmp_path):
    load(tmp_path / "plugins", PLUGIN, "upstream_style")
    return tmp_path / "plugins"


@pytest.fixture
def play(plugin, tiny_engine, tiny_folder):
    """Run a task with the real runner, engine and reward workers."""
    rewards = RewardPool(plugin_dir=str(plugin))

    def played(workflow, repeat_times=2, rollout_args=None, **fields):
        async def main():
            pool = EnginePool([tiny_engine], str(tiny_folder))
            await pool.start()
            tokenizer = load_tokenizer(str(tiny_folder), False)
            stops = tuple(token for token in range(len(tokenizer)) if token % 4 == 0)
            limits = Limits(160, 100, 8, Sampling(8, stop_token_ids=stops))
            workflow_loop = WorkflowLoop()
            model = EngineModel(pool, ChatEncoder(tokenizer), limits, outside=workflow_loop.outside)
            runner = TaskRunner(model, rewards, at_once=2, timeout=200, auxiliary=[model], workflow_loop=workflow_loop)
            row, args = {"question": "Tom has 3 apples.", "answer": "3"}, rollout_args or RolloutArgs()
            task = make_task(workflow, raw=row, repeat_times=repeat_times, rollout_args=args, **fields)
            [outcome] = await runner.run([task])
            workflow_loop.close()
            if outcome.error is not None:
                raise outcome.error
            return outcome.experiences

        return asyncio.run(main())

    yield played
    rewards.close()


def test_a_simple_workflow_samples_as_the_native_one(play):
    ours = play("simple_workflow", 3, reward_fn="lengths", reward_fn_args={"scale": 2.0})
    theirs = play("up_simple", 3, reward_fn="lengths", reward_fn_args={"scale": 2.0})
    assert [one.run for one in theirs] == [0, 1, 2]
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and other.action_mask.all()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5) and (other.versions == one.versions).all()
        assert other.reward == one.reward == 2.0 * len(other.info["response"]) + 1.0
        assert other.metrics["length"] == one.metrics["length"] and other.temperature == one.temperature
    assert len({one.tokens.tobytes() for one in theirs}) > 1


def test_turns_of_an_engine_are_those_that_were_sampled(play, tiny_model):
    import torch

    rows = play("up_two_turns")
    assert [(one.run, one.turn, one.reward, one.metrics["rounds"]) for one in rows] == [(0, 0, 0.5, 2), (1, 0, 1.5, 2)]
    for one in rows:
        assert one.action_mask.any() and not one.action_mask.all() and one.info["note"] == "x"
        assert (one.versions[one.action_mask] == 0).all() and (one.versions[~one.action_mask] == -1).all()
        tokens = torch.tensor(one.tokens.astype(np.int64))
        with torch.no_grad():
            logits = tiny_model(tokens[None]).logits[0]
        expected = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()[one.prompt_length - 1 :]
        assert np.abs((expected - one.logprobs)[one.action_mask]).max() < 1e-3


def test_what_was_sampled_is_not_tokenised_again(plugin):
    turns = [[ord("a"), ord("b"), 2], [32, ord("a"), ord("b"), 2]]
    model = Turns(*turns)
    [one] = play_scripted(make_task("up_two_turns", repeat_times=1), model)
    prompt, rest = model.tokenizer.encode("<u1+1?><a"), model.tokenizer.encode("<uagain><a")
    assert one.tokens.tolist() == [*prompt, *turns[0], *rest, *turns[1]] and one.prompt_length == len(prompt)
    assert one.action_mask.tolist() == [True] * 3 + [False] * len(rest) + [True] * 4
    assert model.asked[1][0] == [*prompt, *turns[0], *rest]
    seeds = [how["seeds"] for _, how in model.asked]
    task = make_task("up_two_turns", repeat_times=1)
    assert seeds == [[task.rollout_seed(0, 0)], [task.rollout_seed(0, 1)]]


@pytest.mark.parametrize(("args", "turns"), [({}, [0, 1]), ({"n": 2}, [0, 0, 0, 0])])
def test_the_history_of_a_conversation_is_one_rollout(play, args, turns):
    rows = play("up_history", 2, workflow_args=args)
    assert [(one.run, one.turn) for one in rows] == [(run, turn) for run in range(2) for turn in turns]


def test_an_async_workflow_has_an_object_for_each_run(play):
    rows = play("up_async")
    assert [(one.run, one.turn, one.reward) for one in rows] == [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 1.0), (1, 1, 2.0)]
    for sampled, made in zip(rows[::2], rows[1::2], strict=True):
        assert made.tokens.tolist() == sampled.tokens.tolist() and (made.versions == sampled.versions).all()
        assert sampled.action_mask.all() and not made.action_mask.any() and not made.is_expert
        assert sampled.metrics["seen"] == 3.0 and made.info["kind"] == "made"


def test_rewards_of_tokens_are_parts_of_the_reward(plugin):
    """An answer with tokens other than the model's is an expert's only if it was not judged."""
    rows = play_scripted(make_task("up_unsampled", repeat_times=1), Turns())
    assert [row.total_reward for row in rows] == [1.0, 0.75, 2.0, None, None, None]
    assert [row.token_rewards is not None for row in rows] == [True, True, False, False, False, False]
    assert [row.is_expert for row in rows] == [False] * 5 + [True]
    assert [row.action_mask.any() for row in rows] == [True, True, True, True, False, True]
    assert [SampledRollout.of(row).reward for row in rows] == [1.0, 0.75, 2.0, None, None, None]


@pytest.mark.parametrize(("sampled", "first"), [(False, (False, 0.5)), (True, (True, None))])
def test_the_last_turn_of_a_rebuilt_conversation_judges_all_its_turns(plugin, sampled, first):
    """Before a turn that a model sampled, a turn without log-probs and reward is a demonstration."""
    rows = play_scripted(make_task("up_rebuilt", repeat_times=1, workflow_args={"sampled": sampled}), Turns())
    assert [(row.is_expert, row.reward) for row in rows] == [first, (False, 0.5)]


def test_an_auxiliary_model_answers_through_its_client(play):
    for one in play("up_judged"):
        assert one.reward >= 1 and one.info["tokens"] == len(one.tokens) - 1


@pytest.mark.parametrize("workflow", ["up_steps", "up_async_steps"])
def test_steps_are_numbered_and_have_their_rewards(play, workflow):
    rows = play(workflow)
    assert [(one.run, one.turn, one.reward) for one in rows] == [(0, 0, 1.0), (0, 1, 11.0), (1, 0, 1.0), (1, 1, 11.0)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
        assert second.prompt_length > len(first.tokens)


def test_a_group_of_its_own_is_stored_and_accounted_for(play, tmp_path):
    rows = play("up_groups", 3, reward_fn="lengths")
    own, verdicts = "explorer/1/0", "explorer/1/0/-verdicts"
    assert [(one.group, one.run) for one in rows] == [(own, 0), (own, 1), (own, 2)] + [(verdicts, i) for i in range(3)]
    assert [one.reward for one in rows[3:]] == [0.5] * 3
    outcomes = [Outcome(make_task("up_groups"), rows)]
    numbers = step_numbers(outcomes)
    assert numbers["sequences_per_rollout/max"] == 1 and numbers["reward/min"] == 0.5
    assert eval_numbers("t", outcomes)["eval/t/answers"] == 3
    layout = JobLayout(tmp_path / "project" / "run").create()
    drawn = drawn_tasks(outcomes, {verdicts: {"filter": 3}})
    with ExperienceStore.open(f"sqlite:///{layout.buffer}/explorer_output.db", str(layout.root)) as store:
        store.put("explorer", 1, {"step": 1}, rows[:3], 1, drawn=drawn)
    [audit] = audit_runs(layout.root).values()
    assert audit.clean and (audit.experiences_produced, audit.pending) == (6, 1)
    assert audit.dropped_by == {"filter": 1}


@pytest.mark.parametrize(("args", "paid"), [({}, [0.0, 1.0]), ({"paid": 2.0}, [2.0, 0.0])])
def test_steps_of_one_reward_keep_their_states_and_rewards_of_their_own(plugin, args, paid):
    rows = play_scripted(make_task("up_states", repeat_times=1, workflow_args=args), Turns("left", "out"))
    assert [(one.turn, one.state, one.reward) for one in rows] == [(0, "11", 1.0), (1, "22", 1.0)]
    assert [one.metrics["step_reward"] for one in rows] == paid


def test_a_client_drops_what_was_not_given_and_refuses_what_is_not_followed(play):
    [one] = play("up_asks", 1, workflow_args={"user": "me", "stream": False, "temperature": 0, "tool_choice": "auto"})
    assert one.metrics["truncated"] in (0.0, 1.0) and one.temperature == 1.0
    with raising(InputError, key="frequency_penalty"):
        play("up_asks", 1, workflow_args={"frequency_penalty": 0.5})


def test_a_registered_reward_class_scores_native_workflows_too(play):
    rows = play("math_workflow", reward_fn="lengths", reward_fn_args={"scale": 0.5})
    assert [one.reward for one in rows] == [0.5 * len(one.info["response"]) + 1.0 for one in rows]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("<think>1+1</think> <answer>2</answer>", 1.1), ("<answer>2</answer>", 0.9), ("<answer>3</answer>", -0.1)],
)
def test_the_mathematical_reward_class_scores_the_form_as_upstream(plugin, answer, reward):
    [one] = play_scripted(make_task("up_checked", repeat_times=1), Turns(answer), RewardPool(plugin_dir=str(plugin)))
    assert one.reward == pytest.approx(reward)


def test_what_upstream_has_and_we_have_not_is_named_with_its_file(tmp_path):
    for number, line in enumerate(
        ("from trinity.common.verl import Trainer", "import trinity.buffer", "from trinity.common.workflows import Nix")
    ):
        folder = tmp_path / str(number)
        name = f"asks_for_more_{number}"
        with pytest.raises(TrinityError) as error:
            load(folder, line, name)
        missing = ("trinity.common.verl", "trinity.buffer", "trinity.common.workflows.Nix")[number]
        for text in (str(folder / f"{name}.py"), f"{missing} "):
            assert text in str(error.value)
        assert name not in sys.modules


def test_an_installed_trinity_is_not_shadowed(tmp_path, monkeypatch):
    installed = tmp_path / "site" / "trinity"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("installed = True")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    load(tmp_path / "plugins", "from trinity import installed", "upstream_style")
    assert sys.modules["upstream_style"].installed is True


def test_other_files_of_a_checkout_are_imported_from_it(tmp_path):
    package = tmp_path / "trinity" / "common" / "workflows" / "envs"
    package.mkdir(parents=True)
    for folder in (tmp_path / "trinity", *list(package.parents)[:2], package):
        (folder / "__init__.py").write_text("raise RuntimeError" if folder != package else "")
    (package / "maze.py").write_text(
        "from trinity.common.workflows.workflow import Workflow\n"
        "class Maze(Workflow):\n"
        "    def run(self):\n"
        "        answers = self.model.chat([{'role': 'user', 'content': 'where?'}])\n"
        "        answers[0].reward = 1.0\n"
        "        return answers\n"
    )
    path = "trinity.common.workflows.envs.maze.Maze"
    (tmp_path / "setup.py").write_text("raise SystemExit('usage: setup.py')")
    (tmp_path / "trinity" / "common" / "workflows" / "__init__.py").write_text(
        f"raise RuntimeError\nNAMES = Registry('x', default_mapping={{'maze': '{path}', 'math_workflow': 'no.X'}})"
    )
    load_plugins(tmp_path)
    assert WORKFLOWS.resolve(path).__module__ == path.rpartition(".")[0] and WORKFLOWS.resolve("maze") is not None
    assert WORKFLOWS.resolve("math_workflow").__module__.startswith("trinity_core.")
    for name in ("maze", path):
        [one] = play_scripted(make_task(name, repeat_times=1, format=FormatConfig()), Turns("left"))
        assert one.reward == 1.0


@pytest.fixture
def checkout(tmp_path):
    """A checkout of Trinity-RFT with one workflow of its own."""
    package = tmp_path / "checkout" / "trinity" / "common" / "workflows"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAMES = {'den': 'trinity.common.workflows.den.Den'}\n")
    (package / "den.py").write_text("from trinity.common.workflows import Workflow\nclass Den(Workflow):\n    pass\n")
    (tmp_path / "checkout" / "setup.py").write_text("raise SystemExit('usage: setup.py')")
    return tmp_path / "checkout"


@pytest.mark.parametrize("installed", [False, True])
def test_a_checkout_holds_plugins_of_the_user_too(checkout, tmp_path, monkeypatch, installed):
    if installed:
        (tmp_path / "site" / "trinity").mkdir(parents=True)
        (tmp_path / "site" / "trinity" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (checkout / "upstream_style.py").write_text(
        "from trinity.common.workflows import WORKFLOWS, Workflow\n"
        "WORKFLOWS.register_module('up_beside', force=True)(type('Beside', (Workflow,), {}))\n"
    )
    assert load_plugins(checkout) == ["upstream_style"]
    assert "up_beside" in WORKFLOWS and WORKFLOWS.resolve("den").__module__ == "trinity.common.workflows.den"


@pytest.mark.parametrize("below", ["checkout/plugins", "checkout/own/plugins", "elsewhere"])
@pytest.mark.parametrize("on_path", [False, True])
def test_a_checkout_in_the_working_folder_is_not_installed(checkout, tmp_path, monkeypatch, below, on_path):
    """Ray's workers have the working folder on their path, where `trinity validate` has not."""
    (checkout / "trinity" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(checkout)
    if on_path:
        monkeypatch.syspath_prepend(str(checkout))
    (tmp_path / below).mkdir(parents=True)
    name = f"up_below_{below.replace('/', '_')}"
    load(
        tmp_path / below,
        "from trinity.common.workflows import WORKFLOWS, Workflow\n"
        f"WORKFLOWS.register_module('{name}', force=True)(type('Below', (Workflow,), {{}}))\n",
        "upstream_style",
    )
    assert name in WORKFLOWS and ("den" in WORKFLOWS.elsewhere) is below.startswith("checkout")


def test_a_broken_list_of_workflows_is_named_with_its_line(checkout):
    listed = checkout / "trinity" / "common" / "workflows" / "__init__.py"
    listed.write_text("NAMES = {}\nNAMES = {'den'\n")
    with pytest.raises(InputError) as error:
        load_plugins(checkout)
    assert f"{listed}:2" in str(error.value)


def test_a_folder_named_trinity_is_no_installation(tmp_path, monkeypatch):
    """Such as one with data, in the working folder, which is on the path of Ray's workers."""
    (tmp_path / "work" / "trinity").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    source = "from trinity.common.workflows import WORKFLOWS, Workflow\n"
    load(
        tmp_path / "plugins", source + "WORKFLOWS.register_module('up_data', force=True)(Workflow)\n", "upstream_style"
    )
    assert "up_data" in WORKFLOWS


def test_arguments_of_a_reward_class_are_those_of_its_init(plugin):
    """So that `trinity validate` reports missing and misspelt ones."""
    arguments = REWARD_FNS.arguments(REWARD_FNS.resolve("lengths"), "lengths")
    assert [*arguments.model_fields] == ["scale"] and arguments.model_config["extra"] == "forbid"
    with closing(RewardPool(1, plugin_dir=str(plugin))) as pool:
        assert pool.score_sync("lengths", [RewardItem("abc", args={"scale": 2.0})])[0].parts["length"] == 6.0
        with pytest.raises(TrinityError):
            pool.score_sync("lengths", [RewardItem("abc", args={"scal": 2.0})])


def test_plain_steps_may_run_an_event_loop():
    class Awaiting(StepWiseRewardWorkflow):
        max_step_num = 2

        def step(self, step_num):
            asyncio.run(asyncio.sleep(0))
            return True

        def reward(self, exps, step_num):
            asyncio.run(asyncio.sleep(0))
            return float(step_num)

    answer = lambda: SimpleNamespace(eid=SimpleNamespace(step=None), reward=None)  # noqa: E731
    model = SimpleNamespace(get_openai_client=lambda: None, extract_experience_from_history=lambda: [answer()])
    assert [one.reward for one in Awaiting(task=None, model=model).run()] == [0.0, 1.0]
