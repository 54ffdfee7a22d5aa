"""The worker from start to end: a resumed run is bit-identical to one that was never stopped."""

import json
import os
import shutil
import signal
import time
from threading import Thread
from unittest import mock

import pytest
import torch
from trained_runs import assert_same_runs, put, run

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.cli import app
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.store.members import Contribution
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.run.loop import train
from trinity_core.training import checkpoint
from trinity_core.training.worker import TrainerActor, TrainerWorker

pytestmark = pytest.mark.slow


@pytest.fixture
def rollouts(make_config):
    def make(name, **overrides):
        return make_config(
            name=name, trainer__save_interval=2, algorithm__optimizer__lr=0.001,
            algorithm__optimizer__lr_warmup_steps=3, algorithm__kl_loss_fn="none", **overrides,
        )  # fmt: skip

    return make


def test_a_resumed_run_equals_the_uninterrupted_one(rollouts):
    whole, stopped = rollouts("whole"), rollouts("stopped")
    put(whole)
    assert run(whole)["ended"] == "finished"
    put(stopped, (1, 2, 3))
    before = signal.getsignal(signal.SIGTERM)
    worker = TrainerActor(stopped)
    worker.start()
    runner = Thread(target=worker.run, args=(train,))
    runner.start()
    while worker.progress()["step"] < 3 or worker.progress()["state"] != "waiting":
        runner.join(0.02)
    os.kill(os.getpid(), signal.SIGTERM)  # to this process alone, as to one on a machine that is taken away
    runner.join(60)
    signal.signal(signal.SIGTERM, before)
    assert worker.progress()["state"] == "stopped" and worker.progress()["saved_step"] == 3
    shutil.rmtree(stopped.job_dir / "global_step_3")  # as if it had been killed after the checkpoint of step 2
    again = TrainerWorker(stopped)
    assert again.start()["step"] == 2
    put(stopped)
    assert again.run(train)["ended"] == "finished"
    assert_same_runs(stopped, whole)


def test_metrics_that_another_thread_reads_are_not_changed(rollouts):
    config = rollouts("run")
    put(config)
    read = []

    def one_step(trainer):
        def contributions(step=None):
            read.append(trainer.progress.metrics)
            return {"explorer": Contribution(16, 0.0)}

        with mock.patch.object(trainer.source, "contributions", contributions):
            trainer.update(trainer.next_batch())
            trainer.write_metrics()
        metrics = trainer.progress.metrics
        assert "rows/explorer" in metrics and "rows/explorer" not in read[0]
        seconds = metrics["timing_s/step"] - metrics["timing_s/wait"]
        assert metrics["tokens_per_second"] == pytest.approx(metrics["experience/tokens"] / seconds)

    worker = TrainerWorker(config)
    worker.start()
    worker.run(one_step)


def test_fault_during_wait_for_batch_costs_no_step(rollouts):
    whole, late = rollouts("whole"), rollouts("late")
    put(whole)
    run(whole)
    put(late, (1, 2, 3))
    hurried = rollouts("late", buffer__trainer_input__experience_buffer__max_read_timeout=0.2)
    with pytest.raises(TransientFault):
        run(hurried)
    put(late)
    again = TrainerWorker(late)
    assert again.start()["step"] == 3, "which is no multiple of save_interval"
    assert again.run(train)["ended"] == "finished"
    assert_same_runs(late, whole)


@pytest.mark.parametrize(("named", "lora"), [(False, "[{lora_rank: 4, lora_alpha: 12}]"), (True, "[]")])
def test_kill_during_checkpoint_write_loses_only_that_checkpoint(rollouts, monkeypatch, named, lora):
    """The next step is trained in the meantime; store and metrics go back to the previous checkpoint with the run."""
    whole, killed = (rollouts(name, model__lora_configs=lora) for name in ("whole", "killed"))
    put(whole)
    put(killed)
    run(whole)
    worker = TrainerWorker(killed)
    worker.start()
    commit, last = checkpoint.commit, 2 if named else 4

    def commit_and_die(layout, step, *args):
        if step == 2:
            while worker.progress()["step"] < 3:
                time.sleep(0.005)
            assert worker.progress()["saved_step"] == 0
        if step < last or named:
            commit(layout, step, *args)
        if step == last:
            raise SystemExit(-9)

    monkeypatch.setattr(checkpoint, "commit", commit_and_die)
    with pytest.raises(SystemExit):
        worker.run(train)
    monkeypatch.undo()
    again = TrainerWorker(killed)
    assert again.start()["step"] == 2, "the newest one with a name"
    assert again.run(train)["ended"] == "finished"
    assert_same_runs(killed, whole)


