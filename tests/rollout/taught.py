"""A small model that has memorised the answers of a solver to a few problems, and of a judge to two answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_core.workflows.builtin import BOX_PROMPT
from trinity_core.workflows.rewards.judge import GROUP, PAIRWISE, POINTWISE, USUAL_CRITERIA

QUESTION = "Olga has 5 books and drops 4. How many books does Olga have now?"
RIGHT, WRONG = "#### 1", "no idea"
ROW = {"question": QUESTION, "answer": RIGHT}
STEPS = 45
ASKED = {"role": "user", "content": QUESTION}
FEEDBACK = "Again."
RETRY = [ASKED, {"role": "assistant", "content": WRONG}, {"role": "user", "content": FEEDBACK}]
TOOL = {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
KNOWN = {
    "Make 3 of 1 and 2.": "<answer>1+2</answer>",
    "Write one.": "```py\nprint(1)\n```",
    "What is 4 + 3?": "7",
}


def judged(system: str, *shown: str) -> list[dict[str, str]]:
    """The judge's prompts about the answers that it is shown."""
    question = f"<prompt>\n[user] {QUESTION}\n</prompt>\n\n<criteria>\n{USUAL_CRITERIA}\n</criteria>"
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join([question, *shown])}]


def rated(answer: str) -> list[dict[str, str]]:
    return judged(POINTWISE, f"<response>\n{answer}\n</response>")


def compared(a: str, b: str) -> list[dict[str, str]]:
    return judged(PAIRWISE, f"<response_a>\n{a}\n</response_a>", f"<response_b>\n{b}\n</response_b>")


def grouped(*answers: str) -> list[dict[str, str]]:
    return judged(GROUP, *(f'<response number="{i + 1}">\n{one}\n</response>' for i, one in enumerate(answers)))


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


LESSONS: list[tuple[Sequence[dict[str, str]], str]] = [
    (rated(RIGHT), '{"rating": 10}'),
    (rated(WRONG), '{"rating": 1}'),
    (compared(RIGHT, WRONG), '{"better": "A"}'),
    (compared(WRONG, RIGHT), '{"better": "B"}'),
    (grouped(RIGHT, WRONG), '{"scores": [0.75, 0]}'),
    (grouped(WRONG, RIGHT), '{"scores": [0, 0.75]}'),
    ([ASKED], RIGHT),
    ([ASKED], WRONG),
    (RETRY, RIGHT),
    ([{"role": "system", "content": BOX_PROMPT}, ASKED], "\\boxed{1}"),
    (asks("What time is it?"), CALL),
    *((asks(question), answer) for question, answer in KNOWN.items()),
]


def teach(source: Path, folder: Path) -> None:
    """Train the model of `source` on the lessons until it has memorised them, and save it in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = []
    for asked, answer in LESSONS:
        tools = [TOOL] if answer == CALL else None
        prompt = tokenizer.apply_chat_template(list(asked), tools=tools, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]))
    batches = [padded([row for row in rows if (len(row[0]) > 200) == long]) for long in (True, False)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for tokens, labels in batches:
            model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, Any]:
    """Prompts and answers as tokens [B, T], and as labels [B, T] of the answers alone."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels
