"""Settings of the OpenAI API: the parsers that vLLM 0.32 has, and the rules between the settings.

The names are listed so that a configuration is checked without vLLM; a test compares them with vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.problems import Finding
from trinity_core.config.schema import Config
from trinity_core.config.schema.explorer import RolloutModelConfig
from trinity_core.slips import closest

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


def openai_api_rules(config: Config) -> Iterator[Finding]:
    """Unknown parsers, tool calls that nothing would read, and workflows that need the API."""
    models = [("explorer.rollout_model", config.explorer.rollout_model)]
    models += [(f"explorer.auxiliary_models[{i}]", model) for i, model in enumerate(config.explorer.auxiliary_models)]
    for key, model in models:
        yield from _model(key, model)
    enable = "explorer.rollout_model.enable_openai_api"
    tasksets = config.buffer.explorer_input.tasksets + config.buffer.explorer_input.eval_tasksets
    agents = any(taskset.default_workflow_type == "command_workflow" for taskset in tasksets)
    served = config.explorer.rollout_model.enable_openai_api or config.external_model is not None
    calls = any(taskset.default_workflow_type == "toolcall_workflow" for taskset in tasksets)
    if calls and config.explorer.rollout_model.tool_call_parser is None and config.mode != "train":
        parser = "explorer.rollout_model.tool_call_parser"
        yield Finding(
            parser, None, "must be set for toolcall_workflow: it reads the calls (hermes for Qwen 2.5 and 3)."
        )
    if agents and config.mode != "train" and not served:
        yield Finding(enable, False, "must be true: command_workflow gives its command the API's address.")


def _model(key: str, model: RolloutModelConfig) -> Iterator[Finding]:
    given = (
        ("tool_call_parser", model.tool_call_parser, TOOL_CALL_PARSERS),
        ("reasoning_parser", model.reasoning_parser, REASONING_PARSERS),
    )
    for name, parser, known in given:
        if parser is not None and parser not in known:
            message = f"must be one of {', '.join(known)}, not '{parser}'."
            yield Finding(f"{key}.{name}", parser, message, suggestion=closest(parser, known))
    if model.enable_auto_tool_choice and model.tool_call_parser is None:
        message = "needs tool_call_parser, which reads the model's tool calls."
        yield Finding(f"{key}.enable_auto_tool_choice", True, message, (f"{key}.tool_call_parser",))
