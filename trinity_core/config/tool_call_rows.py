"""The columns that `toolcall_workflow` reads by default: those of Tool-N1's data sets (arXiv 2505.00024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.schema.buffer import FormatConfig

CALLS = {"tools_key": "tools", "response_key": "answer"}
CONVERSATION = {"prompt_type": "messages", "messages_key": "conversations", "system_prompt_key": "raw_system"}
PROMPT = {"prompt_type", "prompt_key", "messages_key"}
"""Keys of which any says where the prompt is."""


def tool_call_rows(form: FormatConfig, workflow: str, workflow_args: Mapping[str, Any]) -> FormatConfig:
    """The format of a task set, with these columns for what a task set of that workflow leaves out.

    With `workflow_args.tools` the workflow takes any rows.
    """
    if workflow != "toolcall_workflow" or workflow_args.get("tools"):
        return form
    given = form.model_fields_set
    defaults = CALLS if PROMPT & given else {**CALLS, **CONVERSATION}
    return form.model_copy(update={key: value for key, value in defaults.items() if key not in given})
