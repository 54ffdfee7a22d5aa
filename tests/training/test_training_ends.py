"""Training teaches answers to end, from a base model whose end of sequence is not its template's: real trainer and
engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trinity_core.data.tiny import write_jsonl
from trinity_core.data.tokenizer import policy_encoder, stop_tokens
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.rollout.inference.engine_model import EngineModel, policy_limits
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import WeightSource
from trinity_core.run.loop import train
from trinity_core.training.worker import TrainerWorker
from trinity_core.workflows.rollout_model import Completion

pytestmark = pytest.mark.slow
ROWS = [{"prompt": f"{number} + 1?", "response": str(number + 1)} for number in range(8)]


@pytest.fixture(scope="session")
def base_folder(tiny_folder: Path, tmp_path_factory: Any) -> Path:
    """The small model as a base model: text ends with `<|endoftext|>`, turns of the template with `<|im_end|>`."""
    folder: Path = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(tiny_folder, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    [end] = [token["id"] for token in vocabulary if token["content"] == "<|endoftext|>"]
    for name, eos in (
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("config.json", {"eos_token_id": end}),
        ("generation_config.json", {"eos_token_id": end}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | eos))
    return folder


@pytest.fixture(scope="session")
def base_engine(engine_of: Any, base_folder: Path) -> InProcessEngine:
    """A separate engine: an engine knows only the end tokens of the folder it started with."""
    return engine_of(str(base_folder), max_model_len=128, max_num_seqs=8)


def test_answers_of_a_base_model_end_after_sft(
    make_config: Any, base_folder: Path, base_engine: InProcessEngine, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "sft.jsonl", ROWS)
    config = make_config(
        "sft", model__model_path=base_folder, buffer__total_steps=40, buffer__train_batch_size=len(ROWS),
        trainer__save_interval=40, algorithm__optimizer__lr=0.005,
        buffer__trainer_input__experience_buffer__path=tmp_path / "sft.jsonl",
    )  # fmt: skip
    worker = TrainerWorker(config)
    worker.start()
    assert worker.run(train)["ended"] == "finished"
    folder = convert(config.job_dir / "global_step_40")

    async def answers() -> list[Completion]:
        pool = EnginePool([base_engine], str(base_folder))
        await pool.start()
        await pool.load(WeightSource("folder", str(folder)), 1)
        encoder = policy_encoder(config.model)
        model = EngineModel(pool, encoder, policy_limits(config, stop_tokens(str(base_folder), encoder)))
        prompts = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
        return [(await model.chat(prompt, temperature=0.0))[0] for prompt in prompts]

    completions = asyncio.run(answers())
    tokenizer = policy_encoder(config.model).tokenizer
    assert [tokenizer.decode(one.tokens) for one in completions] == [row["response"] + "<|im_end|>" for row in ROWS]
    assert {one.finish_reason for one in completions} == {"stop"}
    assert [one.text for one in completions] == [row["response"] for row in ROWS]
    exported = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(exported) == ["<|endoftext|>", "<|im_end|>"]
