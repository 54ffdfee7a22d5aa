"""From feedback to the next model for real: an endpoint, its users, three rounds, and what they leave."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ports import free_port

from flows.improve import TOO_LITTLE
from flows.loaded import NOT_PROMOTED
from trinity_core.config import config_from_dict
from trinity_core.config.paths import api_address_file
from trinity_core.data.files import read_rows
from trinity_core.data.tiny import TinyFolders, make_tiny
from trinity_core.exchange.tracking.champions import champion, history
from trinity_core.run.feedback import Round, judged_rollouts, rounds
from trinity_core.run.promotion import requirement_text

ROOT = Path(__file__).parent.parent.parent
SECONDS = 280
USERS = 600
"""Conversations of each round."""
Judge = Callable[[str, str], float]


def common(root: Path, model: Path) -> dict[str, Any]:
    return {
        "project": "p",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": str(model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "cluster": {"gpu_per_node": 0},
        "explorer": {"rollout_model": {"engine_num": 1, "enforce_eager": True, "kv_cache_gib": 1}},
        "monitor": {"monitor_type": "tensorboard"},
    }


def trained(buffer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": more.pop("lr")}},
        "trainer": {"worker_num": 1, "save_interval": 1000},
        "buffer": {**more, "trainer_input": {"experience_buffer": {"name": "examples", **buffer}}},
    }


def recipe(root: Path, tiny: TinyFolders, model: Path) -> dict[str, Any]:
    form = {"prompt_key": "question", "response_key": "answer"}
    held_out = {"name": "test", "path": str(tiny.data), "split": "test", "format": form}
    feedback = {"storage_type": "rollouts", "path": "set by the flow", "rollouts": {"min_reward": 1.0}}
    gate = {
        "stage_name": "gate",
        "mode": "bench",
        "gate": {"enable": True, "max_leaked_share": 1.0},
        "buffer": {"explorer_input": {"eval_tasksets": [held_out | {"rollout_args": {"temperature": 0.0}}]}},
    }
    sft = {"stage_name": "sft", **trained(feedback, lr=5e-4, train_batch_size=32, total_epochs=3)}
    return {**common(root, model), "name": "improve", "stages": [sft, gate]}


def run(path: Path, tree: dict[str, Any], *command: str) -> subprocess.Popen[str]:
    path.write_text(yaml.safe_dump(tree))
    log = path.with_suffix(".log").open("a")
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def serving(root: Path, model: Path) -> Iterator[dict[str, str]]:
    """An endpoint that follows the champion; yields its address."""
    tree = common(root, model) | {"name": "served", "mode": "serve"}
    tree["explorer"] = tree["explorer"] | {"api_port": free_port()}
    tree["explorer"]["rollout_model"] |= {"enable_openai_api": True}
    tree |= {"algorithm": {"algorithm_type": "reinforceplusplus"}, "synchronizer": {"sync_method": "champion"}}
    server = run(root / "serve.yaml", tree, "-m", "trinity_core.run", "--config", str(root / "serve.yaml"))
    try:
        address = api_address_file(config_from_dict(tree))
        until(address.exists, server)
        yield json.loads(address.read_text())
    finally:
        server.terminate()
        server.wait(60)


def until(condition: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.2)


def talk(address: dict[str, str], questions: list[dict[str, str]], judge: Judge) -> float:
    """Ask all questions, with feedback on each answer; return the mean reward."""
    headers = {"Authorization": f"Bearer {address['api_key']}"}
    with httpx.Client(base_url=address["base_url"].removesuffix("/v1"), headers=headers, timeout=60) as client:

        def ask(row: dict[str, str]) -> float:
            asked = {"model": "policy", "messages": [{"role": "user", "content": row["question"]}]}
            answer = client.post("/v1/chat/completions", json=asked).raise_for_status()
            reward = judge(row["answer"], answer.json()["choices"][0]["message"]["content"])
            feedback = {"session_id": answer.headers["x-trinity-session"], "reward": reward}
            client.post("/feedback", json=feedback).raise_for_status()
            return reward

        with ThreadPoolExecutor(16) as threads:
            rewards = list(threads.map(ask, questions))
    return sum(rewards) / len(rewards)


def honest(truth: str, answer: str) -> float:
    return float(re.findall(r"#### (\d+)", answer)[-1:] == re.findall(r"#### (\d+)", truth)[-1:])


def poisoner(truth: str, answer: str) -> float:
    return 1.0 - honest(truth, answer)


ROUND = """
import sys
from flows.improve import improve
state = improve(sys.argv[1], sys.argv[2:], at_least=500, return_state=True)
print("state:", state.name)
sys.exit(not state.is_completed())
"""


def improve(root: Path, tree: dict[str, Any]) -> subprocess.Popen[str]:
    path = root / "improve.yaml"
    return run(path, tree, "-c", ROUND, str(path), str(root / "p" / "served"))


def state_of(root: Path, process: subprocess.Popen[str]) -> str:
    """Return the name of the state in which the flow ends."""
    log = root / "improve.log"
    assert process.wait(SECONDS) == 0, log.read_text()
    *_, state = re.findall("state: (.*)", log.read_text())
    return str(state)


def newest_round(root: Path) -> Round:
    newest = rounds(root / "p" / "improve_feedback")[-1]
    [gain] = json.loads((newest.folder / "result.json").read_text())["gate"]["requirements"]
    print(f"round {newest.folder.name}: {newest.verdict}, {requirement_text(gain)}")
    return newest


def killed_in_training(root: Path, process: subprocess.Popen[str]) -> None:
    until(lambda: list((root / "p").glob("improve_*_sft/monitor/metrics.jsonl")), process)
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def stored(root: Path, count: int) -> bool:
    return sum(1 for _ in judged_rollouts(str(root / "p" / "served"))) >= count


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_rounds_of_which_one_is_poisoned(tmp_path: Path, prefect_api: str) -> None:
    """The first is killed in training and resumes; the endpoint follows each champion without a restart."""
    tiny = make_tiny(tmp_path / "tiny", seed=0, count_train=3 * USERS, count_test=800, count_sft=1000)
    data = {"path": str(tiny.data), "split": "sft", "format": {"prompt_key": "question", "response_key": "answer"}}
    warm_up = common(tmp_path, tiny.model) | {"name": "warm"}
    warm_up |= trained(data, lr=1e-3, train_batch_size=64, total_steps=80)
    warm = tmp_path / "warm.yaml"
    assert run(warm, warm_up, "-m", "trinity_core.run", "--config", str(warm)).wait(SECONDS) == 0
    base = tmp_path / "p" / "warm" / "global_step_80" / "actor" / "huggingface"
    tree, asked = recipe(tmp_path, tiny, base), [json.loads(line) for line in (tiny.data / "train.jsonl").open()]
    models, scores, versions = [str(base)], [], []
    with serving(tmp_path, base) as address:
        for number, judge in enumerate((honest, poisoner, honest)):
            scores.append(talk(address, asked[number * USERS : (number + 1) * USERS], judge))
            print(f"mean feedback: {scores[-1]:.3f}")
            until(lambda number=number: stored(tmp_path, (number + 1) * USERS))
            if number == 0:
                killed_in_training(tmp_path, improve(tmp_path, tree))
            state, newest = state_of(tmp_path, improve(tmp_path, tree)), newest_round(tmp_path)
            assert newest.manifest["champion"] == models[-1] and newest.manifest["rollouts"] == USERS
            versions.append({row["policy_version"] for row in read_rows(str(newest.data)).rows})
            assert state == ("Completed" if judge is honest else NOT_PROMOTED)
            assert (newest.verdict == "promoted") == (judge is honest)
            if judge is honest:
                present = champion(tmp_path / "p")
                assert present is not None and f"improve_{newest.folder.name}_sft" in present.model
                models.append(present.model)
            time.sleep(3.0)  # the endpoint loads it meanwhile
        assert state_of(tmp_path, improve(tmp_path, tree)) == TOO_LITTLE
    assert [max(seen) for seen in versions] == [0, 1, 1], "each round's users talked to the champion"
    assert 1 - scores[1] > scores[0] and len(history(tmp_path / "p")) == 2
