"""A rollout token by token: text, log-prob, mask, policy version and advantage; in pages, or as one file to share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from trinity_core.data.experience import Experience

PAGE = 2_000
LONGEST_CHARACTER = 4
"""Bytes of a character, so its maximum number of tokens."""


def token_texts(tokenizer: Any, ids: Sequence[int], before: int | None = None) -> list[str]:
    """Return the text that each token adds after the previous one, including special tokens.

    A character's bytes may be spread over several tokens: the first gets its text, the others none. Without a tokenizer
    the texts are the ids.
    """
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    vocabulary_size = len(tokenizer)
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        if not 0 <= ids[at] < vocabulary_size:
            texts.append(f"⟨{ids[at]}⟩")
            before = None
            continue
        text, used = "", 1
        for used in range(1, LONGEST_CHARACTER + 1):
            text = _added(tokenizer, before, [token for token in ids[at : at + used] if 0 <= token < vocabulary_size])
            if "\ufffd" not in text:
                break
        else:
            text, used = _added(tokenizer, before, [ids[at]]), 1
        used = min(used, len(ids) - at)
        texts += [text, *[""] * (used - 1)]
        before = ids[at + used - 1]
    return texts


def _added(tokenizer: Any, before: int | None, ids: list[int]) -> str:
    if before is None:
        return _decoded(tokenizer, ids)
    alone, both = _decoded(tokenizer, [before]), _decoded(tokenizer, [before, *ids])
    return both[len(alone) :] if both.startswith(alone) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_page(
    experience: Experience, tokenizer: Any, advantages: np.ndarray | None, offset: int = 0, limit: int = PAGE
) -> dict[str, Any]:
    """Return tokens from `offset` on as columns; missing values are null.

    `kind` is `p` for the prompt, `a` for an action (in the loss), `c` for context within the response (masked out).
    """
    start = min(max(0, offset), len(experience.tokens))
    end = min(len(experience.tokens), start + max(1, min(limit, PAGE)))
    ids = experience.tokens[start:end].tolist()
    response = slice(max(0, start - experience.prompt_length), max(0, end - experience.prompt_length))
    mask = experience.action_mask[response]
    nothing = [None] * (len(ids) - len(mask))

    def column(values: np.ndarray | None, digits: int = 5) -> list[Any]:
        if values is None:
            return [None] * len(ids)
        numbers = [_number(value, digits) for value in values[response].tolist()]
        return nothing + [number if is_sampled else None for number, is_sampled in zip(numbers, mask, strict=True)]

    before = int(experience.tokens[start - 1]) if start else None
    return {
        "offset": start, "total": len(experience.tokens), "prompt_length": experience.prompt_length, "ids": ids,
        "text": token_texts(tokenizer, ids, before),
        "kind": "p" * len(nothing) + "".join("a" if is_sampled else "c" for is_sampled in mask),
        "logprob": column(experience.logprobs), "version": column(experience.versions),
        "reward": column(experience.token_rewards), "teacher": column(experience.teacher_logprobs),
        "advantage": column(advantages),
    }  # fmt: skip


def mean_advantage(experience: Experience, advantages: np.ndarray | None) -> float | None:
    """Return the mean of its advantages, float32 [T], over the tokens in the loss; 0 without such tokens, None without
    advantages."""
    if advantages is None:
        return None
    in_loss = advantages[experience.action_mask]
    return float(in_loss.mean()) if len(in_loss) else 0.0


def _number(value: float, digits: int) -> float | None:
    return round(value, digits) if np.isfinite(value) else None


DARKEST = 5.0
"""Negated log-prob from which the colour is saturated."""
LEGEND = "Orange: tokens that the policy found unlikely. Faint: the prompt. Point at a token for its log-prob."
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, monospace; border: 1px solid #8886;
  border-radius: 8px; padding: .7rem; unicode-bidi: isolate }
.p { opacity: .6 } .c { background: #8883 } h2 { font-size: 1rem; margin-bottom: .2rem } p { margin: .2rem 0 }
"""


def shared_page(
    run: str, row: Mapping[str, Any], experiences: Sequence[Experience], advantages: Sequence[np.ndarray] | None,
    tokenizer: Any,
) -> str:  # fmt: skip
    """Return the HTML of a group; `row` as in `groups.group_row`."""
    title = f"{run}, {row['task'] or row['group']}, step {row['step']}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if truth := str(experiences[0].info.get("truth", "")) if experiences else "":
        parts.append(f"<p>Reference answer</p><pre>{escape(truth)}</pre>")
    parts.append(f"<p>{LEGEND}</p>")
    for index, experience in enumerate(experiences):
        advantage = mean_advantage(experience, advantages[index] if advantages else None)
        mean = "" if advantage is None else f", advantage {advantage:.3f}"
        total = experience.total_reward
        reward = "no reward" if total is None else f"reward {total:.3g}"
        parts.append(f"<h2>Rollout {experience.run}: {reward}{mean}</h2>")
        parts.append(f"<pre>{''.join(_tokens(experience, tokenizer))}</pre>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _tokens(experience: Experience, tokenizer: Any) -> Iterator[str]:
    for offset in range(0, len(experience.tokens), PAGE):
        page = token_page(experience, tokenizer, None, offset)
        for kind, text, logprob in zip(page["kind"], page["text"], page["logprob"], strict=True):
            if logprob is None:
                yield f'<span class="{kind}">{escape(text)}</span>'
            else:
                shade = min(1.0, -logprob / DARKEST) * 0.75
                yield (
                    f'<span title="log-prob {logprob:.4f}" style="background:rgb(226 110 30 / {shade:.2f})">'
                    f"{escape(text)}</span>"
                )
