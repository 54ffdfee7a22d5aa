"""The worker from start to end: a resumed run is the run that was never stopped, bit for bit."""

import json
import shutil
import time
from threading import Thread
from unittest import mock

import numpy as np
import pytest
import torch
from batches import make_batch

from trinity_core.data.tiny import make_problems, write_jsonl
from trinity_core.errors import DataError, TrinityError
from trinity_core.runtime.run import train
from trinity_core.training.worker import TrainerWorker

pytestmark = pytest.mark.slow
PART = "global_step_4/actor/{}_world_size_1_rank_0.pt"


@pytest.fixture
def rollouts(make_config):
    def make(name, **overrides):
        return make_config(
            name=name, trainer__save_interval=2, algorithm__optimizer__lr=0.001,
            algorithm__optimizer__lr_warmup_steps=3, algorithm__kl_loss_fn="none", **overrides,
        )  # fmt: skip

    return make


def _put(config, steps):
    """Explore steps that all used version 0: of newer ones a fresh trainer would know nothing, and drop them."""
    from trinity_core.store.run_store import open_run_store

    with open_run_store(config) as store:
        done = store.position("explorer").step
        for step in steps:
            if step > done:
                rows = make_batch(step)
                for row in rows:
                    row.versions = np.where(row.action_mask, 0, -1)
                store.put("explorer", step, {}, rows, 0)


def _losses(config):
    lines = (config.job_dir / "monitor" / "metrics.jsonl").read_text().splitlines()
    kept = ("actor/final_loss", "actor/grad_norm", "actor/lr")
    return [(line["step"], *(line["metrics"][name] for name in kept)) for line in map(json.loads, lines)]


def _assert_same_checkpoints(one, other):
    for content in ("model", "optim"):
        a = torch.load(one.job_dir / PART.format(content), weights_only=True)
        b = torch.load(other.job_dir / PART.format(content), weights_only=True)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def _run(config):
    worker = TrainerWorker(config)
    worker.start()
    return worker.run(train)


def test_a_resumed_run_equals_the_uninterrupted_one(rollouts):
    whole, stopped = rollouts("whole"), rollouts("stopped")
    _put(whole, range(1, 5))
    assert _run(whole)["ended"] == "finished"
    _put(stopped, (1, 2, 3))
    worker = TrainerWorker(stopped)
    worker.start()
    runner = Thread(target=worker.run, args=(train,))
    runner.start()
    while worker.progress()["step"] < 3 or worker.progress()["state"] != "waiting":
        runner.join(0.02)
    worker.stop()
    runner.join(60)
    assert worker.progress()["state"] == "stopped" and worker.progress()["saved_step"] == 3
    shutil.rmtree(stopped.job_dir / "global_step_3")  # as if it had been killed after the checkpoint of step 2
    again = TrainerWorker(stopped)
    assert again.start()["step"] == 2
    _put(stopped, range(1, 5))
    assert again.run(train)["ended"] == "finished"
    assert _losses(stopped) == _losses(whole)
    _assert_same_checkpoints(stopped, whole)


@pytest.mark.parametrize(("named", "lora"), [(False, "[{lora_rank: 4, lora_alpha: 12}]"), (True, "[]")])
def test_kill_while_a_checkpoint_is_written_costs_that_checkpoint_alone(rollouts, monkeypatch, named, lora):
    """The step after it is trained meanwhile; store and metrics go back to the checkpoint with it."""
    from trinity_core.training import savepoints

    whole, killed = (rollouts(name, model__lora_configs=lora) for name in ("whole", "killed"))
    _put(whole, range(1, 5))
    _put(killed, range(1, 5))
    _run(whole)
    worker = TrainerWorker(killed)
    worker.start()
    commit, last = savepoints.commit, 2 if named else 4

    def commit_and_die(layout, step, *args):
        if step == 2:
            while worker.progress()["step"] < 3:
                time.sleep(0.005)
            assert worker.progress()["saved_step"] == 0
        if step < last or named:
            commit(layout, step, *args)
        if step == last:
            raise SystemExit(-9)

    monkeypatch.setattr(savepoints, "commit", commit_and_die)
    with pytest.raises(SystemExit):
        worker.run(train)
    monkeypatch.undo()
    again = TrainerWorker(killed)
    assert again.start()["step"] == 2, "the newest one with a name"
    assert again.run(train)["ended"] == "finished"
    assert _losses(killed) == _losses(whole)
    _assert_same_checkpoints(killed, whole)


def test_failed_write_ends_the_run_with_its_error(rollouts, monkeypatch):
    from trinity_core.training import savepoints

    config = rollouts("unwritable")
    _put(config, range(1, 5))

    def begin(layout, step):
        path = layout.root / ".global_step_2.tmp-0"
        path.write_text("a file where the folder should be")
        return path

    monkeypatch.setattr(savepoints, "begin", begin)
    with pytest.raises(TrinityError, match=r"writing .*rank_0.pt.* failed: a file is in the way"):
        _run(config)


def test_renewed_worker_trains_like_a_new_one(rollouts):
    """As the next stage of a pipeline does; the process has trained something else before, with other threads."""
    before, fresh, renewed = rollouts("before", seed=7), rollouts("fresh"), rollouts("renewed")
    for config in (before, fresh, renewed):
        _put(config, range(1, 5))
    threads = torch.get_num_threads()
    # Watched, not looked up afterwards: where a test before this one has started vLLM, torch keeps the threads it has.
    with mock.patch("torch.set_num_threads", wraps=torch.set_num_threads) as set_threads:
        worker = TrainerWorker(fresh, threads=1)
        worker.start()
        worker.run(train)
        worker = TrainerWorker(before, threads=2)
        worker.start()
        worker.run(train)
        worker.renew(renewed, threads=1)
        assert worker.progress()["state"] == "starting" and worker.start()["step"] == 0
        assert worker.run(train)["ended"] == "finished"
        assert [call.args[0] for call in set_threads.call_args_list] == [1, 1, 2, 2, 1, 1], "at each start and run"
    torch.set_num_threads(threads)
    assert _losses(renewed) == _losses(fresh)
    _assert_same_checkpoints(renewed, fresh)


