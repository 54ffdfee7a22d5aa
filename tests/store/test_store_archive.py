"""The file of what was trained on follows the checkpoints, forth and back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from trinity_core.data.experience import Experience, from_json
from trinity_core.exchange.store import archive as archives
from trinity_core.exchange.store.archive import Archive, as_line, whole_line


def batch(step: int) -> list[Experience]:
    return [
        Experience(
            tokens=np.arange(5), prompt_length=2, action_mask=np.ones(3), versions=np.full(3, step - 1),
            reward=float(run), group=f"{step}/0", run=run, info={"prompt": "1 + 1 = ?", "response": "zwei · 二"},
        )
        for run in range(2)
    ]  # fmt: skip


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_committed_batch_is_archived_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    archive = Archive(path)
    archive.extend(2, batch)
    archive.extend(2, batch)
    Archive(path).extend(3, batch)
    assert steps(path) == [1, 1, 2, 2, 3, 3]
    line = json.loads(path.read_text().splitlines()[3])
    assert (line["reward"], line["policy_version"], line["response_tokens"]) == (1.0, 1, 3)
    assert line["response"] == "zwei · 二"


def test_rewards_of_tokens_are_part_of_an_archived_reward() -> None:
    """Where the tokens' rewards are archived too, the reward is what they lack of it."""
    (one, _) = batch(1)
    one.reward, one.token_rewards = 0.25, np.full(one.response_length, 0.25, np.float32)
    assert as_line(1, one)["reward"] == one.total_reward == 1.0
    assert from_json(whole_line(1, one)).total_reward == 1.0


def test_workflow_info_cannot_overwrite_archive_fields(tmp_path: Path) -> None:
    def own(step: int) -> list[Experience]:
        rows = batch(step)
        for row in rows:
            row.info |= {"step": "look it up", "reward": "none", "tool": "search"}
        return rows

    path = tmp_path / "a.jsonl"
    Archive(path).extend(3, own)
    Archive(path).rewind(2)
    assert steps(path) == [1, 1, 2, 2]
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["reward"], line["tool"]) == (1.0, "search")


def test_whatever_a_workflow_tells_is_archived(tmp_path: Path) -> None:
    """Half of a surrogate pair as a question mark; what JSON does not know as it is in the store."""
    path = tmp_path / "a.jsonl"
    (experience, _) = batch(1)
    experience.info = {"response": "cut \ud83d 😀", "inner": ["\udc00"], "best": np.float32(0.5), "parts": {1}}
    Archive(path).extend(1, lambda step: [experience])
    line = json.loads(path.read_text(encoding="utf-8"))
    assert (line["response"], line["inner"], line["best"], line["parts"]) == ("cut ? 😀", ["?"], 0.5, "{1}")


def test_rewind_truncates_and_repairs_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Archive(path).extend(4, batch)
    with path.open("a") as file:
        file.write('{"step": 5, "gro')  # a crash cut it short
    archive = Archive(path)
    archive.rewind(4)
    assert steps(path) == [1, 1, 2, 2, 3, 3, 4, 4]
    archive.rewind(2)
    archive.extend(3, batch)
    assert steps(path) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("short", [1, 4096])
def test_rewind_cuts_exactly_wherever_a_crash_ended_the_file(tmp_path: Path, monkeypatch, short: int) -> None:
    """Lines of 10 to 9,000 characters, some written by older versions; step 4 has none."""
    monkeypatch.setattr(archives, "SHORT", short)
    chance, lines = random.Random(3), []
    for step in sorted(chance.choices([1, 2, 3, 5, 6, 7, 8, 9], k=60)):
        own, text = {"step": step, "group": f'\\ "é" {step}'}, {"response": "ü" * chance.choice([10, 300, 9000])}
        lines.append((step, json.dumps(chance.choice([own | text, text | own]), ensure_ascii=False).encode() + b"\n"))
    whole = b"".join(line for _, line in lines)
    path = tmp_path / "a.jsonl"
    for _ in range(60):
        cut, upto = chance.choice([len(whole), chance.randrange(len(whole))]), chance.randrange(11)
        path.write_bytes(whole[:cut])
        Archive(path).rewind(upto)
        size = 0
        for step, line in lines:
            if step > upto or size + len(line) > cut:
                break
            size += len(line)
        assert path.read_bytes() == whole[:size], (cut, upto)


def bytes_read() -> int:
    """By this process, in all."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_rewind_of_a_long_archive_reads_little_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"step": {step}, "group": "g", "response": "{"x" * 9000}"}}\n' for step in range(1, 4001))
    size, before = path.stat().st_size, bytes_read()
    archive = Archive(path)
    archive.rewind(3999)
    Archive(path).extend(3999, batch)
    assert bytes_read() - before < 2e6 < size / 10
    archive.extend(4000, batch)
    last = path.read_bytes().splitlines()[-3:]
    assert [json.loads(line)["step"] for line in last] == [3999, 4000, 4000]
