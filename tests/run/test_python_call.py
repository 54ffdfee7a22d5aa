"""`trinity_core.train`: runs from Python."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict
from raising import raising
from run.lock_holders import process_holding

from studio.runs import find_runs
from trinity_core import train
from trinity_core.base import waits
from trinity_core.base.errors import InputError, TrinityError
from trinity_core.config import load_config
from trinity_core.config.schema import Config
from trinity_core.data.formats import demonstration, preference, prompt_messages, tools
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.exchange.tracking.mlflow_root import default_uri
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.run.python_call import TRL_SETTINGS
from trinity_core.workflows.rewards import RewardItem, RewardPool
from trinity_core.workflows.rewards.functions import reward_of

NOTEBOOK = Path(__file__).parents[2] / "docs" / "train.ipynb"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """There is no model, and a run is over at once."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "shown"))
    monkeypatch.setattr("trinity_core.exchange.tracking.mlflow_writer.share_experiment", lambda *_: None)
    monkeypatch.setattr("trinity_core.run.preflight.checks.load_ready", load_config)
    monkeypatch.setattr(
        "trinity_core.run.driver.run_configuration", lambda config, is_ready: {"hf_dir": None, "name": config.name}
    )


def score(function, response="two", **row):
    return reward_of({function.__name__: function})(prompt="1+1?", response=response, truth=None, task=row)


def test_a_function_gets_what_trl_gives_it():
    def seen(prompts, completions, answer, **columns):
        assert (prompts, completions, answer, columns) == (["1+1?"], ["two"], [2], {"level": ["easy"]})
        return [0.5]

    assert score(seen, prompt="1+1?", answer=2, level="easy") == {"seen": 0.5}


def test_functions_may_be_async_take_few_columns_and_not_apply():
    async def slow(completions):
        return [1.0]

    def never(completions, **_):
        return [None]

    functions = {"slow": slow, "never": never}
    assert reward_of(functions)(prompt="", response="", truth=None, task={"prompt": "", "extra": 1}) == {"slow": 1.0}
    with pytest.raises(ValueError):
        score(never, prompt="")
    with pytest.raises(ValueError):
        score(lambda_named("wrong_length", [1.0, 2.0]), prompt="")


