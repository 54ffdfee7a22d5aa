"""The task sets of a run, from files, databases and queues."""

from __future__ import annotations

from trinity_core.config.schema import Config
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.queue_taskset import QueueTaskset
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.taskset import PromptCheck, Taskset


def open_tasksets(
    config: Config, encoder: ChatEncoder | None, rejected_rows: RejectedRows | None = None, is_eval: bool = False
) -> list[Taskset]:
    """The task sets of a run, for training or for evaluation. Without an encoder (an external model) prompts are not
    rendered. Raises DataError as `Taskset.open` does."""
    given, model = config.buffer.explorer_input, config.model
    longest = None if model.enable_prompt_truncation else model.max_prompt_tokens
    prompts = PromptCheck(encoder, longest) if encoder else None
    sets = given.eval_tasksets if is_eval else given.tasksets
    return [
        QueueTaskset.of(config, one, prompts)
        if one.storage_type == "queue"
        else Taskset.open(one, config.seed, is_eval, prompts, rejected_rows)
        for one in sets
    ]
