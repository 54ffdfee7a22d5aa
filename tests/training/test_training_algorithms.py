"""PPO, OPMD, MIX, DPO and SFT through the worker: each learns from its own kind of data and resumes its whole state."""

import json

import pytest
import torch
from trained_runs import STEPS, assert_same_runs, metrics, put, run, tensors
from transformers import AutoModelForCausalLM

from trinity_core.base.errors import DataError
from trinity_core.data.experience import to_bytes
from trinity_core.data.supervised import read_supervised
from trinity_core.data.tiny import make_problems, write_jsonl
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.exchange.checkpoints.convert import convert

pytestmark = pytest.mark.slow
COLUMNS = "{prompt_key: question, response_key: answer}"


def _whole_and_halves(make, parts=("actor",), explored=True):
    """Train once in one run and once in two, the second from the first one's checkpoint: results must be bit-identical.
    Returns the whole run's configuration and metrics."""
    whole = make("whole", STEPS)
    for config in (whole, make("halves", STEPS // 2), make("halves", STEPS)):
        if explored:
            put(config)
        assert run(config)["ended"] == "finished"
    assert_same_runs(whole, config, parts)
    return whole, metrics(whole)


def test_ppo_saves_and_resumes_its_critic(make_config):
    def make(name, steps):
        return make_config(
            "ppo", name, buffer__total_steps=steps, algorithm__kl_loss_fn="none",
            trainer__trainer_config__critic__optim__lr=0.003,
            trainer__trainer_config__trainer__critic_warmup=1,
        )  # fmt: skip

    whole, steps = _whole_and_halves(make, ("actor", "critic"))
    assert "actor/pg_loss" not in steps[0] and "actor/pg_loss" in steps[1]  # the critic's warm-up
    assert steps[0]["values/mean"] == 0.0 and steps[-1]["values/mean"] != 0.0
    assert float(tensors(whole, "critic", "model")["value_head.weight"].abs().sum()) > 0
    state = json.loads((whole.job_dir / f"global_step_{STEPS}" / "trainer_state.json").read_text())
    assert state["optimizer_steps"] == {"actor": STEPS - 1, "critic": STEPS}


def test_opmd_trains_on_rollouts_of_an_old_version(make_config):
    def make(name, steps):
        return make_config("opmd", name, buffer__total_steps=steps, synchronizer__sync_interval=2)

    _, steps = _whole_and_halves(make)
    assert [step["staleness/max"] for step in steps] == [0.0, 1.0, 2.0, 3.0]
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7) and steps[-1]["actor/kl_loss"] > 0
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def test_mix_resumes_rollouts_and_expert_rows(make_config, tmp_path):
    from trinity_core.training.sources import open_source

    write_jsonl(tmp_path / "expert.jsonl", make_problems(1, 40, 1, 1)["train"])

    def make(name, steps):
        return make_config(
            "mix", name, buffer__total_steps=steps, algorithm__sample_strategy_args="{expert_data_ratio: 0.2}",
            buffer__trainer_input__auxiliary_buffers__expert__path=tmp_path / "expert.jsonl",
            buffer__trainer_input__auxiliary_buffers__expert__format=COLUMNS,
            model__max_model_len=200,
        )  # fmt: skip

    whole, steps = _whole_and_halves(make)
    assert [(step["experience/rows"], step["experience/expert_rows"]) for step in steps] == [(20.0, 4.0)] * STEPS
    batches = {}
    for config in (whole, make("halves", STEPS)):
        source = open_source(config)
        batches[config.name] = [source.draw(step, lambda: False, print) for step in range(1, STEPS + 1)]
    for name in batches:
        rows = [e for batch in batches[name] for e in batch]
        experts = [e.task_index for e in rows if e.is_expert]
        assert len(set(experts)) == len(experts) == 4 * STEPS  # none twice within an epoch, none left out by a resume
        assert len({e.group for e in rows if not e.is_expert}) == 4 * STEPS
    for one, other in zip(*batches.values(), strict=True):
        assert to_bytes(one) == to_bytes(other)


def test_dpo_learns_from_a_data_set_of_pairs(make_config, tmp_path):
    rows = make_problems(2, 40, 1, 1)["train"]
    pairs = [{"question": row["question"], "chosen": row["answer"], "rejected": "I have no idea."} for row in rows]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)

    def make(name, steps):
        return make_config(
            "dpo", name, buffer__total_steps=steps, buffer__train_batch_size=16, algorithm__optimizer__lr=0.003,
            buffer__trainer_input__experience_buffer__path=tmp_path / "pairs.jsonl",
            buffer__trainer_input__experience_buffer__format=(
                "{prompt_key: question, chosen_key: chosen, rejected_key: rejected}"
            ),
            model__max_model_len=200,
        )  # fmt: skip

    _, steps = _whole_and_halves(make, explored=False)
    assert steps[0]["actor/dpo_loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference
    assert steps[-1]["actor/dpo_loss"] < steps[0]["actor/dpo_loss"]
    assert all(step["experience/groups"] == 8.0 for step in steps)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_held_out_loss_is_measured_and_nothing_is_learned_from_it(make_config, tmp_path, algorithm):
    rows = [row | {"rejected": "I have no idea."} for row in make_problems(2, 24, 1, 1)["train"]]
    for name, part in (("train", rows[:16]), ("test", rows[16:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    form = "{prompt_key: question, response_key: answer, chosen_key: answer, rejected_key: rejected}"
    inputs, trained, losses = "buffer__trainer_input__", {}, {}
    for name in ("without", "with"):
        settings = {f"{inputs}experience_buffer__path": tmp_path / "train.jsonl", "explorer__eval_interval": 3}
        settings |= {f"{inputs}experience_buffer__format": form, "algorithm__optimizer__lr": 0.01}
        if name == "with":
            settings |= {f"{inputs}auxiliary_buffers__test": f"{{path: {tmp_path}/test.jsonl, held_out: true}}"}
            settings |= {f"{inputs}auxiliary_buffers__test__format": form}
        config = make_config(
            algorithm, name, buffer__total_steps=STEPS, buffer__train_batch_size=8, model__max_model_len=200, **settings
        )
        run(config)
        trained[name], losses[name] = tensors(config, "actor", "model"), metrics(config)
    assert all(torch.equal(trained["with"][name], trained["without"][name]) for name in trained["without"])
    measured = {int(step["step"]): step["eval/test/loss"] for step in losses["with"] if "eval/test/loss" in step}
    assert measured.keys() == {3, STEPS}
    assert all("eval/test/loss" not in step for step in losses["without"])
    lm = AutoModelForCausalLM.from_pretrained(convert(config.job_dir / f"global_step_{STEPS}"))
    expected = held_out_loss(algorithm, lm, AutoModelForCausalLM.from_pretrained(config.model.model_path), config)
    assert measured[STEPS] == pytest.approx(expected, rel=1e-4)


def held_out_loss(algorithm, lm, reference, config):
    """By transformers, row by row."""
    kind = "preferences" if algorithm == "dpo" else "demonstrations"
    [buffer] = config.buffer.trainer_input.auxiliary_buffers.values()
    rows = read_supervised(buffer, policy_encoder(config.model), kind).rows

    def scores(model, row):
        tokens = torch.tensor(row.tokens).long()[None]
        with torch.no_grad():
            scored = model.float()(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        return scored[torch.tensor(row.answer)[1:]]

    if algorithm == "sft":
        return -float(torch.cat([scores(lm, row) for [row] in rows]).mean())
    ratios = torch.stack([scores(lm, row).sum() - scores(reference, row).sum() for pair in rows for row in pair])
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    return -float(torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean())


def test_sft_resumes_its_place_in_the_file(make_config, tmp_path):
    write_jsonl(tmp_path / "sft.jsonl", make_problems(1, 40, 1, 1)["train"])

    def make(name, steps, rows=16):
        return make_config(
            "sft", name, buffer__total_steps=steps, buffer__train_batch_size=rows, trainer__save_interval=2,
            algorithm__optimizer__lr=0.01, buffer__trainer_input__experience_buffer__path=tmp_path / "sft.jsonl",
            buffer__trainer_input__experience_buffer__format=COLUMNS, model__max_model_len=200,
        )  # fmt: skip

    whole, steps = _whole_and_halves(make, explored=False)
    assert not (whole.job_dir / "latest_state_dict_iteration.txt").exists(), "no weights were published"
    assert steps[-1]["actor/final_loss"] < steps[0]["actor/final_loss"]
    with pytest.raises(DataError):
        run(make("halves", STEPS + 1, rows=8))