@pytest.mark.parametrize(
    ("values", "value"),
    [([True], 1.0), ([numpy.float32(0.5)], 0.5), (numpy.array([2]), 2.0), (torch.tensor([0.5]), 0.5),
     ([torch.tensor(0.5)], 0.5), ((1,), 1.0)],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_taken(values, value):
    assert score(lambda_named("reward", values), prompt="") == {"reward": value}


@pytest.mark.parametrize("values", [["1.0"], [{}], [float("nan")], [[1.0]], 1.0, None, numpy.ones(2), [1j]])
def test_what_is_no_number_is_no_verdict(values):
    with pytest.raises((TypeError, ValueError)):
        score(lambda_named("reward", values), prompt="")


class Length:
    def __init__(self, scale):
        self.scale = scale

    async def __call__(self, completions, **_):
        return [self.scale * len(text) for text in completions]


def scaled(scale, completions, **_):
    return [scale * len(text) for text in completions]


def test_partials_and_objects_are_rewards_under_the_functions_name(tmp_path):
    """In another process, which does not find this module."""
    result = train("model", [{"prompt": "a"}], [functools.partial(scaled, 2), Length(3)], output_dir=tmp_path)
    config = load_config(result.config_file)
    [tasks] = config.buffer.explorer_input.tasksets
    name = tasks.default_reward_fn_type
    with closing(RewardPool(1, plugin_dir=config.plugin_dir)) as pool:
        [reward] = pool.score_sync(name, [RewardItem("two", task={"prompt": "a"})])
    assert (reward.error, reward.parts) == (None, {"scaled": 6.0, "Length": 9.0})


def lambda_named(name, values):
    def function(completions, **_):
        return values

    function.__name__ = name
    return function


def test_a_function_that_needs_what_no_row_has_is_refused(tmp_path):
    def needs(completions, solution):
        return [0.0]

    with raising(InputError, key="needs"):
        train("model", [{"prompt": "a"}], needs, output_dir=tmp_path)


def test_functions_have_names_of_their_own(tmp_path):
    twice = lambda_named("one", [0.0])
    for rewards in ([], [twice, twice], [lambda completions: [0.0]], [twice, functools.partial(twice)]):
        with pytest.raises(InputError):
            train("model", [{"prompt": "a"}], rewards, output_dir=tmp_path)


@pytest.mark.parametrize("row", [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "completion": "b"}])
def test_eval_rows_without_rewards_are_held_out(tmp_path, row):
    result = train("model", [row], output_dir=tmp_path, eval_rows=[row] * 2)
    buffers = load_config(result.config_file).buffer.trainer_input.auxiliary_buffers
    assert buffers["test"].held_out and len(Path(buffers["test"].path).read_text().splitlines()) == 2


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "algorithm", "form"),
    [
        (PAIR, "dpo", {"prompt_key": "prompt"}),
        ({"prompt": "a", "completion": "b"}, "sft", {"prompt_key": "prompt", "response_key": "completion"}),
        ({"messages": [TURN, TURN]}, "sft", {"prompt_type": "messages", "messages_key": "messages"}),
        ({"prompt": [TURN], "completion": [TURN]}, "sft", {"prompt_type": "messages", "messages_key": "messages"}),
        ({"prompt": "a", "messages": [TURN, TURN]}, "sft", {"prompt_type": "messages", "messages_key": "messages"}),
    ],
)
def test_rows_without_rewards_are_examples(tmp_path, row, algorithm, form):
    settings = {"algorithm.optimizer.lr": 0.5, "model.max_response_tokens": 32}
    result = train("model", [row] * 2, output_dir=tmp_path / "run", settings=settings)
    config = load_config(result.config_file)
    buffer = config.buffer.trainer_input.experience_buffer
    assert (config.mode, config.algorithm.algorithm_type, config.algorithm.optimizer.lr) == ("train", algorithm, 0.5)
    assert (config.model.max_prompt_tokens, config.model.max_response_tokens) == (512, 32)
    assert form.items() <= dict(buffer.format).items()
    assert len(Path(buffer.path).read_text().splitlines()) == 2 and result.model_folder is None


TOLD = {"role": "assistant", "content": "b"}
OTHER = {"role": "assistant", "content": "c"}


def learnt(folder, rows):
    """The texts that carry loss in each row, as the trainer reads it: `|` between conversations and answers."""
    config = load_config(train("model", rows, output_dir=folder).config_file)
    buffer, is_dpo = config.buffer.trainer_input.experience_buffer, config.algorithm.algorithm_type == "dpo"
    texts = []
    for line in Path(buffer.path).read_text().splitlines():
        row = json.loads(line)
        read = preference(row, buffer.format) if is_dpo else [demonstration(row, buffer.format)]
        texts.append("|".join(one.messages[turn]["content"] for one in read for turn in one.learned_turns))
    return texts


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"messages": [TURN, TOLD, TURN, OTHER]}, "b|c"),
        ({"messages": [TURN, TOLD | {"weight": 0}, TURN, OTHER]}, "c"),
        ({"prompt": [TURN, TOLD, TURN], "completion": [OTHER]}, "c"),
        ({"prompt": [TURN], "completion": [TOLD, TURN, OTHER]}, "b|c"),
        ({"prompt": "a", "completion": "b"}, "b"),
        ({"chosen": [TURN, TOLD], "rejected": [TURN, OTHER]}, "b|c"),
        ({"chosen": [TURN, TOLD, TURN, TOLD], "rejected": [TURN, TOLD, TURN, OTHER]}, "b|c"),
        ({"prompt": [TURN], "chosen": [TOLD], "rejected": [OTHER]}, "b|c"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "b|c"),
        ({"prompt": "a", "chosen": [TURN, TOLD], "rejected": [TURN, OTHER]}, "b|c"),
        ({"prompt": "a", "completion": [TOLD]}, "b"),
        ({"prompt": "a", "completion": "b", "messages": [TURN, OTHER]}, "b"),
        ({"prompt": [TURN], "completion": [TOLD], "messages": [TURN, OTHER]}, "b"),
    ],
)
def test_answers_carry_loss_as_in_trl(tmp_path, row, texts):
    assert learnt(tmp_path, [row]) == [texts]


