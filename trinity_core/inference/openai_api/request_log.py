"""`enable_log_requests`: a line in the explorer's log for each request, with the prompt as the model gets it."""

from __future__ import annotations

import copy
import logging
from typing import Any

from vllm.entrypoints.serve.utils.request_logger import RequestLogger

log = logging.getLogger(__name__)

MOST_CHARACTERS = 2000
"""Of a prompt; its end is what tells requests apart."""


class RequestLog(RequestLogger):
    """vLLM's own writes to vLLM's log, which shows warnings alone here."""

    def __init__(self, tokenizer: Any) -> None:
        self.max_log_len = MOST_CHARACTERS
        self._tokenizer = copy.deepcopy(tokenizer)  # the other one is used in other threads

    def log_inputs(  # see RequestLogger
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int] | None, prompt_embeds: Any, params: Any,
        lora_request: Any,
    ) -> None:  # fmt: skip
        """Write the line."""
        tokens = prompt_token_ids or []
        text = prompt if prompt is not None else self._tokenizer.decode(tokens)
        shown = text if len(text) <= MOST_CHARACTERS else f"…{text[-MOST_CHARACTERS:]}"
        log.info("request %s: %d tokens, %r, %s", request_id, len(tokens), shown, params)
