"""The policy's tokenizer, the chat template in use, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity_core.base.errors import InputError
from trinity_core.base.files import expanded, write_json
from trinity_core.config import AuxiliaryModelConfig, ModelConfig
from trinity_core.data.chat import ChatEncoder

GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The `tokenizer_class` for which transformers 4 and 5 read `tokenizer.json` as it is."""
PROBE = " Hello  world!\n\n\tdon't I'LL 12345 x=3.14; 你好 é e\u0301 🙂 "


def load_tokenizer(model_path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or hub name.

    A `tokenizer.json` is complete, and reading it needs neither torch nor the registry of model classes: 2.6 s of one
    core instead of 18 s for `AutoTokenizer` (`python -X importtime`), which also replaces parts of it for some classes.
    `AutoTokenizer` is used for models without that file, and for tokenizers with trusted code of their own. Raises
    InputError for a tokenizer of mistral-common.
    """

    if model_file(model_path, TOKENIZER) and not (trust_remote_code and _has_own_code(model_path)):
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    if type(tokenizer).__name__ == "MistralCommonBackend":
        raise InputError(
            f"the tokenizer of {model_path} is mistral-common's (tekken.json), which takes no chat template; copy "
            "tokenizer.json and its chat template from a conversion of the model",
            key=model_path,
        )
    return tokenizer


def _has_own_code(model_path: str) -> bool:
    path = model_file(model_path, TOKENIZER_CONFIG)
    return path is not None and "auto_map" in json.loads(Path(path).read_text(encoding="utf-8"))


def configured_chat_template(model: ModelConfig) -> str | None:
    """Return the configured chat template that replaces the tokenizer's own; None if there is none."""
    if model.custom_chat_template is None and model.chat_template_path:
        return expanded(model.chat_template_path).read_text(encoding="utf-8")
    return model.custom_chat_template


def policy_encoder(model: ModelConfig) -> ChatEncoder:
    return _encoder(model, configured_chat_template(model))


def auxiliary_encoder(model: AuxiliaryModelConfig) -> ChatEncoder:
    return _encoder(model, None)


def _encoder(model: ModelConfig | AuxiliaryModelConfig, template: str | None) -> ChatEncoder:
    thinking = {} if model.enable_thinking is None else {"enable_thinking": model.enable_thinking}
    tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
    return ChatEncoder(tokenizer, template, thinking, _vocabulary(model.model_path))


def _vocabulary(model_path: str) -> int | None:
    """Return the number of a model's embeddings; None if its config.json does not say."""
    path = model_file(model_path, "config.json")
    config = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else None


def stop_tokens(model_path: str, encoder: ChatEncoder) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's end of sequence, those of the model's
    `generation_config.json` (chat models often have two), and those with which the chat template ends an answer.

    A base model's end of sequence is not its template's: Qwen's are `<|endoftext|>` and `<|im_end|>`.
    """
    path = model_file(model_path, GENERATION)
    listed = _ends_of(json.loads(Path(path).read_text(encoding="utf-8"))) if path else []
    return tuple(sorted({encoder.tokenizer.eos_token_id, *listed, *encoder.turn_ends} - {None}))


def endless_answers(encoder: ChatEncoder) -> str:
    """Return a warning about a chat template that ends answers without a special token; "" for other templates."""
    if encoder.closing.end is not None:
        return ""
    eos = encoder.tokenizer.eos_token
    return (
        "the chat template ends an answer with no special token of the tokenizer, so SFT teaches no end of an answer, "
        f"and engines stop only at the model's own end of sequence ({eos}); to change that, set "
        "model.custom_chat_template to one that does"
    )


def write_stop_tokens(folder: Path, tokenizer: Any) -> None:
    """Add the tokens that end an answer to the `generation_config.json` in a model's folder, for other programs. Writes
    nothing if they are all present, or the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        return
    path = folder / GENERATION
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    listed = _ends_of(settings)
    ends = list(dict.fromkeys([*listed, *stop_tokens(str(folder), ChatEncoder(tokenizer))]))
    if ends != listed:
        write_json(path, settings | {"eos_token_id": ends if len(ends) > 1 else ends[0]})


def write_chat_template(folder: Path, template: str) -> None:
    """Make `template` the only chat template in a model's folder."""
    for path in [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]:
        path.unlink()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = folder / TOKENIZER_CONFIG
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if settings.pop("chat_template", None) is not None:
        write_json(path, settings)


def name_plain_class(folder: Path) -> None:
    """Make other programs, which use `AutoTokenizer`, read the `tokenizer.json` in a model's folder as runs do.

    Transformers 5 builds normaliser, pre-tokenizer and decoder anew for most classes in `tokenizer_config.json`:
    byte-level tokenizers named `LlamaTokenizerFast`, as DeepSeek's, then lose all spaces.
    """
    if not (folder / TOKENIZER).is_file() or _has_own_code(str(folder)):
        return
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokens = ours(PROBE)["input_ids"]
    if tokens != theirs(PROBE)["input_ids"] or ours.decode(tokens) != theirs.decode(tokens):
        path = folder / TOKENIZER_CONFIG
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_json(path, settings | {"tokenizer_class": PLAIN_CLASS})


def _ends_of(settings: dict[str, Any]) -> list[int]:
    ends = settings.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def model_file(model_path: str, name: str) -> str | None:
    """Return the local path of a file of a model's folder or hub name, or None if the file is missing."""
    if Path(model_path).is_dir():
        path = Path(model_path, name)
        return str(path) if path.is_file() else None
    from transformers.utils import cached_file

    try:
        cached: str | None = cached_file(model_path, name)
    except OSError:
        return None
    return cached