SYSTEM = {"role": "system", "content": "Think."}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": [SYSTEM, TURN], "messages": [TURN, TOLD]}, [SYSTEM, TURN]),
        ({"prompt": "a", "messages": [OTHER, TURN, TOLD]}, [TURN]),
        ({"prompt": [TURN], "completion": [TOLD]}, [TURN]),
        ({"prompt": "a", "completion": [TOLD]}, [TURN]),
        ({"prompt": "a", "chosen": [TURN, TOLD], "rejected": [TURN, OTHER]}, [TURN]),
        ({"messages": [SYSTEM, TURN, TOLD]}, [SYSTEM, TURN]),
    ],
)
def test_with_rewards_the_prompt_is_what_is_asked(tmp_path, row, asked):
    """Whatever answers the row has beside it; a function gets the prompt as the row has it."""
    rewards = lambda_named("reward", [0.0]) if "prompt" in row else "math_reward"
    config = load_config(train("model", [row], rewards, output_dir=tmp_path).config_file)
    [tasks] = config.buffer.explorer_input.tasksets
    written = json.loads(Path(tasks.path).read_text())
    assert written == row and prompt_messages(written, tasks.format) == asked


def test_the_reference_is_the_answer_rather_than_the_completion(tmp_path):
    row = {"prompt": "a", "completion": "It is 4.", "answer": "4"}
    config = load_config(train("model", [row], "math_reward", output_dir=tmp_path).config_file)
    assert config.buffer.explorer_input.tasksets[0].format.response_key == "answer"


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("encoded", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "texts"])
@pytest.mark.parametrize("rewards", [None, "math_reward"])
def test_tools_are_read_in_whichever_row_they_are(tmp_path, rewards, encoded):
    rows = [{"messages": [TURN, TOLD], "tools": value} for value in (None, encoded)]
    buffer = load_config(train("model", rows, rewards, output_dir=tmp_path).config_file).buffer
    data = buffer.explorer_input.tasksets[0] if rewards else buffer.trainer_input.experience_buffer
    written = [json.loads(line) for line in Path(data.path).read_text().splitlines()]
    assert [tools(row, data.format) for row in written] == [None, [TOOL]]


@pytest.mark.parametrize(
    "table",
    [
        {"prompt": ["a", "d"], "completion": ["b", "c"]},
        pandas.DataFrame({"prompt": ["a", "d"], "completion": ["b", "c"]}, index=[7, 8]),
        Dataset.from_dict({"prompt": ["a", "d"], "completion": ["b", "c"]}),
        {"prompt": numpy.array(["a", "d"]), "completion": numpy.array(["b", "c"])},
        ({"prompt": prompt, "completion": answer} for prompt, answer in ("ab", "dc")),
        {"messages": [[TURN, TOLD], [TURN, OTHER]]},
        pandas.DataFrame({"messages": [[TURN, TOLD], [TURN, OTHER]]}),
    ],
    ids=["columns", "DataFrame", "Dataset", "arrays", "generator", "columns of messages", "DataFrame of messages"],
)
def test_tables_of_every_kind_are_rows(tmp_path, table):
    assert learnt(tmp_path, table) == ["b", "c"]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "label"),
        ({"prompt": [TURN], "completion": [TOLD], "label": False}, "label"),
        ({"prompt": "a", "completion": "b", "label": 0}, "label"),
        ({"prompt": "a", "completion": "b", "label": numpy.True_}, "label"),
        ({"chosen": "a b", "rejected": "a c"}, "prompt"),
    ],
)
def test_forms_that_no_training_here_takes_are_refused(tmp_path, row, key):
    with raising(InputError, key=key):
        train("model", [row], output_dir=tmp_path)


