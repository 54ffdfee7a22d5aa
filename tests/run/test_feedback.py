"""Rounds of improvement: which feedback each one takes, what it records, and how it resumes after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import write_json
from trinity_core.config import Config, load_config, stages
from trinity_core.data.experience import Experience
from trinity_core.data.files import read_rows
from trinity_core.data.tiny import TinyFolders
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.store.archive import whole_line
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.champions import champion, promote
from trinity_core.run import improve as improving
from trinity_core.run.feedback import MANIFEST, Round, judged_rollouts, rounds
from trinity_core.run.improve import Recipe, improve
from trinity_core.run.summary import write_summary

Answer = tuple[str, str, float | None]


class Endpoint:
    """The store of a serving run: each answer is a group of its own."""

    def __init__(self, root: Path, model: Path) -> None:
        self.folder, self.tokenizer, self.step = root / "p" / "served", load_tokenizer(str(model)), 0

    def row(self, question: str, answer: str, reward: float | None, group: str, turn: int = 0) -> Experience:
        texts = (question, f"{answer}<|im_end|>")
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        info = {"prompt": question, "response": answer}
        tokens, mask = np.array(ids[0] + ids[1]), np.ones(len(ids[1]), bool)
        return Experience(tokens, len(ids[0]), mask, group=group, turn=turn, reward=reward, info=info)

    def gets(self, *answers: Answer) -> None:
        self.step += 1
        rows = [self.row(*answer, f"explorer/{self.step}/{slot}") for slot, answer in enumerate(answers)]
        with ExperienceStore.open(self.folder / "buffer" / "feedback.db", str(self.folder)) as store:
            store.put("explorer", self.step, {}, rows, newest_version=0)


@pytest.fixture
def endpoint(tmp_path: Path, tiny_folders: TinyFolders) -> Endpoint:
    return Endpoint(tmp_path, tiny_folders.model)


@pytest.fixture
def recipe(tmp_path: Path, tiny_folders: TinyFolders) -> Path:
    held_out = {"name": "test", "path": str(tiny_folders.data), "split": "test"}
    held_out["format"] = {"prompt_key": "question", "response_key": "answer"}
    buffer = {"name": "f", "storage_type": "rollouts", "path": "later", "rollouts": {"min_reward": 1.0}}
    tree = {
        "project": "p",
        "name": "next",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": str(tiny_folders.model), "max_model_len": 128},
        "monitor": {"monitor_type": "tensorboard"},
        "stages": [
            {
                "stage_name": "sft",
                "mode": "train",
                "algorithm": {"algorithm_type": "sft"},
                "buffer": {"train_batch_size": 2, "trainer_input": {"experience_buffer": buffer}},
            },
            {
                "stage_name": "gate",
                "mode": "bench",
                "gate": {"enable": True},
                "buffer": {"explorer_input": {"eval_tasksets": [held_out]}},
            },
        ],
    }
    path = tmp_path / "improve.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def run(recipe: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a round with this verdict of the gate; None kills it before."""

    def with_verdict(verdict: str | None, at_least: int = 2, feedback: Sequence[str] = ()) -> dict[str, Any]:
        def pipeline(config: Config, *_: Any, **__: Any) -> None:
            if verdict is None:
                raise KeyboardInterrupt
            gate = stages(config)[-1]
            write_summary(gate, {"name": gate.name, "gate": {"verdict": verdict, "candidate": "new"}})

        monkeypatch.setattr(improving, "run_pipeline", pipeline)
        return improve(str(recipe), [], feedback or [str(endpoint.folder)], at_least)

    return with_verdict


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return read_rows(f"{result['feedback']}/rollouts.jsonl").rows


GOOD, BAD = ("2 + 2?", "4", 1.0), ("2 + 2?", "5", 0.0)


