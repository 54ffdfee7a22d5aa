"""Rules of `explorer`: auxiliary models, the external model and its key, and the OpenAI API.

The parsers of vLLM 0.32 are listed so that checking a configuration needs no vLLM; a test compares them with vLLM's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from trinity_core.base.errors import TrinityError, closest
from trinity_core.config.engine_args import faults, is_lossy
from trinity_core.config.findings import Finding, conflict, repeated_names, unusable_name
from trinity_core.config.schema import Config

EXTERNAL = "explorer.external_model"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOOL_CALL_PARSERS = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
    "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite",
    "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba",
    "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
    "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer", "olmo3", "openai", "phi4_mini_json",
    "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5",
    "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45",
    "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser", "hf", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4",
    "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "ling3", "mimo", "minicpmv", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss",
    "plamo3", "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
)  # fmt: skip


def auxiliary_rules(config: Config) -> Iterator[Finding]:
    models = {f"explorer.auxiliary_models[{i}]": model for i, model in enumerate(config.explorer.auxiliary_models)}
    for key, model in models.items():
        if not model.model_path:
            message = "must be given: a Hugging Face folder or hub name."
            yield conflict(config, f"{key}.model_path", message, code="missing")
    names = ((f"{key}.name", model.name) for key, model in models.items() if model.name)
    yield from repeated_names("auxiliary models", names)
    if wrong := unusable_name(config.explorer.name):
        yield conflict(config, "explorer.name", wrong, code="invalid")


def engine_argument_rules(config: Config) -> Iterator[Finding]:
    """Yield unsafe arguments of vLLM, and lossy engines without a rollout correction."""
    per_node = "cluster.gpu_per_node"
    for key, model in config.explorer.models.items():
        args = model.extra_engine_args
        for name, code, message, meant in faults(args, type(model).model_fields, config.cluster.gpu_per_node == 0):
            where = f"{key}.extra_engine_args.{name}"
            yield Finding(where, args[name], code, message, (per_node,) if "GPU" in message else (), meant)
    args, lora = config.explorer.rollout_model.extra_engine_args, config.model.lora
    if lora is not None and lora.load_in_4bit and "quantization" in args:
        message = "cannot go with load_in_4bit, where the engine's weights have 4 bits already."
        yield conflict(config, "explorer.rollout_model.extra_engine_args.quantization", message, "model.lora_configs")
    if is_lossy(args) and config.algorithm.rollout_correction == "none":
        message = "leaves the gap uncorrected that fp8 rollouts have (extra_engine_args): set tis_token or another one."
        yield conflict(config, "algorithm.rollout_correction", message, "algorithm.algorithm_type")


def evaluation_rules(config: Config) -> Iterator[Finding]:
    """An evaluation beside training scores checkpoints, of a run on one node."""
    explorer, saves = config.explorer, config.trainer.save_interval
    if not explorer.eval_beside_training or config.mode == "bench":
        return
    key, interval = "explorer.eval_beside_training", "explorer.eval_interval"
    if config.mode not in ("both", "train"):
        yield conflict(config, key, f"is for runs that train, not for mode {config.mode}.", "mode")
    if not config.buffer.explorer_input.eval_tasksets:
        yield conflict(config, key, "needs buffer.explorer_input.eval_tasksets.", "buffer.explorer_input.eval_tasksets")
    if explorer.eval_interval and (not saves or explorer.eval_interval % saves):
        message = f"scores checkpoints: make {interval} ({explorer.eval_interval}) a multiple of trainer.save_interval"
        yield conflict(config, key, f"{message} ({saves}).", interval, "trainer.save_interval")
    if config.cluster.node_num > 1:
        message = "is for one node: use `trinity evaluate --which missing` beside the run."
        yield conflict(config, key, message, "cluster.node_num")


def external_rules(config: Config) -> Iterator[Finding]:
    """Check the address, the model's name, and that a variable's name is given instead of a key. Values may be secrets,
    so none is repeated."""
    external = config.explorer.external_model
    if external is None:
        return
    if wrong := _no_address(external.base_url):
        yield Finding(f"{EXTERNAL}.base_url", None, "invalid", wrong)
    if not external.model_name:
        yield Finding(f"{EXTERNAL}.model_name", None, "missing", "must be given: the model's name at the endpoint.")
    if external.api_key_env is not None and not _VARIABLE.fullmatch(external.api_key_env):
        message = "must be the name of an environment variable, such as OPENAI_API_KEY, and not the key itself."
        yield Finding(f"{EXTERNAL}.api_key_env", None, "invalid", message)
    for index, model in enumerate(config.explorer.auxiliary_models if config.external_model else ()):
        if model.max_model_len is None:
            message = "must be given, as model.max_model_len is not, which an endpoint does not need."
            yield conflict(config, f"explorer.auxiliary_models[{index}].max_model_len", message, code="missing")


def key_of_endpoint(config: Config) -> str:
    """Return the external model's key, "" if it needs none. Raises TrinityError if its variable is not set."""
    external = config.explorer.external_model
    return key_in(config, external.api_key_env if external else None, f"{EXTERNAL}.api_key_env")


def key_in(config: Config, name: str | None, where: str) -> str:
    """Return the key in the variable `name`, which the setting `where` gives; "" without a name. Raises TrinityError if
    the variable is not set."""
    if not name:
        return ""
    key = config.explorer.env_vars.get(name) or os.environ.get(name, "")
    if not key.strip():
        raise TrinityError(f"The environment variable {name}, which {where} names, is not set.", key=name)
    return key.strip()


def is_http(url: str) -> bool:
    """True if a text is the URL of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _no_address(url: str) -> str:
    """Return why a URL is not the address of an API, or "". The URL is not shown, because it may contain a password."""
    if not is_http(url):
        return "must be the address of an OpenAI-compatible API, such as https://api.openai.com/v1."
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        return "must hold no credentials and nothing after the path; name the key's variable in api_key_env."
    return ""


def openai_api_rules(config: Config) -> Iterator[Finding]:
    """Yield unknown parsers, and tool calls without a parser."""
    parsers = {"tool_call_parser": TOOL_CALL_PARSERS, "reasoning_parser": REASONING_PARSERS}
    for key, model in config.explorer.models.items():
        for name, names in parsers.items():
            parser = getattr(model, name)
            if parser is not None and parser not in names:
                message = f"must be one of {', '.join(names)}, not '{parser}'."
                meant = closest(parser, names)
                yield conflict(config, f"{key}.{name}", message, code="unknown-choice", meant=meant)
        if model.enable_auto_tool_choice and model.tool_call_parser is None:
            message = "needs tool_call_parser, which reads the model's tool calls."
            parser_key = f"{key}.tool_call_parser"
            yield conflict(config, f"{key}.enable_auto_tool_choice", message, parser_key, code="missing")
