"""The same weights give the same answers and score, in the run's engine and behind an endpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from endpoint_server import Asked, Reply, completion, serving

from trinity_core.config import Config, config_from_dict
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tiny import TinyFolders
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.rollout.explorer import Explorer
from trinity_core.rollout.inference.requests import Request, Sampling

pytestmark = pytest.mark.slow


def config_of(root: Path, tiny: TinyFolders, **sections: Any) -> Config:
    columns = {"prompt_key": "question", "response_key": "answer"}
    sampling = {"temperature": 0.0, "max_tokens": 16}
    evals = [{"path": str(tiny.data), "split": "test", "format": columns, "rollout_args": sampling}]
    tree: dict[str, Any] = {
        "project": "p", "mode": "bench", "checkpoint_root_dir": str(root),
        "buffer": {"explorer_input": {"eval_tasksets": evals}},
    }  # fmt: skip
    return config_from_dict(tree | sections)


def evaluated(config: Config, engines: list[Any]) -> tuple[dict[str, float], list[tuple[int, str, float | None]]]:
    async def main() -> dict[str, float]:
        explorer = Explorer(config, engines)
        try:
            return await explorer.evaluate()
        finally:
            await explorer.close()

    numbers = asyncio.run(main())
    rollouts = [rollout for *_, path in rollout_files(config.job_dir)[-1:] for rollout in read_rollouts(path)]
    return numbers, [(rollout.task_index, rollout.response, rollout.reward) for rollout in rollouts]


@pytest.fixture
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_an_endpoint_scores_as_the_engine_behind_it(
    tmp_path: Path, tiny_folders: TinyFolders, tiny_engine: Any, own_loop: asyncio.AbstractEventLoop
) -> None:
    tokenizer = load_tokenizer(str(tiny_folders.model), False)
    encoder = ChatEncoder(tokenizer, None, {})

    def answer(number: int, asked: Asked) -> Reply:
        body = asked.body
        prompt = np.asarray(encoder.prompt(body["messages"], None, None).tokens, dtype=np.int32)
        sampling = Sampling(
            max_tokens=body["max_tokens"], temperature=body["temperature"], stop_token_ids=(tokenizer.eos_token_id,)
        )
        request = Request(f"endpoint/{number}", prompt, sampling, body["seed"])
        batch = asyncio.run_coroutine_threadsafe(tiny_engine.generate([request]), own_loop).result(60)
        [sample] = batch.unpack()
        text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
        return Reply(completion(text, "stop" if sample.reason == "stop" else "length"))

    model = {"model_path": str(tiny_folders.model), "max_model_len": 128, "max_response_tokens": 24}
    direct, its_answers = evaluated(config_of(tmp_path, tiny_folders, name="engine", model=model), [tiny_engine])
    with serving(answer) as server:
        external = {"external_model": {"base_url": server.url, "model_name": "tiny"}}
        behind, other_answers = evaluated(config_of(tmp_path, tiny_folders, name="endpoint", explorer=external), [])
    assert len(its_answers) == 16 and any(text for _, text, _ in its_answers)
    assert other_answers == its_answers
    for name in ("accuracy", "reward", "judged", "answers", "truncated"):
        assert behind[f"eval/eval/{name}"] == direct[f"eval/eval/{name}"]
