"""Workflows and judges by name on a real engine, with a small model that was taught to answer and to judge one
problem."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from rollout.exploring import rows_of, run_of
from rollout.taught import RIGHT, ROW, WRONG, teach
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.workflows.builtin import BOX_PROMPT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def taught(engine_of, tiny_folder, tmp_path_factory):
    """The model's folder and a started engine with it."""
    folder = tmp_path_factory.mktemp("taught")
    teach(tiny_folder, folder)
    return folder, engine_of(str(folder), max_model_len=512, max_num_seqs=16, threads=2, grammars=True)


def config_of(policy, root, workflow, algorithm="grpo", auxiliary=(), **taskset):
    data = root / "train.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    return run_of(
        root, policy, {"path": str(data), "default_workflow_type": workflow, **taskset}, name=workflow, mode="explore",
        algorithm={"algorithm_type": algorithm}, model={"max_model_len": 512, "max_response_tokens": 24},
        buffer={"batch_size": 1, "total_steps": 6},
        explorer={"auxiliary_models": [{"model_path": str(path)} for path in auxiliary]},
    )  # fmt: skip


def test_an_engine_judges_the_answers_of_an_engine(taught, tmp_path):
    folder, engine = taught
    rows = rows_of(config_of(folder, tmp_path, "rubric_judge_workflow", auxiliary=[folder]), engine, engine)
    assert len(rows) == 12 and {row.info["response"] for row in rows} == {RIGHT, WRONG}
    assert all(row.reward == (row.info["response"] == RIGHT) and row.action_mask.all() for row in rows)
    assert not any(row.metrics["verifier_errors"] for row in rows)


def test_tokens_that_a_grammar_forced_carry_no_loss(taught, tmp_path):
    """The policy gives both answers alike, so the grammar chooses where they part; elsewhere it excludes next to
    nothing, and the recorded log-probs are the policy's own."""
    sampling = {"temperature": 1.0, "structured_output": {"choice": [WRONG]}}
    settings = {"rollout_args": sampling, "default_reward_fn_type": "math_reward"}
    rows = rows_of(config_of(taught[0], tmp_path, "math_workflow", **settings), taught[1])
    model = AutoModelForCausalLM.from_pretrained(taught[0], dtype=torch.float64)
    assert len(rows) == 12
    for row in rows:
        logits = model(torch.tensor(row.tokens[None].astype(np.int64))).logits[0, row.prompt_length - 1 : -1]
        answer = torch.tensor(row.tokens[row.prompt_length :].astype(np.int64))
        own = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0].detach().numpy()
        forced = np.abs(own - row.logprobs) > 1e-3
        assert row.info["response"] == WRONG and row.reward == 0 and forced[0] and not forced.all()
        assert row.action_mask.tolist() == (~forced).tolist() and row.metrics["guided_tokens"] == forced.sum()


def test_a_teachers_logprobs_reach_the_loss(taught, tiny_folder, tiny_engine, tmp_path):
    """Loss and gradient equal those of float64 models: the mean of -(log teacher - log student) over sampled tokens."""
    config = config_of(
        tiny_folder, tmp_path, "on_policy_distill_math_workflow", algorithm="on_policy_distill", auxiliary=[taught[0]]
    ).with_values({"model.max_model_len": 200})
    rows = rows_of(config, tiny_engine, taught[1])
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in (tiny_folder, taught[0])
    )
    total, count, gaps = torch.zeros((), dtype=torch.float64), 0, []
    for row in rows:
        tokens = torch.tensor(row.tokens[None].astype(np.int64))
        ours, theirs = (
            model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[row.prompt_length - 1 :, 0]
            for model in (student, teacher)
        )
        np.testing.assert_allclose(row.teacher_logprobs, theirs.detach().numpy(), atol=1e-4)
        gap = (theirs - ours).detach()
        assert row.metrics["kl_divergence"] == pytest.approx(-float(gap.sum()), rel=1e-3)
        total, count, gaps = total - (gap * ours).sum(), count + len(gap), [*gaps, *gap.tolist()]
    (total / count).backward()
    norm = float(torch.stack([weight.grad.norm() for weight in student.parameters()]).norm())
    learner = Learner(config.with_values({"mode": "train"}), 1, join(0, 1, *meeting_point(), use_gpu=False))
    metrics = learner.step(rows, 1)
    assert len(rows) == 12 and abs(np.mean(gaps)) > 1.0
    assert metrics["actor/pg_loss"] == pytest.approx(-np.mean(gaps), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.fixture
def bytes_teacher(engine_of, tiny_folder, tmp_path):
    """A model of other tokens (single bytes) with a chat template of its own, and a started engine with it."""
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)
    folder = tmp_path / "bytes"
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny_folder, vocab_size=len(fast), eos_token_id=256, bos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder, engine_of(str(folder), max_model_len=512, max_num_seqs=16)


