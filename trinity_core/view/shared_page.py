"""A group of rollouts as one HTML file without scripts, for sharing: every token with its log-prob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.view.tokens import PAGE, mean_advantage, token_page

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
    for place, experience in enumerate(experiences):
        advantage = mean_advantage(experience, advantages[place] if advantages else None)
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
