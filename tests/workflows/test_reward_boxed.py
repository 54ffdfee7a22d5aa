from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising
from rollout.fakes import FakeEngine
from workflow_helpers import ScriptedModel, make_task, run

from trinity_core.base.errors import DataError
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.pipelines.shaping import pass_rate_calculator
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.rollout.metrics import eval_numbers, scores_of
from trinity_core.rollout.runner import Outcome
from trinity_core.workflows import Reward, RewardItem, RewardPool, run_workflow
from trinity_core.workflows.rewards.boxed import boxed_fast, math_boxed_reward, math_dapo_reward

SOLUTIONS = [  # MATH (Hendrycks et al. 2021): answers as they stand in its solutions, and the same said otherwise
    ("\\boxed{\\frac{243}{625}}", "\\frac{243}{625}", True),
    ("\\boxed{0.3888}", "\\frac{243}{625}", True),
    ("\\boxed{x \\in [-2,7]}", "x \\in [-2,7]", True),
    ("\\boxed{[-2,7]}", "[-2,7]", True),
    ("\\boxed{(-2,7)}", "[-2,7]", False),
    ("\\boxed{\\sqrt{2}/2}", "\\frac{\\sqrt{2}}{2}", True),
    ("\\boxed{11\\sqrt2}", "11\\sqrt{2}", True),
    ("\\boxed{2}, or rather \\boxed{3}", "2", False),
    ("\\boxed 5", "5", True),
    ("\\boxed {5}", "5", True),
    ("\\boxed{4} or \\boxed 5", "5", True),
    ("\\boxed{5} it is, as \\boxed shows", "5", True),
    ("\\boxed5", "5", False),
    ("$\\fbox{5}$", "5", True),
    ("The answer is 5", "5", False),
    ("#### 5", "5", False),
    ("\\boxed{5", "5", False),
]
ANSWERS = [  # DAPO-Math-17k asks for a last line "Answer: $Answer"
    ("so\nAnswer: 34", "34", True),
    ("Answer: $34$", "34", True),
    ("**Answer: 34**", "34", True),
    ("answer : 35\nAnswer: 34", "34", True),
    ("Answer: 34\nno, \\boxed{35}", "34", False),
    ("\\boxed{35}\nAnswer: 34", "34", True),
    ("Answer: $\\frac{1}{2}$.", "\\frac{1}{2}", True),
    ("**Answer**: 42", "42", True),
    ("**Answer:** 42.", "42", True),
    ("__Answer__: $42$", "42", True),
    ("Answer：42", "42", True),
    ("Answer: **42**", "42", True),
    ("Answer: $(1, 2)$.", "(1,2)", True),
    ("Answer:\n34", "34", True),
    ("**Answer:**\n\n$34$\n", "34", True),
    ("Answer:\n\\[\n\\frac{1}{2}\n\\]", "\\frac{1}{2}", True),
    ("Answer: 35\nAnswer:\n\\(34\\)", "34", True),
    ("Answer: 35\n34", "34", False),
    ("Answer:\n34 or 35", "34", False),
    ("34\nAnswer:\n", "34", False),
    ("Answer: 42 or 43", "42", False),
    ("34", "34", False),
    ("Answer:", "34", False),
]


def boxed(response, truth, **args):
    return math_boxed_reward(prompt="", response=response, truth=truth, task={}, **args)


def dapo(response, truth, **args):
    return math_dapo_reward(prompt="", response=response, truth=truth, task={}, **args)


@pytest.mark.parametrize("response, truth, right", SOLUTIONS)
def test_boxed_answers_of_the_math_data_set(response, truth, right):
    pytest.importorskip("math_verify")
    assert boxed(response, truth) == boxed(response, f"So it is $\\boxed{{{truth}}}$.") == {"accuracy": float(right)}


@pytest.mark.parametrize("response, truth, right", ANSWERS)
def test_answer_lines_of_the_dapo_data_set(response, truth, right):
    pytest.importorskip("math_verify")
    assert dapo(response, truth) == {"accuracy": float(right)}
    expected = {"accuracy": 1.0, "wrong_score": 0.0} if right else {"accuracy": 0.0, "wrong_score": -1.0}
    assert dapo(response, truth, wrong_score=-1.0) == expected


@given(text=st.text("\\boxed{} 0123456789-+$", max_size=24), truth=st.sampled_from(["5", "\\boxed{-12}", "#### 3"]))
@settings(max_examples=40)
def test_the_fast_path_agrees_with_the_boxed_verifier(text, truth):
    pytest.importorskip("math_verify")
    fast = boxed_fast(response=text, truth=truth)
    if fast is not None:
        assert fast == boxed(text, truth)


@pytest.mark.parametrize(
    "response, score",
    [
        ("<think>two</think>\\boxed{2}", 0.0),
        ("\\boxed{2}", -0.2),
        ("</think><think>\\boxed{2}", -0.2),
        ("<think><think>a</think>\\boxed{2}", -0.2),
        ("<think>a</think></think>\\boxed{2}", -0.2),
    ],
)
def test_a_missing_thought_costs_its_coefficient(response, score):
    assert boxed_fast(response=response, truth="2", with_think=True, format_score_coef=0.2) == {
        "accuracy": 1.0,
        "format": score,
    }


