"""The policy's tokenizer, the chat template in use, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity_core.config import ModelConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.local_paths import expanded


def load_tokenizer(model_path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name.

    A `tokenizer.json` is complete, and reading it needs neither torch nor the registry of model classes: 2.6 s of one
    core against 18 s for `AutoTokenizer` (`python -X importtime`), which is used for models without that file.
    """
    from transformers.utils import cached_file

    if not trust_remote_code and _has(cached_file, model_path, "tokenizer.json"):
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def configured_chat_template(model: ModelConfig) -> str | None:
    """The chat template that the configuration gives in place of the tokenizer's own; None if it gives none."""
    if model.custom_chat_template is None and model.chat_template_path:
        return expanded(model.chat_template_path).read_text(encoding="utf-8")
    return model.custom_chat_template


def policy_encoder(model: ModelConfig) -> ChatEncoder:
    """The policy's tokenizer with the chat template in use."""
    template = configured_chat_template(model)
    thinking = {} if model.enable_thinking is None else {"enable_thinking": model.enable_thinking}
    return ChatEncoder(load_tokenizer(model.model_path, model.trust_remote_code), template, thinking)


def stop_tokens(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end of sequence, and those that the model's
    `generation_config.json` adds (chat models often have two)."""
    from transformers.utils import cached_file

    found = {tokenizer.eos_token_id}
    if path := _has(cached_file, model_path, "generation_config.json"):
        given = json.loads(Path(path).read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given])
    return tuple(sorted(token for token in found if token is not None))


def model_file(model_path: str, name: str) -> str | None:
    """The local path of a file of a model's folder or hub name, or None if it has no such file."""
    if Path(model_path).is_dir():
        path = Path(model_path, name)
        return str(path) if path.is_file() else None
    from transformers.utils import cached_file

    return _has(cached_file, model_path, name)


def _has(cached_file: Any, model_path: str, name: str) -> str | None:
    """The local path of a file of the model, or None if it has no such file."""
    try:
        return cached_file(model_path, name)
    except OSError:
        return None