@pytest.mark.campaign
def test_a_teacher_with_other_tokens_scores_the_text(taught, bytes_teacher, tiny_folder, tiny_engine, tmp_path):
    """Each answer's log-probs sum to those of the teacher's own tokens of its text, by a float64 model; another task
    set would have the other teacher."""
    args = {"teacher": str(bytes_teacher[0]), "align_by_text": True}
    config = config_of(
        tiny_folder, tmp_path, "on_policy_distill_math_workflow", algorithm="on_policy_distill",
        auxiliary=[taught[0], bytes_teacher[0]], workflow_args=args,
    ).with_values({"model.max_model_len": 200})  # fmt: skip
    rows = rows_of(config, tiny_engine, taught[1], bytes_teacher[1])
    model = AutoModelForCausalLM.from_pretrained(bytes_teacher[0], dtype=torch.float64)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_folder, bytes_teacher[0]))
    messages = [{"role": "system", "content": BOX_PROMPT}, {"role": "user", "content": ROW["question"]}]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    compared = 0
    for row in rows:
        tokens = row.tokens[row.prompt_length :].tolist()
        ended = tokens[-1] == ours.convert_tokens_to_ids("<|im_end|>")
        text = ours.decode(tokens[: len(tokens) - ended])
        if text.endswith("\ufffd"):  # cut off within a character: its tokens keep the policy's log-probs
            continue
        answer = theirs.encode(text, add_special_tokens=False) + [256] * ended
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).sum()
        assert row.teacher_logprobs.sum() == pytest.approx(expected.item(), rel=1e-4)
        compared += 1
    assert len(rows) == 12 and compared > 6 and all(row.action_mask.all() for row in rows)


@pytest.mark.parametrize("algorithm", ["opsd", "opsd_full"])
def test_the_policy_with_a_demonstration_teaches_the_policy_without(tiny_folder, tiny_engine, tmp_path, algorithm):
    """OPSD on sampled tokens and over the whole vocabulary: the distributions after the prompt that holds the reference
    answer, by a float64 model."""
    asked, answered = ROW["question"], str(ROW["answer"])
    config = config_of(
        tiny_folder,
        tmp_path,
        "self_distill_workflow",
        algorithm=algorithm,
        workflow_args={"hint": "{question} {demonstration}!"},
    ).with_values({"model.max_model_len": 200})
    rows = rows_of(config, tiny_engine)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    hinted = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{asked} {answered}!"}], add_generation_prompt=True, return_dict=False
    )
    losses = []
    for row in rows:
        answer = row.tokens[row.prompt_length :].tolist()
        assert row.reward is None and row.action_mask.all() and row.metrics["has_demonstration"] == 1
        taught, own = (
            model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1).detach()
            for prompt in (hinted, row.tokens[: row.prompt_length].tolist())
        )
        if algorithm == "opsd_full":
            assert row.teacher_prompt.tolist() == hinted and row.teacher_logprobs is None
            losses += (taught.exp() * (taught - own)).sum(-1).tolist()
        else:
            chosen = taught.gather(-1, torch.tensor(answer)[:, None])[:, 0]
            np.testing.assert_allclose(row.teacher_logprobs, chosen.numpy(), atol=1e-4)
            losses += (row.logprobs - row.teacher_logprobs).tolist()
    assert len(rows) == 12 and abs(np.mean(losses)) > 1e-4
    learner = Learner(config.with_values({"mode": "train"}), 1, join(0, 1, *meeting_point(), use_gpu=False))
    assert learner.step(rows, 1)["actor/pg_loss"] == pytest.approx(np.mean(losses), rel=1e-3)
