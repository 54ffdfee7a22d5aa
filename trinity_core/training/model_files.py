"""The files of a Hugging Face folder other than its weights: configuration, generation settings, tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trinity_core.config.schema import ModelConfig
from trinity_core.data.tokenizer import configured_chat_template
from trinity_core.errors import TrinityError
from trinity_core.files import clear_errors, when_room

ModelFiles = dict[str, bytes]
"""Path in the model's folder -> content."""


def make_model_files(lm: Any, model: ModelConfig) -> ModelFiles:
    """The files for a checkpoint of `lm`, which was loaded from `model`. The tokenizer carries the chat template that
    the policy is trained with.

    Made when training starts, so that a model whose files cannot be made is refused then (TrinityError) rather than at
    the first checkpoint.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            lm.config.save_pretrained(folder)
            if lm.generation_config is not None:
                # Unlike save_pretrained, this takes settings that transformers thinks do not go together.
                lm.generation_config.to_json_file(folder / "generation_config.json")
            tokenizer = AutoTokenizer.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
            template = configured_chat_template(model)
            if template is not None:
                tokenizer.chat_template = template
            tokenizer.save_pretrained(folder)
        except (ValueError, TypeError, OSError) as error:
            raise TrinityError(
                f"model.model_path {model.model_path}: its configuration or tokenizer cannot be written to "
                f"checkpoints; repair the model's folder: {error}"
            ) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_model_files(files: ModelFiles, folder: Path) -> None:
    """Put the files into `folder`. Raises TrinityError if the disk is full."""
    with clear_errors("writing", folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            when_room(partial((folder / name).write_bytes, content), folder / name)
