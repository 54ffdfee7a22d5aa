"""What a model's folder needs beside the weights: its configuration, how it generates, its tokenizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trinity_core.config.schema import ModelConfig
from trinity_core.errors import TrinityError
from trinity_core.files import clear_errors

Description = dict[str, bytes]
"""Path in the model's folder -> content."""


def describe(lm: Any, model: ModelConfig) -> Description:
    """The files that describe `lm`, which was loaded from `model`.

    Raises TrinityError where they cannot be made: at the start, rather than at the first checkpoint.
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
            tokenizer.save_pretrained(folder)
        except (ValueError, TypeError, OSError) as error:
            raise TrinityError(
                f"model.model_path {model.model_path}: its configuration or tokenizer cannot be written to "
                f"checkpoints; mend the model's folder: {error}"
            ) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_description(description: Description, folder: Path) -> None:
    """Put the files into `folder`. Raises TrinityError where the disk is full."""
    with clear_errors("writing", folder):
        for name, content in description.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