def test_a_damaged_checkpoint_is_skipped(rollouts):
    config = rollouts("damaged")
    _put(config, range(1, 5))
    _run(config)
    metas = {name: json.loads((config.job_dir / f"{name}_meta.json").read_text()) for name in ("trainer", "explorer")}
    algorithm = metas["trainer"].pop("algorithm")
    assert algorithm["algorithm_type"] == "grpo" and algorithm["repeat_times"] == 4
    assert metas == {
        "trainer": {"step": 4, "world_size": 1, "model": config.model.model_path, "tokenizer": config.model.model_path},
        "explorer": {"checkpoint": 4, "explorer_steps": {"explorer": 4}},
    }
    (config.job_dir / PART.format("optim")).write_bytes(b"cut short")
    assert TrainerWorker(config).start()["step"] == 2


def test_versions_are_published_with_a_weight_check(rollouts, tiny_model):
    from transformers import AutoModelForCausalLM

    from trinity_core.sync.versions import open_versions

    config = rollouts("published", synchronizer__sync_interval=2)
    _put(config, range(1, 5))
    _run(config)
    folder = open_versions("checkpoint", config.job_dir)
    assert folder.latest() == 4
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    state = dict(folder.load(4))
    assert "lm_head.weight" in state
    lm.load_state_dict(state)
    check = folder.check(4)
    tokens = torch.tensor([check.tokens])
    logprobs = lm(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs.detach(), torch.tensor(check.logprobs), atol=1e-5, rtol=1e-5)


def test_converted_checkpoint_loads_in_transformers(rollouts):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trinity_core.checkpoints.convert import convert
    from trinity_core.sync.versions import open_versions

    config = rollouts("converted")
    _put(config, range(1, 5))
    _run(config)
    folder = convert(config.job_dir / "global_step_4")
    own, published = AutoModelForCausalLM.from_pretrained(folder), open_versions("checkpoint", config.job_dir).load(4)
    assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in published)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_exported_models_have_the_trained_chat_template(rollouts, tiny_model):
    """Both the trainer's own export and `trinity convert`, which also copies files of the base model."""
    from transformers import AutoTokenizer
    from typer.testing import CliRunner

    from trinity_core.cli import app

    template = '{% for m in messages %}<{{ m["role"] }}>{{ m["content"] }}{% endfor %}'
    own = "trainer__trainer_config__actor_rollout_ref__actor__checkpoint__save_contents"
    config = rollouts(
        "template", model__custom_chat_template=f"'{template}'", buffer__total_steps=4, **{own: "[model, hf_model]"}
    )
    _put(config, range(1, 5))
    _run(config)
    trained, converted = (config.job_dir / f"global_step_{step}/actor/huggingface" for step in (2, 4))
    (converted / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["convert", "--checkpoint-dir", str(converted), "--base-model-dir", str(tiny_model)])
    assert done.exit_code == 0, done.output
    for folder in (trained, converted):
        assert (folder / "model.safetensors").exists()
        exported = AutoTokenizer.from_pretrained(folder)
        assert exported.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False) == "<user>1 + 1?"


def test_empty_batch_skips_step_and_end_of_data_ends_run(rollouts):
    from trinity_core.store.run_store import open_run_store

    config = rollouts("short")
    _put(config, (1,))
    with open_run_store(config) as store:
        store.waiting("explorer", 2)
        worker = TrainerWorker(config)
        worker.start()
        runner = Thread(target=worker.run, args=(train,))
        runner.start()
        while worker.progress()["step"] < 2:
            runner.join(0.02)
        assert worker.progress()["metrics"]["skipped_step"] == 1.0
        store.finished("explorer")
        runner.join(60)
        assert store.trainer().ended, "for explorers that come later"
    assert worker.progress()["state"] == "done" and worker.progress()["step"] < 4


def test_sft_from_a_file_resumes_where_it_stopped(make_config, tmp_path):
    rows = make_problems(1, 40, 1, 1)["train"]
    write_jsonl(tmp_path / "sft.jsonl", rows)

    def config(name, steps, rows=16):
        return make_config(
            "sft", name, buffer__total_steps=steps, buffer__train_batch_size=rows, trainer__save_interval=2,
            algorithm__optimizer__lr=0.01, buffer__trainer_input__experience_buffer__path=tmp_path / "sft.jsonl",
            buffer__trainer_input__experience_buffer__format="{prompt_key: question, response_key: answer}",
            model__max_model_len=200,
        )  # fmt: skip

    summary = _run(config("whole", 4))
    _run(config("halves", 2))
    with pytest.raises(DataError, match="train_batch_size was 16, is 8"):
        _run(config("halves", 4, rows=8))
    _run(config("halves", 4))
    whole, halves = config("whole", 4), config("halves", 4)
    assert _losses(halves) == _losses(whole)
    _assert_same_checkpoints(halves, whole)
    assert not (whole.job_dir / "latest_state_dict_iteration.txt").exists(), "no weights were published"
    assert summary["step"] == 4 and _losses(whole)[-1][1] < _losses(whole)[0][1]
