"""Workflows and judges by name on a real engine, with a small model that was taught to answer and to judge one
problem."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from rollout.taught import CALL, FEEDBACK, KNOWN, RIGHT, ROW, TOOL, WRONG, teach
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_text import FrozenLake
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trinity_core.algorithms.objective import Objective
from trinity_core.config import config_from_dict
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.rollout.explorer import Explorer
from trinity_core.run.loop import explore
from trinity_core.training.batch import make_batch
from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.update import prepare
from trinity_core.workflows.builtin import BOX_PROMPT
from trinity_core.workflows.environments.reasoning import rows as made_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def taught(engine_of, tiny_folder, tmp_path_factory):
    """The model's folder and a started engine with it."""
    folder = tmp_path_factory.mktemp("taught")
    teach(tiny_folder, folder)
    return folder, engine_of(str(folder), max_model_len=512, max_num_seqs=16, threads=2, grammars=True)


def config_of(policy, root, workflow, algorithm="grpo", auxiliary=(), sections=None, **taskset):
    """`sections`: section -> settings that differ in it, such as numbers of tasks and steps."""
    data = root / "train.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    tasks = {"path": str(data), "format": {"prompt_key": "question", "response_key": "answer"}, **taskset}
    usual = {
        "project": "p",
        "name": workflow,
        "checkpoint_root_dir": str(root),
        "mode": "explore",
        "algorithm": {"algorithm_type": algorithm, "repeat_times": 2},
        "model": {"model_path": str(policy), "max_model_len": 512, "max_response_tokens": 24},
        "buffer": {"batch_size": 1, "total_steps": 6, "explorer_input": {
            "taskset": tasks, "default_workflow_type": workflow}},
        "explorer": {"eval_interval": 0, "auxiliary_models": [{"model_path": str(path)} for path in auxiliary]},
        "synchronizer": {"sync_method": "checkpoint"},
    }  # fmt: skip
    differing = sections or {}
    return config_from_dict(differing | {name: part | differing.get(name, {}) if isinstance(part, dict) else part
                                         for name, part in usual.items()})  # fmt: skip


def explored(config, engine, *auxiliary):
    asyncio.run(Explorer(config, [engine], [[helper] for helper in auxiliary]).run(explore))
    with closing(open_run_store(config)) as store:
        return store.lease(1, 64, 1)


JUDGED = [
    ("rubric_judge_workflow", {}, (1.0, 0.0)),
    ("simple_workflow", {"default_reward_fn_type": "llm_judge", "reward_fn_args": {"mode": "pairwise"}}, (1.0, 0.0)),
    ("simple_workflow", {"default_reward_fn_type": "llm_judge", "reward_fn_args": {"mode": "group"}}, (0.75, 0.0)),
    ("math_ruler_workflow", {}, (0.75, 0.0)),
]


@pytest.mark.parametrize(("workflow", "taskset", "worth"), JUDGED, ids=["rubric", "pairwise", "group", "ruler"])
def test_an_engine_judges_the_answers_of_an_engine(taught, tmp_path, workflow, taskset, worth):
    folder, engine = taught
    config = config_of(folder, tmp_path, workflow, auxiliary=[folder], **taskset)
    groups = defaultdict(list)
    for row in explored(config, engine, engine):
        groups[row.group].append(row)
    different = [rows for rows in groups.values() if {row.info["response"] for row in rows} == {RIGHT, WRONG}]
    assert len(groups) == 6 and different
    for row in (row for rows in different for row in rows):
        right = row.info["response"] == RIGHT
        assert row.reward == worth[not right] and row.metrics["verifier_errors"] == 0
        assert row.metrics.get("gold_reward", right) == right and row.action_mask.all()


def test_tokens_that_a_grammar_forced_carry_no_loss(taught, tmp_path):
    """The policy gives both answers alike, so the grammar chooses where they part; elsewhere it excludes next to
    nothing, and the recorded log-probs are the policy's own."""
    sampling = {"temperature": 1.0, "structured_output": {"choice": [WRONG]}}
    settings = {"rollout_args": sampling, "default_reward_fn_type": "math_reward"}
    rows = explored(config_of(taught[0], tmp_path, "math_workflow", **settings), taught[1])
    model = AutoModelForCausalLM.from_pretrained(taught[0], dtype=torch.float64)
    assert len(rows) == 12
    for row in rows:
        logits = model(torch.tensor(row.tokens[None].astype(np.int64))).logits[0, row.prompt_length - 1 : -1]
        answer = torch.tensor(row.tokens[row.prompt_length :].astype(np.int64))
        own = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0].detach().numpy()
        forced = np.abs(own - row.logprobs) > 1e-3
        assert row.info["response"] == WRONG and row.reward == 0 and forced[0] and not forced.all()
        assert row.action_mask.tolist() == (~forced).tolist() and row.metrics["guided_tokens"] == forced.sum()


