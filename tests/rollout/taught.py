"""A small model that has memorised two answers to a problem, and what a judge says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trinity_core.workflows.rewards.judge import POINTWISE, USUAL_CRITERIA

QUESTION = "Olga has 5 books and drops 4. How many books does Olga have now?"
RIGHT, WRONG = "#### 1", "no idea"
ROW = {"question": QUESTION, "answer": RIGHT}
STEPS = 45


def rated(answer: str) -> list[dict[str, str]]:
    """The judge's prompt about an answer."""
    shown = (
        f"<prompt>\n[user] {QUESTION}\n</prompt>\n\n<criteria>\n{USUAL_CRITERIA}\n</criteria>\n\n"
        f"<response>\n{answer}\n</response>"
    )
    return [{"role": "system", "content": POINTWISE}, {"role": "user", "content": shown}]


LESSONS: list[tuple[list[dict[str, str]], str]] = [
    (rated(RIGHT), '{"rating": 10}'),
    (rated(WRONG), '{"rating": 1}'),
    ([{"role": "user", "content": QUESTION}], RIGHT),
    ([{"role": "user", "content": QUESTION}], WRONG),
]


def teach(source: Path, folder: Path) -> None:
    """Train the model of `source` on the lessons until it has memorised them, and save it in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = []
    for asked, answer in LESSONS:
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens, labels = torch.zeros((len(rows), width), dtype=torch.long), torch.full((len(rows), width), -100)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
