import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from raising import raising
from workflow_helpers import ScriptedModel, make_task, run

from trinity_core.base.errors import TrinityError
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data.experience import from_bytes, to_bytes
from trinity_core.workflows import (
    WORKFLOWS,
    RecordingModel,
    Workflow,
    load_plugins,
)
from trinity_core.workflows.rollout_model import RolloutModel

CIRCLE: list = []
CIRCLE.append(CIRCLE)


def test_math_workflow_scores_all_repeats_of_one_call():
    model = ScriptedModel("#### 2", "#### 3", "two")
    task = make_task()
    experiences = run(task, model)
    messages, n, tools, args = model.asked[0]
    assert len(model.asked) == 1 and n == 3 and tools is None
    assert messages == [{"role": "user", "content": "1+1?"}]
    assert args == {"temperature": 0.7, "seeds": task.rollout_seeds(), "chat_template": None}
    assert [one.reward for one in experiences] == [1, 0, 0]
    assert [one.run for one in experiences] == [0, 1, 2]
    first = experiences[0]
    assert first.group == "explorer/1/0" and first.task_index == 5 and not first.truncated
    assert first.metrics == {"accuracy": 1.0, "verifier_errors": 0.0, "response_length": 7.0, "truncated": 0.0}
    assert (
        first.info["prompt"] == "1+1?" and first.info["response"] == "#### 2" and first.info["truth"].endswith("#### 2")
    )
    assert first.versions.tolist() == [4] * 7 and first.action_mask.all()
    assert from_bytes(to_bytes([first]))[0].info == first.info


def test_a_prompt_that_was_cut_carries_no_loss():
    one = run(make_task(repeat_times=1), ScriptedModel("", reason="prompt_too_long"))[0]
    assert not one.action_mask.any() and one.truncated and one.reward == 0


def test_an_answer_cut_at_the_limit_is_marked():
    one = run(make_task(repeat_times=1), ScriptedModel("#### 2", reason="length"))[0]
    assert one.truncated and one.action_mask.all() and one.metrics["truncated"] == 1


def test_a_simple_workflow_needs_a_reward_function():
    with raising(TrinityError, key="default_reward_fn_type"):
        run(make_task("simple_workflow"), ScriptedModel("a", "b", "c"))
    rewards = run(make_task("simple_workflow", reward_fn="math_reward"), ScriptedModel("#### 2", "#### 2", "x"))
    assert [one.reward for one in rewards] == [1, 1, 0]


def test_a_plain_workflow_runs_in_a_thread(monkeypatch):
    class Plain(Workflow):
        def run(self):
            answers = self.model.chat_sync(self.task.messages, n=self.task.repeat_times)
            rewards = self.rewards.score_sync("math_reward", [])
            assert rewards == []
            return [answer.experience(reward=0.5) for answer in answers]

    monkeypatch.setitem(WORKFLOWS, "plain", Plain)
    with ThreadPoolExecutor(1) as threads:
        experiences = run(make_task("plain"), ScriptedModel("a", "b", "c"), threads=threads)
    assert [(one.run, one.reward, one.group) for one in experiences] == [(n, 0.5, "explorer/1/0") for n in range(3)]


@pytest.fixture
def made(monkeypatch):
    """Run a workflow that makes an experience with each of these fields from one answer."""

    def made(*fields, **task):
        class Made(Workflow):
            async def run(self):
                (answer,) = await self.model.chat(self.task.messages)
                return [answer.experience(**one) for one in fields]

        monkeypatch.setitem(WORKFLOWS, "made", Made)
        return run(make_task("made", **task), ScriptedModel("a"))

    return made


def test_turn_numbers_of_the_workflow_are_kept(made):
    assert [(one.run, one.turn) for one in made(*({"run": 1, "turn": turn} for turn in range(2)))] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("count", "short"), [(2, True), (3, False)])
def test_too_few_rollouts_give_a_warning(made, caplog, count, short):
    made(*({"reward": 0.5, "run": run} for run in range(count)))
    assert any("repeat_times" in message for message in caplog.messages) is short


def test_result_other_than_experiences_is_refused(monkeypatch):
    class Wrong(Workflow):
        async def run(self):
            return [1]

    monkeypatch.setitem(WORKFLOWS, "wrong", Wrong)
    with raising(TrinityError, key="wrong"):
        run(make_task("wrong"), ScriptedModel())


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float64(0.5), "0.5", 0.5])
def test_numbers_may_be_of_numpy(made, reward):
    info = {"parts": {1}, "scores": np.arange(2), "best": np.float32(0.5)}
    fields = {"metrics": {"length": np.float32(2)}, "info": info, "turn": np.int64(1), "state": [3]}
    (one,) = from_bytes(to_bytes(made({"reward": reward, **fields})))
    assert (one.reward, one.metrics, one.turn, one.state) == (0.5, {"length": 2.0}, 1, "[3]")
    assert one.info == {"parts": "{1}", "scores": [0, 1], "best": 0.5, "taskset": "t"}


@pytest.mark.parametrize(
    "verdict",
    [
        *({"reward": reward} for reward in ("good", [1, 2], float("nan"), np.float32("inf"))),
        {"token_rewards": [0.5, float("nan")]},
        {"teacher_logprobs": [-1, float("-inf")]},
        {"reward": 1, "metrics": {"accuracy": float("nan")}},
        {"reward": 1, "turn": None},
        {"reward": 1, "info": {(0, 1): "a move"}},
        {"reward": 1, "info": {"itself": CIRCLE}},
    ],
)
def test_what_cannot_be_trained_on_or_stored_is_a_workflow_error(made, verdict):
    with raising(TrinityError, key="made"):
        made(verdict)


def test_a_metric_that_is_no_finite_number_is_left_out(made, caplog):
    fields = {"reward": 1, "action_mask": [True, False], "teacher_logprobs": [-1, float("nan")]}
    (one,) = made({**fields, "metrics": {"rate": float("nan"), 2: 1, "turns": 3}}, repeat_times=1)
    assert one.metrics == {"2": 1.0, "turns": 3.0} and any("rate" in message for message in caplog.messages)


def test_workflow_cannot_change_its_task(monkeypatch):
    """A row is drawn again in the next epoch, and its task may be retried."""

    class Appends(Workflow):
        async def run(self):
            (answer,) = await self.model.chat(self.task.messages)
            self.task.raw["messages"].append({"role": "assistant", "content": answer.text})
            for args in (self.task.workflow_args, self.task.reward_fn_args):
                args["seen"].append(1)
            return [answer.experience(reward=1)]

    monkeypatch.setitem(WORKFLOWS, "appends", Appends)
    row = {"messages": [{"role": "user", "content": "1+1?"}]}
    form = FormatConfig(prompt_type="messages", messages_key="messages")
    task = make_task("appends", raw=row, format=form, workflow_args={"seen": []}, reward_fn_args={"seen": []})
    model = ScriptedModel("2")
    for _ in range(2):
        run(task, model)
        assert model.asked[-1][0] == [{"role": "user", "content": "1+1?"}]
    assert len(row["messages"]) == 1 and task.workflow_args == task.reward_fn_args == {"seen": []}


class WholeModel:
    """Has whatever is asked of it."""

    def __getattr__(self, name):
        return name


def test_a_recording_model_keeps_what_it_answered():
    async def rollout():
        model = RecordingModel(ScriptedModel("a", "bb"))
        await model.chat([{"role": "user", "content": "x"}], n=2)
        await model.generate([1, 2])
        model.chat_sync([])
        return model

    model = asyncio.run(rollout())
    history = model.extract_experience_from_history()
    assert [one.response_length for one in history] == [2, 3, 2, 2]
    assert model.extract_experience_from_history() == []
    members = {name for name in dir(RolloutModel) if not name.startswith("_")} | set(RolloutModel.__annotations__)
    assert all(hasattr(RecordingModel(WholeModel()), name) for name in members)
    assert copy.copy(model).tokenizer is model.tokenizer


def test_plugins_register_their_workflows(tmp_path, capsys):
    """What they print stays out of a command's JSON."""
    (tmp_path / "my_plugin_words.py").write_text("WORD = 'x'\nprint(WORD)\n")
    (tmp_path / "my_plugin_flow.py").write_text(
        "from my_plugin_words import WORD\n"
        "from trinity_core.workflows import WORKFLOWS, SimpleWorkflow\n"
        "@WORKFLOWS.register('mine_' + WORD)\n"
        "class Mine(SimpleWorkflow):\n    default_reward = 'math_reward'\n"
    )
    (tmp_path / "_left_out.py").write_text("raise ValueError\n")
    assert load_plugins(tmp_path) == ["my_plugin_flow", "my_plugin_words"]
    assert capsys.readouterr() == ("", "x\n")
    assert load_plugins(tmp_path) == ["my_plugin_flow", "my_plugin_words"]
    assert [one.reward for one in run(make_task("mine_x", repeat_times=1), ScriptedModel("#### 2"))] == [1]
    assert [one.reward for one in run(make_task("my_plugin_flow.Mine", repeat_times=1), ScriptedModel("#### 2"))] == [1]
    assert load_plugins(None) == []
    WORKFLOWS.pop("mine_x")


def test_plugins_that_cannot_be_loaded(tmp_path):
    with raising(TrinityError, key="plugin_dir"):
        load_plugins(tmp_path / "nowhere")
    for failing in ("import not_a_module_at_all", "assert False, 'no licence'", "raise SystemExit(3)"):
        (tmp_path / "broken_plugin.py").write_text(failing)
        for _ in range(2):
            with raising(TrinityError, key=str(tmp_path / "broken_plugin.py")):
                load_plugins(tmp_path)
    (tmp_path / "broken_plugin.py").unlink()
    (tmp_path / "tasks.py").write_text("")
    with raising(TrinityError, key=str(tmp_path / "tasks.py")):
        load_plugins(tmp_path)
    (tmp_path / "tasks.py").unlink()
    (tmp_path / "json.py").write_text("")
    with raising(TrinityError, key=str(tmp_path / "json.py")):
        load_plugins(tmp_path)


THOUGHT = "<think> 9 + 9 </think>\n<answer> 18 </answer>"


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (THOUGHT, {"accuracy": 1.0, "format_score": 0.1}),
        ("So: " + THOUGHT, {"accuracy": 1.0, "format_score": 0.1}),
        ("<answer> 18 </answer>", {"accuracy": 1.0, "format_score": -0.1}),
        ("<think> 8 </think> <answer>17</answer>", {"accuracy": 0.0, "format_score": 0.1}),
        (THOUGHT + " or 17", {"accuracy": 1.0, "format_score": -0.1}),
        ("#### 18", {"accuracy": 1.0, "format_score": -0.1}),
        ("18", {"accuracy": 0.0, "format_score": -0.1}),
    ],
)
def test_thinking_is_asked_for_and_scored_as_elsewhere(answer, parts):
    """`with_think`: the reward of Trinity-RFT's `math_workflow`, accuracy plus or minus 0.1 for its form."""
    pytest.importorskip("math_verify")
    row = {"question": "9+9?", "answer": "#### 18"}
    model = ScriptedModel(answer)
    [one] = run(make_task(raw=row, repeat_times=1, workflow_args={"with_think": True}), model)
    assert {name: one.metrics[name] for name in parts} == parts
    assert one.reward == pytest.approx(sum(parts.values()))
    [asked, *_] = model.asked
    assert [message["role"] for message in asked[0]] == ["system", "user"] and "<answer>" in asked[0][0]["content"]


def test_a_system_prompt_of_ones_own_stays():
    columns = FormatConfig(prompt_key="question", response_key="answer", system_prompt="Be brief.")
    model = ScriptedModel("<answer> 2 </answer>")
    [one] = run(make_task(repeat_times=1, workflow_args={"with_think": True}, format=columns), model)
    assert model.asked[0][0][0] == {"role": "system", "content": "Be brief."} and one.reward == pytest.approx(0.9)
    [plain] = run(make_task(repeat_times=1), ScriptedModel("<answer> 2 </answer>"))
    assert plain.reward == 1.0 and "format_score" not in plain.metrics