def test_an_engine_tries_again(taught, tmp_path):
    settings = {"workflow_args": {"feedback": FEEDBACK, "max_turns": 2}}
    rows = explored(config_of(taught[0], tmp_path, "multi_turn_workflow", **settings), taught[1])
    assert len(rows) == 12 and {row.reward for row in rows} == {1.0}
    turns = [row.info["response"].startswith(WRONG) + 1 for row in rows]
    assert [row.metrics["turns"] for row in rows] == turns and set(turns) == {1, 2}


def test_an_early_win_is_worth_more(taught, tmp_path):
    """`gigpo` on a real engine: in a group, first turns that won rank above those that needed another turn, although
    both runs are worth the same."""
    settings = {"workflow_args": {"feedback": FEEDBACK, "max_turns": 2, "step_wise": True, "discount": 0}}
    config = config_of(taught[0], tmp_path, "multi_turn_workflow", "gigpo", **settings)
    groups = defaultdict(list)
    for row in explored(config, taught[1]):
        groups[row.group].append(row)
    mixed = [rows for rows in groups.values() if len(rows) == 3]
    assert mixed and all(len({row.state for row in rows if row.turn == 0}) == 1 for rows in groups.values())
    for rows in mixed:  # first turns return 1 and 0.95: 0.025 from their mean, with a deviation of 0.05 / sqrt(2)
        prepared, _ = prepare(Objective(config.algorithm), make_batch(rows, torch.device("cpu")), None, None, None)
        answers = [(row.info["response"].startswith(WRONG), row.turn) for row in rows]
        advantages = dict(zip(answers, prepared.advantages[:, 0].tolist(), strict=True))
        by_hand = 0.025 / (0.05 / 2**0.5 + 1e-6)
        assert advantages == pytest.approx({(False, 0): by_hand, (True, 0): -by_hand, (False, 1): 0.0}, abs=1e-3)