def test_reward_weights(tmp_path):
    rows, functions = [{"prompt": "a"}], [functools.partial(scaled, 2), Length(3)]
    result = train("model", rows, functions, output_dir=tmp_path, reward_weights=[0.5, 0])
    [tasks] = load_config(result.config_file).buffer.explorer_input.tasksets
    with closing(RewardPool(1, plugin_dir=load_config(result.config_file).plugin_dir)) as pool:
        [reward] = pool.score_sync(tasks.default_reward_fn_type, [RewardItem("two", task={"prompt": "a"})])
    assert (reward.error, reward.parts) == (None, {"scaled": 3.0, "Length": 0.0})
    accuracy = lambda_named("accuracy", [1.0])
    for rewards, weights, key in (
        (functions, [1.0], "reward_weights"), ("math_reward", [1.0], "reward_weights"),
        (functions, [1.0, float("nan")], "reward_weights"), (functions, "12", "reward_weights"),
        (["math_reward", scaled], None, "rewards"),
        (None, [1.0], "reward_weights"), ([accuracy], [2.0], "accuracy"),
    ):  # fmt: skip
        with raising(InputError, key=key):
            train("model", rows, rewards, output_dir=tmp_path, reward_weights=weights)


def test_names_of_trl_are_told_with_ours(tmp_path):
    for name in TRL_SETTINGS:
        with raising(InputError, key=name):
            train("model", [{"prompt": "a"}], "math_reward", output_dir=tmp_path, settings={name: 8})
    assert not TRL_SETTINGS.keys() & Config.model_fields.keys()
    settings, arguments = {"learning_rate": 1e-4, "num_generations": 8}, {"reward_funcs": score, "max_steps": 2}
    with pytest.raises(InputError) as refused:
        train("model", [{"prompt": "a"}], output_dir=tmp_path, settings=settings, **arguments)
    ours = ("algorithm.optimizer.lr", "algorithm.repeat_times", "argument rewards", "buffer.total_steps")
    assert all(name in str(refused.value) for name in ours)


def test_the_start_and_long_waits_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waits, "FIRST_SECONDS", 0)

    def run(config, is_ready):
        waits.Wait("the engines to start").note("they are loading")
        return {"hf_dir": None, "name": config.name}

    monkeypatch.setattr("trinity_core.run.driver.run_configuration", run)
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: bool(logger.handlers))  # pytest has set up some
    train("m", [{"prompt": "a"}], Length(3), output_dir=tmp_path / "run")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("Checking") and second.startswith("waits for the engines")


def test_two_runs_of_one_name_are_both_shown(tmp_path):
    places = [tmp_path / place / "run" for place in ("one", "other", "one")]
    folders = [train("m", [{"prompt": "a"}], Length(3), output_dir=place).folder for place in places]
    shown = {link.resolve() for link in (tmp_path / "shown/trinity").iterdir()}
    assert shown == {folder.resolve() for folder in folders} and len(shown) == 2


@pytest.mark.parametrize("part", ["train", "training"])
def test_a_run_in_progress_keeps_its_rows_and_rewards(tmp_path, part):
    """Whether another notebook trains, or `trinity run` with the file that a call wrote."""
    result = train("model", [{"prompt": "a"}], lambda_named("first", [0.0]), output_dir=tmp_path)
    before = {file: file.read_bytes() for folder in ("data", "plugins") for file in (tmp_path / folder).iterdir()}
    other = process_holding(tmp_path if part == "train" else result.folder, part)
    try:
        with pytest.raises(TrinityError):
            train("model", [{"prompt": "b"}], lambda_named("second", [0.0]), output_dir=tmp_path)
    finally:
        other.kill()
        other.communicate()
    assert {file: file.read_bytes() for file in before} == before
    train("model", [{"prompt": "b"}], lambda_named("second", [0.0]), output_dir=tmp_path)
    assert {file: file.read_bytes() for file in before} != before


