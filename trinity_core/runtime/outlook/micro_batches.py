"""The micro-batches of a train step, planned as the trainer plans them, with every sequence as long as it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinity_core.config import Config, CriticSettings, TrainSettings
from trinity_core.training.batching import LARGEST_MASK, RowUnit, mask_elements, pairs_of, plan, units_of


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Those of one worker in one step."""

    count: int
    tokens: int
    """That the largest one passes through the model; a shared prompt counts once."""
    targets: int
    """Tokens with a loss in the largest one."""
    rows: int
    """Sequences of the largest one."""
    longest: int
    """Tokens of the longest sequence."""
    mask: int
    """Elements of the attention masks of all of them, which the trainer makes before the first."""


def micro_batches(config: Config, settings: TrainSettings | CriticSettings, workers: int) -> MicroBatches:
    """The micro-batches of the worker that has the largest one."""
    prompt, response = config.model.max_prompt_tokens, config.model.max_response_tokens
    rows = config.buffer.train_batch_size
    pairs = config.algorithm.algorithm_type == "dpo"
    repeats = 1 if config.is_supervised else config.algorithm.repeat_times
    budget, largest = settings.max_tokens, LARGEST_MASK
    if not settings.use_dynamic_bsz and settings.micro_batch_size:
        return _of_rows(rows, settings.micro_batch_size, workers, repeats, prompt, response)
    prompts, responses = [prompt] * rows, [response] * rows
    if pairs:
        units = pairs_of(prompts[: rows // 2 * 2], responses[: rows // 2 * 2])
    else:
        units = units_of([row // repeats for row in range(rows)], prompts, responses, budget, largest)
    by_row = {row: unit for unit in units for row in unit.rows}
    share = plan(units, budget, workers, largest)[0]
    made = [_joined(list(dict.fromkeys(by_row[row] for row in micro))) for micro in share if micro]
    costs = [unit.cost(largest) for unit in made]
    top = made[costs.index(max(costs))]
    masks = sum(mask_elements(len(unit.rows), prompt, response) for unit in made if unit.cost(largest) == unit.tokens)
    return MicroBatches(len(made), max(costs), len(top.rows) * response, len(top.rows), prompt + response, masks)


def _joined(units: Sequence[RowUnit]) -> RowUnit:
    first, *others = units
    for other in others:
        first = first.with_(other)
    return first


def _of_rows(rows: int, each: int, workers: int, repeats: int, prompt: int, response: int) -> MicroBatches:
    """Micro-batches of a number of rows; groups stay together where they fit."""
    here = -(-rows // workers)
    top = min(each, here)
    count = -(-here // top)
    prompts = -(-top // repeats)
    tokens, masks = prompts * prompt + top * response, here * mask_elements(1, prompt, response)
    return MicroBatches(count, tokens, top * response, top, prompt + response, masks)
