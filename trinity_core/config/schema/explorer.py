"""The `explorer` section: rollout engines, workflow runners and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Count,
    Derived,
    Flag,
    Many,
    Named,
    Natural,
    Port,
    Positive,
    PositiveShare,
    Seconds,
    Section,
    Seed,
    StepsOrNone,
    Tokens,
    Unit,
)


class RolloutModelConfig(Section):
    """The engines that generate. GPUs needed: `engine_num * tensor_parallel_size`."""

    engine_type: Literal["vllm", "vllm_async"] = "vllm"
    """Inference engine; both names mean vLLM."""
    engine_num: Count = 1
    """Engines."""
    tensor_parallel_size: Annotated[Count, Unit("GPUs")] = 1
    """GPUs of one engine."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of a GPU's memory that an engine may take."""
    kv_cache_gib: Annotated[Positive, Unit("GiB")] | None = None
    """KV cache of an engine; null: on the CPU, room for `max_num_seqs` full sequences; on a GPU, what
    `gpu_memory_utilization` leaves after the model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    enforce_eager: Flag | None = None
    """Run the model as it is, not compiled and without CUDA graphs: starts sooner, generates slower. By default false
    on a GPU and true on the CPU, where false needs a C++ compiler: a fifth faster, 20 s more at the first start."""
    max_num_seqs: Count = 256
    """Sequences an engine works on at once."""
    enable_prefix_caching: Flag = True
    """Keep the KV cache of prompts that requests share."""
    extra_engine_args: Args = EMPTY
    """Further arguments of vLLM's engine, of a list of those that leave rollouts right, such as `quantization: fp8`."""
    enable_history: Flag = False
    """Record every model call as an experience, to be taken by the workflow; also what goes through the OpenAI API."""
    enable_openai_api: Flag = False
    """Serve the model through the OpenAI API, for workflows and for programs."""
    enable_auto_tool_choice: Flag = False
    """Let the model choose tools in the OpenAI API; needs `tool_call_parser`."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`; for workflows with tools and for the OpenAI API. By default
    `toolcall_workflow` takes that of the policy's chat template."""
    reasoning_parser: str | None = None
    """vLLM's parser that separates reasoning from the answer, such as `qwen3`."""
    enable_log_requests: Flag = False
    """Log every request to the OpenAI API: its prompt and how it is sampled."""
    seed: Seed | None = None
    """Seed of the engine; by default the run's `seed`."""


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model that workflows may call, such as a judge, a teacher or a reward model (a sequence classifier)."""

    model_path: str = ""
    """A Hugging Face folder or hub name."""
    name: str | None = None
    """Name by which a workflow finds it."""
    max_model_len: Derived[Tokens] = DERIVED
    """Longest sequence; by default `max_prompt_tokens + max_response_tokens`, else the policy's."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt."""
    max_response_tokens: Tokens | None = None
    """Longest response."""
    enable_thinking: Flag | None = None
    """Passed to chat templates that know it."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the model."""

    @property
    def called(self) -> str:
        """The name by which workflows, rewards and requests find it: `name`, or else its path."""
        return self.name or self.model_path


class ExternalModelConfig(Section):
    """An OpenAI-compatible endpoint that `mode: bench` and `trinity evaluate` score; the run has no engines then."""

    base_url: str = ""
    """Address of the API, such as `https://api.openai.com/v1`; without credentials."""
    model_name: str = ""
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""
    timeout: Seconds = 300.0
    """Time for one attempt at a request."""
    max_retry_times: Natural = 6
    """Retries of a request that was refused for now (429), failed (5xx), broke off or took too long, with growing
    pauses; all of them within 90 % of `explorer.max_timeout`."""
    requests_at_once: Count = 32
    """Requests in flight."""
    request_args: Args = EMPTY
    """Further keys of each request's body, such as `reasoning_effort`; null leaves out a key that is sent otherwise."""


class ExplorerConfig(Section):
    """How tasks become experiences."""

    name: str = "explorer"
    """Name of the explorer; explorers that share a run need different ones."""
    runner_per_model: Count = 8
    """Workflows that run at once for each engine; where it is not given, on a GPU as many as fill `max_num_seqs`."""
    max_timeout: Seconds = 900.0
    """Time a workflow may take, without that of verifiers, of whose verdicts each has a limit of its own, and without
    waits for a free process of an environment, a judge's turn or an external model's (`requests_at_once`)."""
    reward_workers: Count | None = None
    """Processes that score answers, started as they are needed; by default half as many as the machine has cores, at
    most 16."""
    max_retry_times: Natural = 2
    """Retries of a workflow that failed or took too long."""
    max_refill_rounds: Natural = 0
    """Times that a step draws further tasks in place of tasks whose rows were all lost to operators or failures."""
    engine_timeout: Seconds = 300.0
    """Time without a sampled token after which an engine that has requests counts as hung and is replaced."""
    env_vars: Named[str] = EMPTY
    """Environment of the workflows, set when the explorer starts. Ray and its logs do not see it."""
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    """Engines of the policy."""
    auxiliary_models: Many[AuxiliaryModelConfig] = ()
    """Engines of further models."""
    external_model: ExternalModelConfig | None = None
    """An endpoint to score in place of the policy, in mode `bench` and by `trinity evaluate`."""
    listen_address: str = "127.0.0.1"
    """Address at which the OpenAI API listens; by default this machine alone reaches it."""
    api_port: Port = 0
    """Port of the OpenAI API; 0 takes any free one."""
    feedback_timeout: Seconds = 3600.0
    """Time after the last answer of a session in which its feedback must come, in mode `serve`; then it is dropped."""
    eval_interval: StepsOrNone = 100
    """Steps between evaluations; 0 means only at start and end."""
    eval_on_startup: Flag = True
    """Evaluate the untrained model at step 0 (not when a run is resumed)."""
    bench_on_latest_checkpoint: Flag = True
    """Score the run's latest checkpoint; false scores every checkpoint that has no score yet (mode bench)."""

    @property
    def models(self) -> dict[str, RolloutModelConfig]:
        """The policy's engines and the auxiliary models, by key."""
        others = {f"explorer.auxiliary_models[{index}]": model for index, model in enumerate(self.auxiliary_models)}
        return {"explorer.rollout_model": self.rollout_model, **others}
