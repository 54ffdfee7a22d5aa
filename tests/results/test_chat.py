"""`trinity chat`: a run's own template, system prompt and sampling; the base beside the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from raising import raising
from results.chat_run import chat_run
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import ModelConfig
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.tracking.run_record import config_path, read_config
from trinity_core.results.chat import ChatModel, Conversation, chat_models


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path) -> Path:
    return chat_run(tmp_path / "p/run", tiny_folder)


def test_base_and_trained_model_answer_as_in_the_run(run: Path, tiny_folder: Path) -> None:
    models = chat_models(run)
    assert [*models] == ["base", "step 4"]
    trained = models["step 4"]
    assert trained.settings.temperature == 0.5 and "think" in str(trained.system)
    assert "vllm serve" in trained.serve_command("mine") and '"temperature": 0.5' in trained.serve_command("mine")
    conversation = Conversation(models, greedy=True)
    first = conversation.ask("How many?")
    assert first["base"] == first["step 4"], "the same weights, sampled greedily"
    conversation.ask("And now?")
    assert [turn["role"] for turn in conversation.turns["base"]] == ["user", "assistant"] * 2
    with raising(DataError, key="model.max_model_len"):
        trained.answer([{"role": "user", "content": "many " * 500}])


def test_an_adapter_is_served_on_its_base_with_room_for_its_rank(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"r": 24})
    command = ChatModel("base", ModelConfig(), adapter=tmp_path).serve_command("mine")
    assert command.startswith(f"vllm serve base --enable-lora --max-lora-rank 32 --lora-modules mine={tmp_path}")


def test_answers_are_sampled_as_in_the_run_whatever_the_folder_says(run: Path) -> None:
    """The checkpoint's folder has sampling of its own, as many models of the hub do."""
    write_json(JobLayout(run).huggingface(4) / "generation_config.json", {"no_repeat_ngram_size": 1, "min_length": 90})
    conversation = Conversation(chat_models(run), greedy=True)
    usual = conversation.ask("How many?")
    assert usual["base"] == usual["step 4"]
    penalised = {"model": {**read_config(run)["model"], "repetition_penalty": 9.0, "min_response_tokens": 8}}
    config_path(run).write_text(yaml.safe_dump(read_config(run) | penalised))
    model = chat_models(run)["step 4"]
    assert model.answer([{"role": "user", "content": "How many?"}], greedy=True) != usual["base"]
    assert '"repetition_penalty": 9.0' in model.serve_command("mine") and "config vllm" in model.serve_command("mine")


def test_a_question_on_the_command_line(run: Path) -> None:
    done = CliRunner().invoke(app, ["chat", "--checkpoint-dir", str(run), "--no-base", "How", "many?"])
    assert done.exit_code == 0 and done.stdout.startswith("step 4 ") and "vllm serve" in done.stderr


def test_the_first_line_says_how_answers_are_sampled(run: Path) -> None:
    for words, names in (
        ([], ("sampled", "temperature 0.5", "--greedy")),
        (["--greedy"], ("greedy", "temperature 0.5")),
    ):
        done = CliRunner().invoke(app, ["chat", "--checkpoint-dir", str(run), "--no-base", *words, "How many?"])
        first = done.stderr.splitlines()[0]
        assert all(name in first for name in names), first
    greedy = ChatModel("base", ModelConfig(temperature=0.0)).sampling_text()
    assert "greedy" in greedy and "temperature" not in greedy


def test_what_is_missing_is_named(run: Path) -> None:
    with raising(DataError, key=str(run)):
        chat_models(run, step=9)
    update_meta(JobLayout(run).trainer_meta, model=str(run / "gone"))
    with raising(DataError, key="model.model_path"):
        chat_models(run)
    assert [*chat_models(run, base=False)] == ["step 4"]
