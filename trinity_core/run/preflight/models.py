"""Checks that a run's models exist and are complete, in folders and on the hub, without loading weights."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded
from trinity_core.config import Config, LoraConfig
from trinity_core.config.findings import Finding
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import looks_local
from trinity_core.data.tokenizer import endless_answers
from trinity_core.exchange.checkpoints.adapters import start_fault
from trinity_core.exchange.model_fault import model_fault
from trinity_core.exchange.weights_digest import model_folder
from trinity_core.rollout.inference.tool_parsing import asks_template, parser_of
from trinity_core.run.preflight.model_shape import attention_sizes, shape_of

POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys of config.json for the number of positions; the smallest counts. `model_max_length` overrides them."""
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""RoPE types whose `max_position_embeddings` already includes their factor, as vLLM reads them."""
GATED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families (`model_type`) with a shared expert behind its own gate."""
SHARED_EXPERT = {"gate_proj", "up_proj", "down_proj", "shared_expert_gate"}
"""Matrices of the shared expert. vLLM holds them in one class and never reads the gate's adapter; for Qwen 2 MoE it
also computes the others differently (benchmarks/model_families.py --lora)."""
COMPUTED_OTHERWISE = ("gpt_neox", "gpt_oss")
"""Families (`model_type`) whose log-probs differ between vLLM and transformers, or do after weights were reloaded
(gpt-oss: its experts and sinks keep their old values): benchmarks/model_families.py."""
ANSWER_SECONDS = 2.0
"""Time for the hub to answer whether a name exists."""


def missing_models(config: Config, is_first: bool) -> Iterator[Finding]:
    """Yield the models that a run loads and that are missing or incomplete.

    The policy is skipped unless the stage `is_first`: a later stage begins with the previous one's weights. If an
    endpoint is scored, no model is loaded.
    """
    if config.external_model:
        return
    for key, path, speaks in _named_models(config, is_first):
        if looks_local(path) or Path(path).exists():
            if fault := model_fault(Path(path), speaks):
                yield Finding(key, path, "unavailable", fault)
        elif error := hub_error(key, path, "model"):
            yield error
    yield from unfit_policy(config)
    yield from missing_template(config)


def missing_template(config: Config) -> Iterator[Finding]:
    """Yield a missing chat template file."""
    model, template = config.model, config.model.chat_template_path
    if template and model.custom_chat_template is None and not expanded(template).is_file():
        yield Finding("model.chat_template_path", template, "unavailable", f"there is no file {template}.")


def unfit_policy(config: Config) -> Iterator[Finding]:
    """Yield a policy whose adapter cannot be loaded, or whose log-probs differ between engines and trainer."""
    model = config.model
    if model.lora is not None and (fault := start_fault(model.lora)):
        yield Finding("model.lora_configs[0].path", model.lora.path, "unavailable", fault)
    samples = config.uses_engines or not config.is_supervised
    if samples and (adapter := config.engine_adapter) and (fault := _unapplied(model.model_path, adapter)):
        yield Finding("model.lora_configs[0].target_modules", list(adapter.target_modules), "conflict", fault)
    if samples and config.mode != "bench" and (fault := _computed_otherwise(model.model_path)):
        yield Finding("model.model_path", model.model_path, "conflict", fault)


def missing_folders(config: Config, keys: Container[str]) -> Iterator[Finding]:
    """Yield the models that these keys name as local folders and that are missing or incomplete."""
    for key, path, speaks in [] if config.external_model else _named_models(config, is_first=True):
        if key in keys and looks_local(path) and (fault := model_fault(Path(path), speaks)):
            yield Finding(key, path, "unavailable", fault)


def _named_models(config: Config, is_first: bool) -> list[tuple[str, str, bool]]:
    """Return key and path of each model that a run loads, and whether it needs a tokenizer."""
    model = config.model
    models = [("model.model_path", model.model_path, True)] if is_first else []
    if models and model.critic_model_path != model.model_path and config.needs_critic:
        models.append(("model.critic_model_path", model.critic_model_path, False))
    if config.mode != "train":
        listed = enumerate(config.explorer.auxiliary_models)
        models += [(f"explorer.auxiliary_models[{i}].model_path", model.model_path, True) for i, model in listed]
    return models


def _unapplied(model_path: str, lora: LoraConfig) -> str:
    """Return why engines would sample as if there were no adapter, or ""."""
    if _model_type(model_path) in GATED_EXPERT and (shared := [*filter(lora.adapts, SHARED_EXPERT)]):
        return (
            f"puts an adapter on {min(shared)} of the expert that all tokens share, with which vLLM computes other "
            "log-probs than the trainer: name the others, q_proj, k_proj, v_proj, o_proj."
        )
    shape = shape_of(model_path)
    latent = shape.latent if shape else None
    if shape is None or latent is None or not latent.cached or not lora.adapts("kv_b_proj"):
        return ""
    others = ", ".join(name for name in attention_sizes(shape) if name != "kv_b_proj")
    return (
        "puts an adapter on kv_b_proj, which vLLM merges into other matrices of this model's latent attention when it "
        f"loads the base, and does not apply when it samples: name the others, {others}, gate_proj, up_proj, down_proj."
    )


