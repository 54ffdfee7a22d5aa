"""`trinity chat`: a run's own template, system prompt and sampling; the base beside the trained model."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from raising import raising
from results.chat_run import chat_run
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import ModelConfig
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.tracking.run_record import config_path, read_config
from trinity_core.results.chat import ChatModel, Conversation, chat_models

MATRICES = {".lora_A.weight": torch.zeros(2, 128), ".lora_B.weight": torch.zeros(128, 2)}


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
    command = ChatModel("base", ModelConfig(), adapter=tmp_path, overrides={"rope_theta": 9.0}).serve_command("mine")
    assert command.startswith(f"vllm serve base --enable-lora --max-lora-rank 32 --lora-modules mine={tmp_path}")
    arguments = shlex.split(command)
    trained = str(tmp_path.with_name("huggingface"))  # the run's template and stop tokens, which its base may lack
    for option in ("--tokenizer", "--generation-config"):
        assert arguments[arguments.index(option) + 1] == trained
    assert json.loads(arguments[arguments.index("--hf-overrides") + 1]) == {"rope_theta": 9.0}


def test_an_adapter_is_put_on_the_model_of_the_stage_before(tiny_folder: Path, tmp_path: Path) -> None:
    """Also once all runs were moved, and on the merged model if there is one."""
    project = tmp_path / "root" / "p"
    warm_up = JobLayout(chat_run(project / "run_warm_up", tiny_folder)).huggingface(4)
    sft = JobLayout(chat_run(project / "run_sft", warm_up))
    actor = sft.huggingface(4).parent
    for file in sft.huggingface(4).glob("*.safetensors"):
        file.unlink()
    (actor / "lora_adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    write_json(actor / "lora_adapter/adapter_config.json", adapter | {"base_model_name_or_path": str(warm_up)})
    name = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"base_model.model.{name}{end}": tensor for end, tensor in MATRICES.items()},
        actor / "lora_adapter/adapter_model.safetensors",
    )
    write_manifest(sft.step(4), 4)
    (project / "run").mkdir()
    write_json(project / "run" / "stages.json", {"warm_up": "run_warm_up", "sft": "run_sft"})
    moved = project.parent.rename(tmp_path / "moved") / "p"
    models = chat_models(moved / "run")
    assert models["base"].path == str(tiny_folder)
    trained = models["step 4"]
    assert trained.path == str(JobLayout(moved / "run_warm_up").huggingface(4))
    assert trained.adapter == moved / "run_sft/global_step_4/actor/lora_adapter"
    assert isinstance(trained.answer([{"role": "user", "content": "How many?"}]), str)
    shutil.copy(tiny_folder / "model.safetensors", JobLayout(moved / "run_sft").huggingface(4))
    merged = chat_models(moved / "run")["step 4"]
    assert merged.adapter is None and merged.path == str(JobLayout(moved / "run_sft").huggingface(4))
    JobLayout(moved / "run_sft").huggingface(4).joinpath("model.safetensors").unlink()
    shutil.rmtree(moved / "run_warm_up/global_step_4")
    with raising(DataError, key="--base-model-dir"):
        chat_models(moved / "run", base=False)


def test_the_line_for_vllm_has_the_settings_of_the_run() -> None:
    settings = ModelConfig(enable_thinking=False, trust_remote_code=True, chat_template_path="~/chat.jinja")
    arguments = shlex.split(ChatModel("model", settings).serve_command("mine"))
    assert "--trust-remote-code" in arguments and "~/chat.jinja" not in arguments
    assert json.loads(arguments[arguments.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}


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


def test_after_a_conversation_that_is_too_long_another_one_begins(run: Path) -> None:
    command, long = ["chat", "--checkpoint-dir", str(run), "--greedy"], "many " * 500
    done = CliRunner().invoke(app, command, input=f"How many?\n{long}\n/new\nHow many?\n")
    first, last = done.stdout.split("/new")
    again = last.partition("\n")[2]
    assert done.exit_code == 0 and "step 4 " in again and first.startswith(again)
    assert isinstance(CliRunner().invoke(app, [*command, long]).exception, DataError)


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
