"""Where an actor's log goes, from which level on, and what it never holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.tracking.logs import OURS, log_environment, log_name, logged, masked, start_log
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.training.worker import TrainerWorker


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before, levels = list(root.handlers), {name: logging.getLogger(name).level for name in OURS}
    yield
    for handler in [added for added in root.handlers if added not in before]:
        handler.close()
        root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def config_of(folder: Path, name: str, log: dict[str, object]) -> Config:
    tasks = {"taskset": {"path": "tasks.jsonl"}}
    tree = {"project": "p", "name": name, "checkpoint_root_dir": str(folder), "log": log,
             "model": {"model_path": "m", "max_model_len": 64}, "buffer": {"explorer_input": tasks}}  # fmt: skip
    return config_from_dict(tree)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, **log: object) -> Path | None:
    config = config_of(folder, "n", log)
    for name, value in log_environment(config, "n/engine_0").items():
        monkeypatch.setenv(name, value)
    return start_log()


def test_each_actor_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(tmp_path, monkeypatch)
    assert path == tmp_path / "p/n/log/engine_0.log"
    assert start_log() == path, "once more changes nothing"
    log = logging.getLogger("trinity_core.somewhere")
    log.info("the engine starts")
    log.debug("too fine")
    logging.getLogger("library").warning("from elsewhere")
    lines = path.read_text().splitlines()
    assert len(lines) == 2 and "INFO" in lines[0] and "the engine starts" in lines[0] and "from elsewhere" in lines[1]


def test_a_kept_trainer_logs_its_next_stage_in_that_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch)
    log = logging.getLogger("trinity_core.somewhere")
    worker = TrainerWorker(config_of(tmp_path, "n", {}))
    log.info("the first stage")
    worker.renew(config_of(tmp_path, "n_rft", {"level": "WARNING"}))
    log.warning("the next stage")
    log.info("left out by its level")
    files = [tmp_path / "p" / name / "log" / file for name, file in (("n", "engine_0.log"), ("n_rft", "trainer_0.log"))]
    assert [[line.partition(": ")[2] for line in file.read_text().splitlines()] for file in files] == [
        ["the first stage"], ["the next stage"]
    ]  # fmt: skip


def test_a_kept_engine_logs_its_next_stage_in_that_ones_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, monkeypatch)
    log = logging.getLogger("trinity_core.somewhere")
    engine = InProcessEngine(EngineSettings("m", 64))
    place = log_environment(config_of(tmp_path, "n_rft", {}), "n_rft/explorer/engine_0")
    asyncio.run(engine.move_log(place))
    log.info("the next stage")
    assert "the next stage" in (tmp_path / "p/n_rft/log/explorer_engine_0.log").read_text()
    assert not (tmp_path / "p/n/log/engine_0.log").exists()


def test_explorers_and_evaluations_have_logs_of_their_own() -> None:
    actors = ("n/trainer_0", "n/explorer", "n/explorer/engine_0", "n/new/engine_0", "n/evaluation/new/engine_0")
    names = ["trainer_0", "explorer", "explorer_engine_0", "new_engine_0", "evaluation_new_engine_0"]
    assert [log_name(actor) for actor in actors] == names


def test_level_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(tmp_path, monkeypatch, level="ERROR", group_by_node=True)
    assert path is not None and path.parent.parent == tmp_path / "p/n/log" and path.parent.name.count(".") == 3
    log = logging.getLogger("trinity_core.somewhere")
    log.warning("not so bad")
    with pytest.raises(ValueError), logged("training", log):
        raise ValueError("no rows in postgresql://me:hunter2@db/x")
    text = path.read_text()
    assert "not so bad" not in text and "training fails" in text and "Traceback" in text and "hunter2" not in text


@pytest.mark.parametrize(
    "secret",
    ["postgresql://me:hunter2@db/x", "api_key=hunter2", "{'password': 'hunter2'}", "WANDB_API_KEY: hunter2",
     "Authorization: Bearer hunter2hunter2", 'hf_token="hunter2"', "X-Api-Key: hunter2", "secret_key: hunter2",
     "error: aws_secret_access_key=hunter2", "http://host?key=hunter2", "Authorization: token hunter2",
     "--api-key hunter2", "['--hf-token', 'hunter2']", "authToken: hunter2", "client_secret=hunter2"],
)  # fmt: skip
def test_secrets_are_masked(secret: str) -> None:
    assert "hunter2" not in masked(secret) and "***" in masked(secret)


def test_numbers_are_secrets_unless_they_count_tokens() -> None:
    assert masked("password=123456, max_token=16") == "password=***, max_token=16"


def test_plain_text_stays() -> None:
    text = "step 3: tokens: 12, max_token=16 at http://127.0.0.1:4200/api, end token: 7"
    assert masked(text) == text
