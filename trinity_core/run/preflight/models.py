"""Checks that a run's models exist and are complete, in folders and on the hub, without loading weights."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trinity_core.base.files import expanded
from trinity_core.config import Config
from trinity_core.config.findings import Finding, Report
from trinity_core.data.files import looks_local
from trinity_core.exchange.checkpoints.adapters import start_fault
from trinity_core.exchange.model_fault import model_fault, quantization_fault
from trinity_core.rollout.inference.reward_engine import ON_ONE_GPU, has_reward_head
from trinity_core.run.preflight.model_shape import configuration_of, shape_of

GATED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families (`model_type`) with a shared expert behind its own gate."""
SHARED_EXPERT = frozenset({"gate_proj", "up_proj", "down_proj", "shared_expert_gate"})
"""Matrices of the shared expert. vLLM holds them in one class and never reads the gate's adapter; for Qwen 2 MoE it
also computes the others differently (benchmarks/model_families.py --lora)."""
LATENT = frozenset({"kv_b_proj"})
"""The matrix of latent attention that vLLM merges into others when it loads the base: its adapter is not applied."""
COMPUTED_OTHERWISE = ("gpt_neox", "gpt_oss")
"""Families (`model_type`) whose log-probs differ between vLLM and transformers, or do after weights were reloaded
(gpt-oss: its experts and sinks keep their old values): benchmarks/model_families.py."""
PERCEIVING = frozenset({"vision_config", "audio_config"})
"""Sections of a config.json whose model reads more than text."""
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
        yield from _missing(key, path, speaks)
    yield from unfit_policy(config)
    yield from spread_reward_models(config)
    yield from missing_template(config)


def report_missing_policy(config: Config, report: Report) -> None:
    """Report a policy that is not there, and thus has no tokenizer; its weights are not looked at."""
    if not Path(config.model.model_path).exists():
        for finding in _missing("model.model_path", config.model.model_path, speaks=True):
            report.add(finding)


def report_missing_folder(config: Config, report: Report) -> None:
    """Report a run's starting model that is a local folder and cannot be loaded; nothing if it joins a Ray cluster."""
    if report.stage in (None, "stages[0]") and not config.cluster.ray_address:
        for finding in missing_folders(config, {"model.model_path"}):
            report.add(finding)


def _missing(key: str, path: str, speaks: bool) -> Iterator[Finding]:
    """Yield why a local folder, or name of the hub, holds no model (with a tokenizer if it `speaks`)."""
    if looks_local(path) or Path(path).exists():
        if fault := model_fault(Path(path), speaks):
            yield Finding(key, path, "unavailable", fault)
    elif error := hub_error(key, path, "model"):
        yield error


def missing_template(config: Config) -> Iterator[Finding]:
    """Yield a missing chat template file."""
    model, template = config.model, config.model.chat_template_path
    if template and model.custom_chat_template is None and not expanded(template).is_file():
        yield Finding("model.chat_template_path", template, "unavailable", f"there is no file {template}.")


def unfit_policy(config: Config) -> Iterator[Finding]:
    """Yield a policy whose adapter cannot be loaded, or whose log-probs differ between engines and trainer, and
    quantized models to train."""
    model = config.model
    yield from _quantized(config)
    if model.lora is not None and (fault := start_fault(model.lora)):
        yield Finding("model.lora_configs[0].path", model.lora.path, "unavailable", fault)
    if config.is_supervised and not config.uses_engines:
        return
    model_config, shape = configuration_of(model.model_path), shape_of(model.model_path)
    kind = model_config.get("model_type")
    if adapter := config.engine_adapter:
        unapplied = SHARED_EXPERT if kind in GATED_EXPERT else frozenset()
        unapplied |= LATENT if shape is not None and shape.latent else frozenset()
        if wrong := [*filter(adapter.adapts, unapplied)]:
            message = (
                f"puts an adapter on {min(wrong)}, with which vLLM computes other log-probs than the trainer for this "
                "model: name the other matrices, such as q_proj, k_proj, v_proj, o_proj."
            )
            yield Finding("model.lora_configs[0].target_modules", list(adapter.target_modules), "conflict", message)
    if config.mode != "bench" and kind in COMPUTED_OTHERWISE:
        message = (
            f"is a {kind}, of which vLLM computes other log-probs than transformers, and so the trainer, does: the "
            "first weight check would end the run. Take another family (docs/explorer.md lists those that agree)."
        )
        yield Finding("model.model_path", model.model_path, "conflict", message)
    if config.mode != "bench" and model_config.keys() & PERCEIVING:
        message = (
            "also reads images or sound, and its weights have other names in vLLM than in the trainer: give its "
            "language model alone (docs/explorer.md, model families, says how to save it)."
        )
        yield Finding("model.model_path", model.model_path, "conflict", message)


def spread_reward_models(config: Config) -> Iterator[Finding]:
    """Yield reward models that ask for several GPUs each. Those on the hub are known by the cache."""
    for index, model in enumerate(config.explorer.auxiliary_models if config.uses_engines else ()):
        size = model.tensor_parallel_size
        if size > 1 and has_reward_head(configuration_of(model.model_path)):
            yield Finding(
                f"explorer.auxiliary_models[{index}].tensor_parallel_size", size, "conflict", f"{ON_ONE_GPU}."
            )


def _quantized(config: Config) -> Iterator[Finding]:
    """Yield the policy and the critic to train if their weights are quantized. Hub names are known by the cache, and
    the trainer looks again."""
    model, lora = config.model, config.model.lora
    trained = {model.model_path: "model.model_path"} if config.mode in ("both", "train") else {}
    if trained and config.needs_critic:
        trained.setdefault(model.critic_model_path, "model.critic_model_path")
    for path, key in trained.items():
        four_bits = key == "model.model_path" and lora is not None and lora.load_in_4bit
        if fault := quantization_fault(configuration_of(path), four_bits):
            yield Finding(key, path, "conflict", fault)


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


def missing_packages(config: Config) -> Iterator[Finding]:
    """Yield packages that a 4-bit base needs beyond the pinned ones: bitsandbytes for the trainer, its vLLM plugin for
    engines."""
    if config.model.lora is None or not config.model.lora.load_in_4bit:
        return
    needed = ["bitsandbytes", "vllm_bnb_plugin"] if config.uses_engines else ["bitsandbytes"]
    if absent := [name for name in needed if find_spec(name) is None]:
        message = f"needs {' and '.join(absent)}: pip install --no-deps -r requirements/qlora.txt, or the extra qlora."
        yield Finding("model.lora_configs[0].load_in_4bit", True, "missing", message)


def hub_error(key: str, name: str, kind: Literal["model", "dataset"]) -> Finding | None:
    """Return why the hub's model or data set is unavailable, in the hub's words; None if it is there or cached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if _is_cached(name, kind):
        return None
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=ANSWER_SECONDS)
    except (HFValidationError, HTTPError, OSError) as error:
        certain = GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
        reason = "; ".join(filter(None, (str(error) or type(error).__name__).splitlines()))[:300]
        message = f"there is no folder {name}, and it is not in the hub's cache; the hub's client says: {reason}"
        return Finding(key, name, "unavailable" if isinstance(error, certain) else "busy", message)
    return None


def _is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """True if its files were downloaded. A data set may also be cached in prepared form, in its own folder."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    folders = [folder, prepared / name.replace("/", "___")] if kind == "dataset" else [folder]
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
