"""The `explorer` section: inference engines, workflow runners and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
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
    Number,
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

    engine_num: Count = 1
    """Number of engines."""
    tensor_parallel_size: Annotated[Count, Unit("GPUs")] = 1
    """GPUs per engine."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of a GPU's memory that an engine may use."""
    kv_cache_gib: Annotated[Positive, Unit("GiB")] | None = None
    """KV cache per engine; null: on the CPU, room for `max_num_seqs` full sequences; on a GPU, what
    `gpu_memory_utilization` leaves after the model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    enforce_eager: Flag | None = None
    """Run the model without compilation and CUDA graphs: starts sooner, generates slower. By default false on a GPU and
    true on the CPU, where false needs a C++ compiler and is a fifth faster after a first start that takes 20 s
    longer."""
    max_num_seqs: Count | None = None
    """Sequences that an engine processes at once; by default 256, on a GPU of 70 GiB or more 1,024."""
    enable_prefix_caching: Flag = True
    """Keep the KV cache of prompts that requests share."""
    extra_engine_args: Args = EMPTY
    """Further vLLM engine arguments, from a list of those that keep rollouts correct, such as `quantization: fp8`."""
    enable_history: Flag = False
    """Record every model call, including those through the OpenAI API, as an experience that the workflow can
    collect."""
    enable_openai_api: Flag = False
    """Serve the model through the OpenAI API, for workflows and for programs."""
    enable_auto_tool_choice: Flag = False
    """Let the model choose tools in the OpenAI API; needs `tool_call_parser`."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`; for workflows with tools and for the OpenAI API. By default
    `toolcall_workflow` infers it from the policy's chat template."""
    reasoning_parser: str | None = None
    """vLLM's parser that separates reasoning from the answer, such as `qwen3`."""
    enable_log_requests: Flag = False
    """Log every request to the OpenAI API with its prompt and sampling parameters."""
    seed: Seed | None = None
    """Seed of the engine; by default the run's `seed`."""


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model that workflows may call, such as a judge, a teacher or a reward model (a sequence classifier)."""

    model_path: str = ""
    """Hugging Face folder or hub name."""
    name: str | None = None
    """Name by which workflows find it."""
    max_model_len: Derived[Tokens] = DERIVED
    """Maximum sequence length; by default `max_prompt_tokens + max_response_tokens`, else the policy's."""
    max_prompt_tokens: Tokens | None = None
    """Maximum prompt length."""
    max_response_tokens: Tokens | None = None
    """Maximum response length."""
    enable_thinking: Flag | None = None
    """Passed to chat templates that support it."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the model."""

    @property
    def called(self) -> str:
        """The name by which workflows, rewards and requests find it: `name`, or else its path."""
        return self.name or self.model_path


class ExternalModelConfig(Section):
    """An OpenAI-compatible endpoint that `mode: bench` and `trinity evaluate` score; such a run has no engines."""

    base_url: str = ""
    """Address of the API, such as `https://api.openai.com/v1`; without credentials."""
    model_name: str = ""
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the key; null sends none."""
    timeout: Seconds = 300.0
    """Time limit for one attempt at a request."""
    max_retry_times: Natural = 6
    """Retries of a request that was refused for now (429), failed (5xx), was interrupted or timed out, with growing
    pauses; all within 90 % of `explorer.max_timeout`."""
    requests_at_once: Count = 32
    """Maximum number of concurrent requests."""
    requests_per_minute: Count | None = None
    """Maximum number of requests a minute, evenly spaced; null: no limit."""
    tokens_per_minute: Annotated[Count, Unit("tokens")] | None = None
    """Maximum number of tokens a minute, of prompts and answers as the endpoint counts them; requests that are already
    in flight may exceed it. Null: no limit."""
    request_args: Args = EMPTY
    """Further keys in each request's body, such as `reasoning_effort`; null removes a key that would be sent."""


class OverRolloutConfig(Section):
    """Ends a step without its slowest tasks, which are dropped. Long answers take longest, so training sees fewer of
    them."""

    ratio: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Share of a step's tasks that may be dropped."""
    wait_after_min: Annotated[Number, Ge(0), Unit("seconds")] = 30.0
    """Time that the remaining tasks get once enough have ended."""


class DynamicTimeoutConfig(Section):
    """A time limit in proportion to the time that workflows take."""

    enable: Flag = False
    """End a workflow after `ratio` times the mean time of those that succeeded, if that is less than `max_timeout`.
    Evaluations are exempt."""
    ratio: Annotated[Number, Gt(1)] = 3.0
    """Multiple of the mean time since the explorer started."""
    warmup_min_steps: Natural = 1
    """Explore steps after its start in which only `max_timeout` applies."""


class ExplorerConfig(Section):
    """How tasks become experiences."""

    name: str = "explorer"
    """Name of the explorer; explorers of the same run need different names."""
    runner_per_model: Count = 8
    """Concurrent workflows per engine; by default on a GPU all tasks of a step, or twice `max_num_seqs` answers if that
    is less."""
    max_timeout: Seconds = 900.0
    """Time limit for a workflow. It does not count verifiers, whose verdicts have their own limits, or waits for a free
    environment process, a judge or an external model (`requests_at_once`)."""
    reward_workers: Count | None = None
    """Maximum number of processes that score answers, started on demand; by default half the machine's cores, at most
    16."""
    max_retry_times: Natural = 2
    """Retries of a workflow that failed or timed out."""
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    """Which tasks a step does not wait for."""
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    """A limit below `max_timeout`."""
    max_refill_rounds: Natural = 0
    """How often a step draws further tasks to replace tasks whose rows were all dropped by operators or failed."""
    engine_timeout: Seconds = 300.0
    """Time without a sampled token after which an engine with requests counts as hung and is replaced."""
    env_vars: Named[str] = EMPTY
    """Environment variables of the workflows, set when the explorer starts. They do not appear in Ray or its logs."""
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    """The policy's engines."""
    auxiliary_models: Many[AuxiliaryModelConfig] = ()
    """Engines of further models."""
    external_model: ExternalModelConfig | None = None
    """An endpoint to score instead of the policy, in mode `bench` and with `trinity evaluate`."""
    listen_address: str = "127.0.0.1"
    """Address on which the OpenAI API listens; by default only this machine can reach it."""
    api_port: Port = 0
    """Port of the OpenAI API; 0 takes any free one."""
    feedback_timeout: Seconds = 3600.0
    """Time after a session's last answer within which feedback must arrive in mode `serve`; later the session is
    dropped."""
    eval_interval: StepsOrNone = 100
    """Steps between evaluations, also of a held-out loss; 0 means only at start and end."""
    eval_on_startup: Flag = True
    """Evaluate the untrained model at step 0 (not when a run is resumed)."""
    eval_beside_training: Flag = False
    """Score checkpoints during training, by one more engine (on GPUs with a GPU of its own), instead of between
    steps. `eval_interval` must be a multiple of `trainer.save_interval`."""
    bench_on_latest_checkpoint: Flag = True
    """Score the run's latest checkpoint; false scores every checkpoint without a score (mode bench)."""

    @property
    def models(self) -> dict[str, RolloutModelConfig]:
        """The policy's engines and the auxiliary models, by key."""
        others = {f"explorer.auxiliary_models[{index}]": model for index, model in enumerate(self.auxiliary_models)}
        return {"explorer.rollout_model": self.rollout_model, **others}