@pytest.mark.parametrize(
    "end, opened", [("<think>\n", True), ("<think>", True), ("", False), ("<think>\n\n</think>\n", False)]
)
@pytest.mark.parametrize(
    "workflow, text, rewards",
    [
        ("math_boxed_workflow", "1+1</think>\\boxed{2}", (0.9, 1.0)),
        ("math_workflow", "1+1</think> <answer>2</answer>", (0.9, 1.1)),
    ],
)
async def test_a_thought_that_the_prompt_opens_counts(tiny_folder, end, opened, workflow, text, rewards):
    """Templates of R1, QwQ and Qwen3-Thinking end the prompt with `<think>`, so that no answer contains it."""

    tokenizer = load_tokenizer(str(tiny_folder), False)
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ " + repr(end) + " }}{% endif %}"
    answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    pool = EnginePool([FakeEngine(answer=answer)], "model")
    await pool.start()
    model = EngineModel(pool, ChatEncoder(tokenizer), Limits(900, 800, 64, Sampling(64), True))
    task = make_task(workflow, repeat_times=1, workflow_args={"with_think": True})
    [row] = await run_workflow(task, model, rewards=RewardPool())
    assert row.info["response"] == text
    assert row.reward == pytest.approx(rewards[opened])


def test_overlong_answers_lose_what_dapo_takes():
    pytest.importorskip("math_verify")
    arguments = {"max_response_length": 100, "cache_length": 20, "penalty_factor": 0.5, "enable_overlong_penalty": True}
    items = [RewardItem("Answer: 5", "5", args=arguments, response_tokens=tokens) for tokens in (0, 80, 90, 100, 500)]
    with closing(RewardPool(1)) as pool:
        rewards = pool.score_sync("math_dapo_reward", items)
        assert [reward.metrics["format"] for reward in rewards] == pytest.approx([0.0, 0.0, -0.25, -0.5, -0.5])
        with raising(DataError, key="response_tokens"):
            pool.score_sync("math_dapo_reward", [RewardItem("Answer: 5", "5", args=arguments)])


def test_the_boxed_workflow_asks_for_a_box():
    model = ScriptedModel("\\boxed{2}", "#### 2", "\\boxed{3}")
    rows = run(make_task("math_boxed_workflow"), model)
    messages, _, _, named = model.asked[0]
    assert [message["role"] for message in messages] == ["system", "user"] and "\\boxed" in messages[0]["content"]
    assert named["chat_template"] is None and [row.reward for row in rows] == [1, 0, 0]


@pytest.mark.parametrize("writes_bos", [False, True])
def test_a_base_model_is_asked_in_plain_text(tiny_folder, writes_bos):
    """Text as its own tokenizer writes it: after a BOS token if it adds one."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.bos_token = "<|im_start|>"
    if writes_bos:
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    model = ScriptedModel("<think>1</think>\\boxed{2}", "\\boxed{2}", "\\boxed{3}")
    task = make_task("math_boxed_workflow", workflow_args={"use_base": True, "with_think": True})
    rows = run(task, model)
    messages, _, _, named = model.asked[0]
    prompt = ChatEncoder(tokenizer, named["chat_template"]).prompt(messages, None, None).tokens
    system, user = (message["content"] for message in messages)
    assert prompt == tokenizer(f"System:{system}\nUser:\n{user}\nAssistant:\n")["input_ids"]
    assert (prompt[0] == tokenizer.bos_token_id) == writes_bos and "<think>" in system
    assert [row.reward for row in rows] == pytest.approx([1, 0.9, -0.1])


def test_a_wrong_score_leaves_pass_rates_alone():
    """Two of four right, with DAPO's scores of 1 and -1: the mean reward is 0, the pass rate one half."""
    scored = [dapo(f"Answer: {answer}", "34", wrong_score=-1.0) for answer in (34, 34, 35, 36)]
    rewards = [Reward(parts) for parts in scored]
    assert [reward.value for reward in rewards] == [1.0, 1.0, -1.0, -1.0]
    tokens = np.arange(3)
    rows = [
        Experience(tokens, 1, np.ones(2, bool), reward=reward.value, metrics=reward.metrics, group="g", run=run)
        for run, reward in enumerate(rewards)
    ]
    outcome = Outcome(Task(0, {}, "set", "w", 4), rows)
    numbers = eval_numbers("set", [outcome])
    assert (numbers["eval/set/accuracy"], numbers["eval/set/reward"]) == (0.5, 0.0)
    assert numbers["eval/set/pass@2"] == pytest.approx(1 - 1 / 6)
    assert sum(scores_of(outcome)) / 4 == 0.5
    assert {row.metrics["pass_rate"] for row in pass_rate_calculator(rows)} == {0.5}