def _computed_otherwise(model_path: str) -> str:
    """Return why engines would sample from another policy than the trainer's, or ""."""
    if (kind := _model_type(model_path)) not in COMPUTED_OTHERWISE:
        return ""
    return (
        f"is a {kind}, of which vLLM computes other log-probs than transformers, and so the trainer, does: the first "
        "weight check would end the run. Take a model of another family (docs/explorer.md lists those that agree)."
    )


def _model_type(model_path: str) -> str:
    """Return a local model's type; "" if config.json is missing or has none."""
    folder = model_folder(model_path)
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]) if folder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # reported by `model_fault`


def missing_packages(config: Config) -> Iterator[Finding]:
    """Yield packages that a 4-bit base needs beyond the pinned ones: bitsandbytes for the trainer, its vLLM plugin for
    engines."""
    if config.model.lora is None or not config.model.lora.load_in_4bit:
        return
    needed = ["bitsandbytes", "vllm_bnb_plugin"] if config.uses_engines else ["bitsandbytes"]
    if absent := [name for name in needed if find_spec(name) is None]:
        message = f"needs {' and '.join(absent)}: pip install --no-deps -r requirements/qlora.txt, or the extra qlora."
        yield Finding("model.lora_configs[0].load_in_4bit", True, "missing", message)


def doubtful_template(encoder: ChatEncoder | None) -> Iterator[Finding]:
    """Yield a warning about a chat template that ends answers without a special token."""
    if encoder is not None and (doubt := endless_answers(encoder)):
        yield Finding("model", None, "invalid", f"{doubt}.", severity="warning")


def unknown_parser(config: Config, encoder: ChatEncoder | None) -> Iterator[Finding]:
    """Report a tool-call parser to be inferred from a local chat template that implies none."""
    if encoder is None or config.mode == "train" or not asks_template(config):
        return
    try:
        parser_of(encoder)
    except TrinityError as error:
        yield Finding("explorer.rollout_model.tool_call_parser", None, "missing", f"must be given: {error}.")


def too_long_sequences(config: Config) -> Iterator[Finding]:
    """Yield engine models whose sequences may be longer than the model's positions, which vLLM would refuse.

    A reward model leaves longer sequences without a verdict.
    """
    if config.external_model or config.mode == "train":
        return
    model = config.model
    key = "max_model_len" if config.written("model.max_model_len") else "max_response_tokens"
    lengths = [(f"model.{key}", model.model_path, model.max_model_len)]
    for index, extra in enumerate(config.explorer.auxiliary_models):
        lengths.append((f"explorer.auxiliary_models[{index}].max_model_len", extra.model_path, extra.max_model_len))
    for key, path, longest in lengths:
        try:
            described = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
            positions = positions_of(described)
            judges = any(name.endswith("ForSequenceClassification") for name in described.get("architectures") or ())
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # reported by `missing_models`
        if longest and positions and longest > positions and not judges:
            message = (
                f"a sequence may have {longest} tokens (max_model_len, else max_prompt_tokens + max_response_tokens), "
                f"but {path} has {positions} positions (max_position_embeddings in its config.json): lower the limits."
            )
            yield Finding(key, longest, "unavailable", message)


def positions_of(config: dict[str, Any]) -> int | None:
    """Return a model's maximum sequence length in tokens from its config.json; None if unknown.

    Follows vLLM (`_get_and_verify_max_len`). A `rope_scaling` that is not an object is left for vLLM to refuse.
    """
    text = {**config, **(config.get("text_config") or {})}
    lengths = [text[key] for key in POSITIONS if isinstance(text.get(key), int)]
    if not lengths:
        return None
    positions, factor = text.get("model_max_length") or min(lengths), 1.0
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    layers = [rope, *rope.values()] if isinstance(rope, dict) and "gemma3" not in str(text.get("model_type")) else []
    for scaling in layers:
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) not in SCALED_ALREADY:
            factor = scaling.get("factor") or factor
    return int(positions * factor)


def hub_error(key: str, name: str, kind: Literal["model", "dataset"]) -> Finding | None:
    """Return why the hub's model or data set is unavailable; None if it is available or cached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    what = "data set" if kind == "dataset" else "model"
    here = f"there is no folder {name} here either; check the name, or give the path of a local folder."
    if _is_cached(name, kind):
        return None
    try:
        api = HfApi()
        if kind == "model":
            api.model_info(name, timeout=ANSWER_SECONDS)
        else:
            api.dataset_info(name, timeout=ANSWER_SECONDS)
    except GatedRepoError:
        message = f"the hub gives the {what} only to users who accept its terms; set HF_TOKEN."
    except RepositoryNotFoundError:
        message = f"the hub has no {what} of this name that you may read (HF_TOKEN), and {here}"
    except HFValidationError as error:
        message = f"is neither a folder nor a name on the hub: {error}."
    except OfflineModeIsEnabled:
        message = f"the {what} is not in the cache, and HF_HUB_OFFLINE is set; {here}"
    except (HTTPError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        message = f"the {what} is not in the cache, and the hub does not answer ({reason}); {here}"
        return Finding(key, name, "busy", message)
    else:
        return None
    return Finding(key, name, "unavailable", message)


def _is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """True if its files were downloaded. A data set may also be cached in prepared form, in its own folder."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    folders = [folder, prepared / name.replace("/", "___")] if kind == "dataset" else [folder]
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