def test_a_round_takes_what_no_decided_round_has_used(
    endpoint: Endpoint, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "p" / "next_feedback"
    endpoint.gets(GOOD, ("3 + 3?", "6", None))
    assert "verdict" not in run("promoted") and not rounds(folder), "one judged rollout"
    endpoint.gets(BAD)
    first = run("promoted")
    assert first["verdict"] == "promoted" and [row["response"] for row in rows_of(first)] == ["4", "5"]
    assert "verdict" not in run("promoted"), "nothing is new"
    endpoint.gets(GOOD, GOOD)
    undecided = run("not shown")
    assert "verdict" not in run("not shown"), "the same feedback is not tried again without any that is new"
    endpoint.gets(BAD, BAD)
    refused = run("no better")
    assert [len(rows_of(result)) for result in (undecided, refused)] == [2, 4]
    endpoint.gets(GOOD, GOOD)
    assert len(rows_of(run("promoted"))) == 2
    assert [past.verdict for past in rounds(folder)] == ["promoted", "not shown", "no better", "promoted"]
    manifest = rounds(folder)[2].manifest
    assert manifest["sources"] == {
        str(endpoint.folder): {"rollouts": 4, "first": "explorer/3/0", "last": "explorer/4/1"}
    }
    assert (manifest["rollouts"], manifest["rows"], len(manifest["ids"])) == (4, 4, 4)


def test_a_killed_round_goes_on_with_its_data_and_its_champion(
    endpoint: Endpoint, run: Callable[..., dict[str, Any]], tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    promote(tmp_path / "p", str(tiny_folders.model), None, {})
    endpoint.gets(GOOD, BAD)
    with pytest.raises(KeyboardInterrupt):
        run(None)
    endpoint.gets(GOOD, GOOD)
    result = run("is the champion")  # killed between the promotion and its record
    [only] = rounds(tmp_path / "p" / "next_feedback")
    assert result["verdict"] == only.verdict == "promoted" and len(rows_of(result)) == 2
    present = champion(tmp_path / "p")
    assert present is not None
    assert (only.manifest["champion"], only.manifest["since"]) == (present.model, present.time)
    assert result["name"] == f"next_{only.folder.name}"
    assert len(rows_of(run("promoted"))) == 2


def test_feedback_of_which_nothing_can_be_learned_begins_no_round(
    endpoint: Endpoint, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    endpoint.gets(BAD, BAD)
    assert "verdict" not in run("promoted") and not list((tmp_path / "p" / "next_feedback").glob("*/*"))
    endpoint.gets(GOOD)
    assert len(rows_of(run("promoted"))) == 3


def test_answers_to_one_question_are_compared_whoever_asked(
    endpoint: Endpoint, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A person's verdicts on another run, and two turns of one conversation, which stay one rollout."""
    endpoint.gets(GOOD, ("3 + 3?", "6", 1.0))
    human = tmp_path / "p" / "asked" / "human" / "verdicts.jsonl"
    human.parent.mkdir(parents=True)
    turns = [endpoint.row("2 + 2?", "5", 0.0, "explorer/1/0", turn=turn) for turn in (0, 1)]
    human.write_text("".join(json.dumps(whole_line(1, row)) + "\n" for row in turns))
    [verdict] = list(judged_rollouts(str(human.parent.parent)))
    assert len(verdict.rows) == 2
    sources = [str(endpoint.folder), str(human.parent.parent)]
    rows = rows_of(run("promoted", at_least=3, feedback=sources))
    same = [row for row in rows if row["prompt"] == "2 + 2?"]
    assert len({row["group"] for row in same}) == 1 and [row["run"] for row in same] == [0, 1, 1]
    assert [row["source"] for row in same] == [sources[0], sources[1], sources[1]]
    written = list(find_rollouts(str(rounds(tmp_path / "p" / "next_feedback")[0].data), None))
    assert all(isinstance(one, EarlierRollout) and one.experience.info["prompt"] for one in written)


@pytest.mark.parametrize("missing", ["sft", "gate"])
def test_a_recipe_without_feedback_or_gate_is_refused(recipe: Path, missing: str) -> None:
    tree = yaml.safe_load(recipe.read_text())
    tree["stages"] = [stage for stage in tree["stages"] if stage["stage_name"] != missing]
    recipe.write_text(yaml.safe_dump(tree))
    with raising(TrinityError, key="stages"):
        improve(str(recipe), [], ["x"], 1)


def test_a_round_keeps_the_pipelines_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improving, "load_ready", load_config)
    file = "configs/quickstart/quickstart.yaml"
    write_json(tmp_path / MANIFEST, {"champion": "model"})
    recipe = Recipe(load_config(file, ["name=实验 😀"]), file, [], [])
    assert recipe.of_round(Round(tmp_path)).name == f"实验 😀_{tmp_path.name}"