def test_failed_write_ends_the_run_with_its_error(rollouts, monkeypatch):
    config = rollouts("unwritable")
    put(config)

    def begin(layout, step):
        path = layout.root / ".global_step_2.tmp-0"
        path.write_text("a file where the folder should be")
        return path

    monkeypatch.setattr(checkpoint, "begin", begin)
    with pytest.raises(TrinityError, match=r"rank_0\.pt"):
        run(config)


def test_renewed_worker_trains_like_a_new_one(rollouts):
    """As in the next stage of a pipeline; the process has trained something else before, with another thread count."""
    before, fresh, renewed = rollouts("before", seed=7), rollouts("fresh"), rollouts("renewed")
    for config in (before, fresh, renewed):
        put(config)
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
    assert_same_runs(renewed, fresh)


def test_a_resume_warns_of_what_differs_in_the_algorithm(rollouts, caplog):
    """The defaults of a newer release may change the loss of the remaining steps."""
    begun = rollouts("run", buffer__total_steps=2)
    put(begun, (1, 2))
    assert run(begun)["ended"] == "finished"

    def warned(**overrides):
        caplog.clear()
        assert TrainerWorker(rollouts("run", **overrides)).start()["step"] == 2
        return {record.args[0] for record in caplog.records if record.msg.startswith("algorithm.")}

    assert warned() == set()
    assert warned(algorithm__loss_agg_mode="seq-mean-token-mean") == {"loss_agg_mode"}
    assert warned(algorithm__loss_agg_mode="seq-mean-token-mean") == set(), "it is noted"


def test_outputs_of_a_run(rollouts, tiny_model):
    """Published weights with a check, checkpoints that `transformers` loads, and their records. A damaged one is
    skipped."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = rollouts("run", synchronizer__sync_interval=2)
    put(config)
    run(config)
    versions = open_versions("checkpoint", config.job_dir)
    assert versions.latest() == 4
    published = dict(versions.load(4))
    assert "lm_head.weight" in published
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    lm.load_state_dict(published)
    check = versions.check(4)
    tokens = torch.tensor([check.tokens])
    logprobs = lm(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs.detach(), torch.tensor(check.logprobs), atol=1e-5, rtol=1e-5)
    folder = convert(config.job_dir / "global_step_4")
    own = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in published.items())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    metas = {name: json.loads((config.job_dir / f"{name}_meta.json").read_text()) for name in ("trainer", "explorer")}
    algorithm = metas["trainer"].pop("algorithm")
    assert algorithm["algorithm_type"] == "grpo" and algorithm["repeat_times"] == 4
    assert metas["trainer"].pop("threads") >= 1
    assert metas == {
        "trainer": {"step": 4, "world_size": 1, "model": config.model.model_path, "tokenizer": config.model.model_path},
        "explorer": {"checkpoint": 4, "explorer_steps": {"explorer": 4}},
    }
    (config.job_dir / "global_step_4/actor/optim_world_size_1_rank_0.pt").write_bytes(b"cut short")
    assert TrainerWorker(config).start()["step"] == 2


def test_empty_batch_skips_step_and_end_of_data_ends_run(rollouts):
    config = rollouts("short")
    put(config, (1,))
    with open_run_store(config) as store:
        store.mark_waiting("explorer", 2)
        worker = TrainerWorker(config)
        worker.start()
        runner = Thread(target=worker.run, args=(train,))
        runner.start()
        while worker.progress()["step"] < 2:
            runner.join(0.02)
        assert worker.progress()["metrics"]["skipped_step"] == 1.0
        store.mark_finished("explorer")
        runner.join(60)
        assert store.trainer().ended, "for explorers that come later"
    assert worker.progress()["state"] == "done" and worker.progress()["step"] < 4


def test_exported_models_have_the_trained_chat_template(rollouts, tiny_model):
    """Both the trainer's own export and `trinity convert`, which also copies files of the base model."""
    from transformers import AutoTokenizer
    from typer.testing import CliRunner

    template = '{% for m in messages %}<{{ m["role"] }}>{{ m["content"] }}{% endfor %}'
    own = "trainer__trainer_config__actor_rollout_ref__actor__checkpoint__save_contents"
    config = rollouts(
        "template", model__custom_chat_template=f"'{template}'", buffer__total_steps=4, **{own: "[model, hf_model]"}
    )
    put(config)
    run(config)
    trained, converted = (config.job_dir / f"global_step_{step}/actor/huggingface" for step in (2, 4))
    (converted / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["convert", "--checkpoint-dir", str(converted), "--base-model-dir", str(tiny_model)])
    assert done.exit_code == 0, done.output
    for folder in (trained, converted):
        assert (folder / "model.safetensors").exists()
        exported = AutoTokenizer.from_pretrained(folder)
        assert exported.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False) == "<user>1 + 1?"