@pytest.mark.parametrize("wrong", [{"settings": {"buffer.batch_sise": 4}}, {"eval_rows": [{"question": "?"}]}])
def test_a_refused_call_leaves_a_finished_run_as_it_was(tmp_path, wrong):
    """`trinity evaluate` and `run` on its config.yaml read its rows and rewards."""
    train("model", [{"prompt": "a"}], lambda_named("first", [0.0]), output_dir=tmp_path / "run")
    for output_dir in (tmp_path / "run", tmp_path / "new"):
        before = contents(output_dir)
        with pytest.raises(TrinityError):
            train("model", [{"prompt": "b"}], lambda_named("second", [0.0]), output_dir=output_dir, **wrong)
        assert contents(output_dir) == before


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")}


@pytest.mark.campaign
@pytest.mark.slow
def test_the_notebook_runs_and_its_run_goes_on(tmp_path):
    """In a loop that runs, as in a notebook. How a run resumes is tested on real parts elsewhere."""
    cells = [cell["source"] for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell) for cell in cells)
    again = """
from trinity_core.run import driver
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.stage import Stage, resume

def where_it_goes_on(config, is_ready):
    stage = resume(Stage(config, place(config, Machine(1, 0)), ""))
    return {"name": config.name, "hf_dir": None, "from": stage.resumed_step, "to": config.buffer.total_steps}

driver.run_configuration = where_it_goes_on
settings["buffer.total_steps"] = 21
again = train(model, rows, letters, output_dir=folder / "letters", settings=settings)
assert again.folder == result.folder and (again.summary["from"], again.summary["to"]) == (20, 21)
"""
    script = tmp_path / "notebook.py"
    script.write_text(f"async def cells():\n    exec(compile({code + again!r}, 'notebook', 'exec'), globals())\n"
                      "import asyncio\nasyncio.run(cells())\n")  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "TRINITY_"))}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    job = tmp_path / "runs/notebook/letters/checkpoints/trinity/letters"
    rollouts = [rollout for _, _, path in rollout_files(job) for rollout in read_rollouts(path)]
    assert len(rollouts) >= 4
    for rollout in rollouts:
        expected = rollout.response.count("e") / max(len(rollout.response), 1)
        assert rollout.reward == pytest.approx(expected, abs=1e-6) and rollout.parts["letters"] == pytest.approx(
            expected
        )
    [seen] = find_runs(tmp_path / "checkpoints")
    assert seen.name == "trinity/letters" and seen.folder.resolve() == job, "`trinity up` finds it in Studio …"
    assert json.loads((job / "monitor/mlflow.json").read_text())["uri"] == default_uri(tmp_path / "checkpoints")
    artifacts = tmp_path / "checkpoints/mlflow_artifacts"
    assert [*artifacts.rglob("*.png")], "… and in MLflow, whose server keeps artifacts there only"
    trained = {line.step for line in read_metrics(job) if line.source == "trainer"}
    assert trained == set(range(1, 21))
    means = [line.metrics["reward/mean"] for line in read_metrics(job) if line.source == "explorer"]
    assert sum(means[-3:]) / 3 > 3 * sum(means[:3]) / 3, "the notebook says that the model learns"
    assert "step 20 of 20" in done.stderr


def test_completions_of_conversations_are_conversations():
    def content(completions, **_):
        return [float(len(completion[0]["content"])) for completion in completions]

    assert score(content, prompt=[{"role": "user", "content": "1+1?"}]) == {"content": 3.0}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        ([{"question": "?"}], "question"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b"}], "row 1 has no column 'x'"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], "row 1"),
        ([{"prompt": "a", "x": object()}], "row 0"),
        (["a"], "row 0"),
        ({"prompt": ["a", "b"], "x": [1]}, "equal length"),
        ({"prompt": "a"}, "equal length"),
        (DatasetDict(test=Dataset.from_list([{"prompt": "a"}])), "rows\\['test'\\]"),
        ({"train": Dataset.from_list([{"prompt": "a"}])}, "rows\\['train'\\]"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path, rows, says):
    with pytest.raises(InputError, match=says):
        train("model", rows, lambda_named("reward", [0.0]), output_dir=tmp_path)