def sum_of_seven():
    """A sum from reasoning-gym with the result 7, as read by its verifier."""
    sums = made_rows("chain_sum", 1, 100, {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    return next(row["entry"] for row in sums if row["answer"] == "7")


def scored():
    """Reward function -> the row, and the value of each answer."""
    by_heart = {question: {"question": question} for question in KNOWN}
    (puzzle, made), (program, written), (sum_, added) = KNOWN.items()
    return {
        "math_reward": (ROW, {RIGHT: 1.0, WRONG: 0.0}),
        "accuracy_reward": (ROW, {RIGHT: 1.0, WRONG: 0.0}),
        "format_reward": (ROW, {RIGHT: 1.0, WRONG: 0.0}),
        "math_boxed_reward": (ROW | {"system": BOX_PROMPT}, {"\\boxed{1}": 1.0}),
        "math_dapo_reward": (ROW | {"system": BOX_PROMPT}, {"\\boxed{1}": 1.0}),
        "countdown_reward": (by_heart[puzzle] | {"nums": [1, 2], "target": 3}, {made: 1.0}),
        "code_reward": (by_heart[program] | {"answer": {"inputs": [""], "outputs": ["1"]}}, {written: 1.0}),
        "reasoning_gym_reward": (by_heart[sum_] | {"entry": sum_of_seven()}, {added: 1.0}),
    }


def test_rewards_score_the_answers_of_an_engine(taught, tmp_path):
    cases, tasksets = scored(), []
    for name, (row, _) in cases.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        keys = {"prompt_key": "question", "response_key": "answer", "system_prompt_key": "system"}
        form = {key: column for key, column in keys.items() if column in row}
        tasksets.append({"name": name, "path": str(path), "default_reward_fn_type": name, "format": form})
    inputs = {"tasksets": tasksets, "default_workflow_type": "simple_workflow"}
    sections = {"buffer": {"batch_size": len(cases), "total_steps": 2, "explorer_input": inputs}}
    experiences = explored(config_of(taught[0], tmp_path, "simple_workflow", sections=sections), taught[1])
    assert {one.info["taskset"] for one in experiences} == set(cases) and len(experiences) == 4 * len(cases)
    for one in experiences:
        worth = cases[one.info["taskset"]][1]
        assert one.reward == worth[one.info["response"]] and one.metrics["verifier_errors"] == 0, one.info


def test_calls_of_an_engine_are_compared_with_the_rows(taught, tmp_path):
    """Parsed by the parser that the chat template determines."""
    sections = {
        "model": {"model_path": str(taught[0]), "max_model_len": 512, "max_response_tokens": 64},
        "buffer": {"batch_size": 2, "total_steps": 2},
    }
    data = tmp_path / "calls.jsonl"
    inputs = {"taskset": {"path": str(data)}, "default_workflow_type": "toolcall_workflow"}
    sections["buffer"]["explorer_input"] = inputs
    texts = {
        "conversations": [{"from": "human", "value": "What time is it?"}],
        "tools": json.dumps([TOOL["function"]]),
    }  # fmt: skip
    answers = [{"name": name, "arguments": {}} for name in ("now", "then")]
    data.write_text("".join(json.dumps({**texts, "answer": json.dumps([answer])}) + "\n" for answer in answers))
    experiences = explored(config_of(taught[0], tmp_path, "toolcall_workflow", sections=sections), taught[1])
    assert len(experiences) == 8 and {one.info["response"].removesuffix("<|im_end|>") for one in experiences} == {CALL}
    assert {one.task_index % 2: one.reward for one in experiences} == {0: 1.0, 1: 0.0}


AGENT = """
import json, os, urllib.request
messages = json.load(open(os.environ["TRINITY_TASK"]))["messages"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 24}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
said = json.load(urllib.request.urlopen(request, timeout=60))
json.dump({"answer": said["choices"][0]["message"]["content"]}, open(os.environ["TRINITY_REPORT"], "w"))
"""


API = {"explorer": {"rollout_model": {"enable_openai_api": True}}}


def test_a_command_asks_an_engine(taught, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    flow = {"workflow_args": {"command": [sys.executable, "-I", str(agent)]}, "default_reward_fn_type": "math_reward"}
    config = config_of(taught[0], tmp_path, "command_workflow", sections=API, **flow)
    experiences = explored(config, taught[1])
    tokenizer = AutoTokenizer.from_pretrained(taught[0])
    texts = [tokenizer.decode(one.tokens[one.prompt_length :], skip_special_tokens=True) for one in experiences]
    assert len(experiences) == 12 and set(texts) == {RIGHT, WRONG}
    assert [one.reward for one in experiences] == [float(text == RIGHT) for text in texts]


def test_groups_without_a_difference_are_replaced(taught, tmp_path):
    """Half of the groups of two have equal rewards: each step continues until it has both groups that it needs."""
    sections = {
        "explorer": {"max_refill_rounds": 40},
        "data_processor": {"experience_pipeline": {"operators": [{"name": "dynamic_sampling"}]}},
    }
    taskset = {"default_reward_fn_type": "math_reward"}
    config = config_of(taught[0], tmp_path, "math_workflow", sections=sections, **taskset)
    experiences = explored(config, taught[1])
    groups = defaultdict(list)
    for one in experiences:
        groups[one.group].append(one.reward)
    assert [sorted(rewards) for rewards in groups.values()] == [[0.0, 1.0]] * 6
    drawn = [line.metrics["tasks"] for line in read_metrics(config.job_dir) if line.source == "explorer"]
    assert sum(drawn) > 6


def test_a_lake_is_played_as_gymnasium_plays_it(taught, tmp_path, monkeypatch, toy_games):
    """Any text is a move; each rollout's moves give the same reward in gymnasium's own environment."""
    monkeypatch.setattr(FrozenLake, "move", lambda self, text: len(text) % 4)
    args = {"environment_args": {"show_rules": False}, "agent_max_steps": 5, "env_max_steps": 4}
    data = tmp_path / "lakes.jsonl"
    lakes = [{"question": "Go.", "size": 2, "p": 1.0, "seed": seed} for seed in range(6)]
    data.write_text("".join(json.dumps(lake) + "\n" for lake in lakes))
    settings = {"workflow_args": args, "path": str(data), "format": {"prompt_key": "question"}}
    experiences = explored(config_of(taught[0], tmp_path, "frozen_lake_workflow", **settings), taught[1])
    played = gymnasium.make("FrozenLake-v1", desc=["SF", "FG"], is_slippery=False, max_episode_steps=4)
    for one in experiences:
        played.reset(seed=0)
        texts = [turn["content"] for turn in one.info["turns"] if turn["role"] == "assistant"]
        steps = [played.step(len(text) % 4) for text in texts]
        assert one.reward == sum(step[1] for step in steps) and one.metrics["turns"] == len(texts) <= 4
        assert one.metrics["episode_ended"] == (steps[-1][2] or steps[-1][3]) and one.action_mask.any()
    assert len(experiences) == 12


def test_a_teachers_logprobs_reach_the_loss(taught, tiny_folder, tiny_engine, tmp_path):
    """Loss and gradient equal those of float64 models: the mean of -(log teacher - log student) over sampled tokens."""
    config = config_of(
        tiny_folder, tmp_path, "on_policy_distill_math_workflow", algorithm="on_policy_distill", auxiliary=[taught[0]]
    ).with_values({"model.max_model_len": 200})
    rows = explored(config, tiny_engine, taught[1])
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
    rows = explored(config, tiny_engine, taught[1], bytes_teacher[1])
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
    rows = explored(config, tiny_engine)
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
