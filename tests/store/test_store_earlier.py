"""SFT and DPO learn from rollouts of an earlier run, in its store or in the file that its explorer wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import EarlierRolloutsConfig, ExperienceBufferConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.experience import Experience
from trinity_core.data.tiny import make_tokenizer
from trinity_core.exchange.store.archive import whole_line
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts, read_answers
from trinity_core.exchange.store.store import ExperienceStore

REWARDS = {"e/1/0": [1.0, 0.0, 0.5], "e/1/1": [0.0, 0.0, 0.0], "e/1/2": [1.0, 0.9, None]}
TRUNCATED = ("e/1/2", 0)


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(make_tokenizer())


def rollouts(encoder: ChatEncoder) -> list[Experience]:
    """Three answers to each of three tasks; one was cut off, one could not be judged."""
    rows = []
    for group, rewards in REWARDS.items():
        prompt = encoder.prompt([{"role": "user", "content": group}]).tokens
        for run, reward in enumerate(rewards):
            text = f"answer {run}"
            answer = [*encoder.tokenizer(text, add_special_tokens=False)["input_ids"], encoder.tokenizer.eos_token_id]
            judged = reward is not None
            rows.append(
                Experience(
                    tokens=np.array(prompt + answer), prompt_length=len(prompt), reward=reward, group=group, run=run,
                    action_mask=np.full(len(answer), judged), logprobs=np.zeros(len(answer)),
                    versions=np.zeros(len(answer)), truncated=(group, run) == TRUNCATED, info={"response": text},
                )
            )  # fmt: skip
    return rows


@pytest.fixture(params=["store", "file"])
def buffer(request: Any, server_url: str, tmp_path: Path, encoder: ChatEncoder) -> Any:
    """A function that gives the settings of a buffer of these rollouts."""
    rows, job, path = rollouts(encoder), tmp_path / "p/earlier", str(tmp_path / "explorer.jsonl")
    if request.param == "file":
        Path(path).write_text("".join(json.dumps(whole_line(1, row)) + "\n" for row in rows) + '{"tokens": [1]}\n')
    else:
        url = server_url or f"sqlite:///{job}/buffer/explorer_output.db"
        with ExperienceStore.open(url, str(job)) as store:
            store.put("e", 1, {}, rows, 0)
        path = server_url or str(job)
    subset = str(job) if server_url and request.param == "store" else None

    def buffer(**chosen: Any) -> ExperienceBufferConfig:
        wanted = EarlierRolloutsConfig(**chosen)
        return ExperienceBufferConfig(
            name="earlier", storage_type="rollouts", path=path, subset_name=subset, rollouts=wanted
        )

    return buffer


def texts(read: Any, encoder: ChatEncoder) -> list[list[str]]:
    decode = encoder.tokenizer.decode
    return [[f"{decode(answer.tokens[answer.answer])}" for answer in row] for row in read.rows]


def test_answers_to_imitate_are_chosen_by_reward(buffer: Any, encoder: ChatEncoder) -> None:
    end = encoder.tokenizer.eos_token
    best = read_answers(buffer(), encoder)
    assert texts(best, encoder) == [[f"answer 0{end}"]], "equal rewards say nothing; what was cut off is not imitated"
    good = read_answers(buffer(min_reward=0.5), encoder)
    assert texts(good, encoder) == [[f"answer 0{end}"], [f"answer 2{end}"], [f"answer 1{end}"]]
    assert good.fingerprint != best.fingerprint and good.rows[0][0].prompt_length > 1
    short = read_answers(buffer(), encoder, "demonstrations", 3)
    assert not short.rows and "more than model.max_model_len = 3" in short.rejected[-1].reason


def test_pairs_are_the_best_and_the_worst_of_a_task(buffer: Any, encoder: ChatEncoder) -> None:
    end = encoder.tokenizer.eos_token
    pairs = read_answers(buffer(), encoder, "preferences")
    assert texts(pairs, encoder) == [[f"answer 0{end}", f"answer 1{end}"]]
    assert not read_answers(buffer(min_gap=1.0), encoder, "preferences").rows


def test_rollouts_of_another_tokenizer_are_refused(buffer: Any, tmp_path: Path) -> None:
    other = make_tokenizer()
    other.add_tokens(["answer"])
    backend = json.loads(other.backend_tokenizer.to_str())
    backend["model"]["vocab"] = {token: (number + 7) % 500 for token, number in backend["model"]["vocab"].items()}
    other._tokenizer = type(other.backend_tokenizer).from_str(json.dumps(backend))
    with pytest.raises(DataError):
        read_answers(buffer(), ChatEncoder(other))


def test_texts_of_sessions_keep_their_control_tokens(tmp_path: Path, encoder: ChatEncoder) -> None:
    """A session's response is decoded with them; a file's rows bring their texts, which a person is shown."""
    row, path = rollouts(encoder)[0], tmp_path / "served.jsonl"
    row.info = {"prompt": "2 + 2?", "response": encoder.tokenizer.decode(row.tokens[row.prompt_length :])}
    path.write_text(json.dumps(whole_line(1, row)) + "\n")
    buffer = ExperienceBufferConfig(
        storage_type="rollouts", path=str(path), rollouts=EarlierRolloutsConfig(min_reward=1.0)
    )
    assert len(read_answers(buffer, encoder).rows) == 1
    [found] = find_rollouts(str(path), None)
    assert isinstance(found, EarlierRollout) and found.experience.info == row.info


def test_a_folder_without_a_store_is_named(tmp_path: Path, encoder: ChatEncoder) -> None:
    nothing = ExperienceBufferConfig(storage_type="rollouts", path=str(tmp_path))
    with raising(DataError, key=str(tmp_path)):
        read_answers(nothing, encoder)


def turns(*rewards_of_runs: tuple[float, ...], group: str = "g") -> list[Experience]:
    """A row for each turn; only the first turns have the same prompt."""
    return [
        Experience(
            tokens=np.array([9, 1 if turn == 0 else 10 * run + turn, run + 100, turn + 200]), prompt_length=2,
            action_mask=np.ones(2), versions=np.zeros(2), logprobs=np.zeros(2), reward=reward, group=group, run=run,
            turn=turn,
        )
        for run, rewards in enumerate(rewards_of_runs)
        for turn, reward in enumerate(rewards)
    ]  # fmt: skip


def learned(rows: list[Experience], path: Path, encoder: ChatEncoder, kind: Any = "demonstrations", **args: Any) -> Any:
    path.write_text("".join(json.dumps(whole_line(1, row)) + "\n" for row in rows))
    config = ExperienceBufferConfig(
        name="earlier", storage_type="rollouts", path=str(path), rollouts=EarlierRolloutsConfig(**args)
    )
    read = read_answers(config, encoder, kind)
    answers = [[one.tokens[one.answer].tolist() for one in row] for row in read.rows]
    return answers, len(read.rejected)


def test_all_turns_of_the_best_rollout_are_imitated(tmp_path: Path, encoder: ChatEncoder) -> None:
    rows = turns((0.0, 0.0), (0.25, 0.5, 1.0), (0.9,), (1.0, 0.2))
    path = tmp_path / "e.jsonl"
    assert learned(rows, path, encoder)[0] == [[[102, 200]]]  # means 0, 0.583, 0.9, 0.6
    assert learned(rows, path, encoder, min_reward=0.6)[0] == [[[102, 200]], [[103, 200]], [[103, 201]]]
    best = turns((0.0, 0.0), (0.25, 0.5, 1.0))
    assert learned(best, path, encoder)[0] == [[[101, 200]], [[101, 201]], [[101, 202]]]
    assert learned(best, path, encoder, "preferences")[0] == [[[101, 200], [100, 200]]]
    best[-1].truncated = True
    assert learned(best, path, encoder)[0] == []


def test_sampled_tokens_are_learned_whatever_the_loss_mask(tmp_path: Path, encoder: ChatEncoder) -> None:
    rows, path = turns((1.0,), (0.0,)), tmp_path / "e.jsonl"
    for row in rows:
        row.action_mask = np.zeros(2)
    assert learned(rows, path, encoder)[0] == [[[100, 200]]]
    assert learned(rows, path, encoder, "preferences")[0] == [[[100, 200], [101, 200]]]
    rows[0].versions = np.array([-1, 0])  # the first token is a tool's
    assert learned(rows, path, encoder)[0] == [[[200]]]
    rows[0].versions = None
    assert learned(rows, path, encoder, min_reward=0.0) == ([[[101, 200]]], 1)


def test_token_rewards_choose_answers(tmp_path: Path, encoder: ChatEncoder) -> None:
    rows = turns((0.0,), (0.0,))
    for row, total in zip(rows, (1.0, 2.0), strict=True):
        row.reward, row.token_rewards = None, np.array([0, total], np.float32)
    assert learned(rows, tmp_path / "e.jsonl", encoder)[0] == [[[101, 200]]]
