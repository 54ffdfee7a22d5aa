"""Engine settings derived from the configuration. Imports neither torch nor vllm."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_core.base.addresses import LOOPBACK, short_folder
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded
from trinity_core.config import AuxiliaryModelConfig, Config, LoraConfig, RolloutModelConfig
from trinity_core.config.engine_args import gpu_alone, is_lossy
from trinity_core.config.rules.algorithm import restricted_sampling, unreported_temperatures
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.training import DTYPE_BYTES, dtype_of
from trinity_core.rollout.inference.requests import Sampling

SEQUENCES, LARGE_SEQUENCES = 256, 1024
"""Default number of sequences that an engine processes at once: on the CPU or a GPU, and on a large GPU."""
LARGE_GPU = 70 << 30
"""Bytes of a GPU's memory from which vLLM's own default is 1,024 too, except for A100s (`engine/arg_utils.py`)."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on the CPU. vLLM's default of 128 is longer than a short prompt, so the samples of a group would
share nothing; 32 is the smallest size that its kernels support. 128 samples of 16 prompts of 35 tokens take 0.47 s of
one core instead of 0.72 s (`benchmarks/generation.py --block 128`)."""

CPU_BATCH_TOKENS = 16384
"""Prompt tokens that one step of a CPU engine may prefill. Prompts are never chunked there: CPU generators cannot
continue a seeded request between chunks."""

SOCKET_BYTES = 40
"""Length of a socket's name, a UUID, in vLLM's folder."""
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Idle OpenMP threads of CPU processes sleep at once. Spinning saves a twelfth of a train step on a quiet machine, but
makes everything four times as slow beside one other busy process (`benchmarks/busy_machine.py --spin 60000`,
`benchmarks/generation.py --threads 2 --spin 60000`)."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model_path: str
    max_model_len: int
    """Longest sequence in tokens, prompt and response together."""
    on_gpu: bool = False
    dtype: str = "auto"
    """`auto`: bfloat16 on a GPU, float32 on the CPU."""
    max_num_seqs: int | None = SEQUENCES
    """Sequences processed at once; None, on a GPU: `gpu_sequences`."""
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    """KV cache; None: on the CPU enough for `max_num_seqs` full sequences, at most a quarter of the free memory; on a
    GPU what `gpu_memory_utilization` leaves, which vLLM measures at startup."""
    enforce_eager: bool | None = None
    """True: compile nothing; None: compile on a GPU, not on the CPU."""
    enable_prefix_caching: bool = True
    trust_remote_code: bool = False
    model_overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Changes to the model's own configuration; the trainer applies the same."""
    seed: int = 0
    threads: int = 1
    block_size: int | None = None
    """Tokens of a KV block; None: vLLM's choice on a GPU, `CPU_BLOCK_TOKENS` on the CPU."""
    lora_rank: int = 0
    """Rank of the LoRA adapter; 0 without one."""
    lora_modules: tuple[str, ...] = ()
    """Last parts of the names of the matrices with an adapter; empty: all but the output embedding."""
    lora_excluded: tuple[str, ...] = ()
    """Those among them without one."""
    adapter_path: str = ""
    """Folder of the initial adapter; empty: one that changes nothing."""
    quantization: str = ""
    """vLLM's name for the format of the model's weights; empty: as in its folder."""
    weight_transfer: str = ""
    """vLLM's weight-transfer backend through which the trainer pushes weights; empty if none are pushed."""
    grammars: bool = False
    """True if answers may be guided by a grammar (the OpenAI API, `structured_output`): the engine then loads the
    tokenizer."""
    reasoning_parser: str | None = None
    """With `grammars`, the parser that finds the end of the thoughts, where a grammar starts to apply."""
    raw_logprobs: bool = False
    """On a GPU. True: log-probs are log_softmax(logits) over the whole vocabulary, before the temperature. False: those
    of the distribution after temperature, top-k, top-p and minimum length. Both agree at temperature 1 without
    restrictions. A CPU engine needs neither: see `seeded_sampler.SeededSampler`."""

    extra_engine_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of vLLM (`config/engine_args.py`)."""
    sleeps: bool = False
    """True: the engine starts asleep, and leaves the GPU to the trainer while it sleeps (`cluster.colocate`)."""

    @property
    def sleep_level(self) -> int:
        """vLLM's level of sleep. 2 drops the weights, which takes no host memory: a version is loaded after each wake.
        1 copies them to the host, because an adapter's base is never published."""
        return 1 if self.lora_rank else 2

    @property
    def eager(self) -> bool:
        """True if nothing is compiled."""
        return not self.on_gpu if self.enforce_eager is None else self.enforce_eager

    @property
    def is_lossy(self) -> bool:
        """True if it samples from another distribution than its weights in `compute_dtype` would."""
        return is_lossy(self.extra_engine_args)

    @property
    def compute_dtype(self) -> str:
        """The number format of weights and activations."""
        return dtype_of(self.dtype, self.on_gpu)

    def reports_logprobs_of(self, sampling: Sampling) -> bool:
        """True if the log-probs are those over the whole vocabulary at `sampling.logprob_temperature`."""
        if not self.on_gpu:
            return True
        return sampling.logprob_temperature == 1 if self.raw_logprobs else not sampling.is_restricted

    def environment(self) -> dict[str, str]:
        """Return environment variables to set before the engine's process starts: they are read at import."""
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
        if self.on_gpu:
            # vLLM would import flashinfer for a sampler that never serves seeded or greedy requests with log-probs.
            quiet["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
            usual = tempfile.gettempdir()  # may differ on other nodes
            short = short_folder(usual, SOCKET_BYTES)
            return quiet if short == usual else quiet | {"VLLM_RPC_BASE_PATH": short}
        # Otherwise vLLM compiles one kernel of the sampler, which takes 4 s and a C++ compiler.
        uncompiled = {"TORCHDYNAMO_DISABLE": "1"} if self.eager else {}
        return (
            quiet
            | uncompiled
            | PASSIVE_THREADS
            | {
                "OMP_NUM_THREADS": str(self.threads),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_HOST_IP": LOOPBACK,
                "GLOO_SOCKET_IFNAME": "lo",
            }
        )


def gpu_sequences(memory: int) -> int:
    """Return the default of `max_num_seqs` on a GPU with that many bytes of memory; 0: unknown."""
    return SEQUENCES if 0 < memory < LARGE_GPU else LARGE_SEQUENCES


def policy_engine(config: Config, on_gpu: bool, threads: int = 1) -> EngineSettings:
    """Return the settings of each engine of the policy. `threads` is its share of the CPU cores.

    Raises `TrinityError` for sampling whose log-probs a GPU engine cannot report as the trainer computes them.
    """
    sampled = _samples_at_once(config)
    for key, value, message in unreported_temperatures(config) if on_gpu else []:
        raise TrinityError(f"{key}: is {value:g}, but {message}", key=key)
    model = config.explorer.rollout_model
    return _settings(
        model,
        **_adapter(config.engine_adapter),
        model_path=config.model.model_path,
        max_model_len=config.model.max_model_len,
        max_num_seqs=model.max_num_seqs if on_gpu else min(model.max_num_seqs or SEQUENCES, sampled),
        on_gpu=on_gpu,
        threads=threads,
        seed=config.seed if model.seed is None else model.seed,
        trust_remote_code=config.model.trust_remote_code,
        model_overrides=config.trainer.trainer_config.actor_rollout_ref.model.override_config,
        weight_transfer=SYNC_METHODS[config.synchronizer.sync_method].vllm_backend if on_gpu else "",
        raw_logprobs=on_gpu and bool(restricted_sampling(config)),
        grammars=any(taskset.rollout_args.structured_output for taskset in config.buffer.explorer_input.all_tasksets),
        sleeps=bool(config.cluster.colocate),
    )


def _adapter(lora: LoraConfig | None) -> dict[str, Any]:
    if lora is None:
        return {}
    return {
        "lora_rank": lora.lora_rank,
        "lora_modules": lora.modules,
        "lora_excluded": lora.exclude_modules,
        "adapter_path": str(expanded(lora.path).absolute()) if lora.path else "",
        "quantization": "bitsandbytes" if lora.load_in_4bit else "",
    }


def auxiliary_engine(config: Config, model: AuxiliaryModelConfig, on_gpu: bool, threads: int = 1) -> EngineSettings:
    return _settings(
        model,
        model_path=model.model_path,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs if on_gpu else model.max_num_seqs or SEQUENCES,
        on_gpu=on_gpu,
        threads=threads,
        seed=config.seed if model.seed is None else model.seed,
        trust_remote_code=model.trust_remote_code,
    )


def _settings(model: RolloutModelConfig, **arguments: object) -> EngineSettings:
    shared = {
        name: getattr(model, name)
        for name in (
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "kv_cache_gib",
            "dtype",
            "enforce_eager",
            "enable_prefix_caching",
            "extra_engine_args",
        )
    }
    refused = gpu_alone(model.extra_engine_args)
    if refused and not arguments["on_gpu"]:
        raise TrinityError(
            f"explorer.rollout_model.extra_engine_args.{refused[0]}: is for engines on a GPU",
            key=f"explorer.rollout_model.extra_engine_args.{refused[0]}",
        )
    grammars = arguments.pop("grammars", False) or model.enable_openai_api
    parser = model.reasoning_parser if grammars else None
    return EngineSettings(**(shared | {"grammars": grammars, "reasoning_parser": parser} | arguments))


def _samples_at_once(config: Config) -> int:
    """Return the largest number of sequences in flight in one engine, if each workflow requests all its repeats at
    once.

    Users of mode `serve` are no workflows: only `max_num_seqs` limits them.
    """
    if config.mode == "serve":
        return config.explorer.rollout_model.max_num_seqs or SEQUENCES
    tasksets = config.buffer.explorer_input.all_tasksets
    repeats = max((taskset.repeat_times for taskset in tasksets), default=config.algorithm.repeat_times)
    return max(1, config.explorer.runner_per_model * repeats)


LATENT = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
    "kimi_linear", "longcat_flash", "pangu_ultra_moe",
)  # fmt: skip
"""Values of `model_type` whose latent attention vLLM computes on the latent vectors (its `ModelConfig.use_mla`)."""


def latent_numbers(text: Mapping[str, Any]) -> int:
    """Return how many numbers vLLM caches per token and layer on each GPU instead of keys and values; 0: it caches
    those.

    `text` is the language model's part of a config.json.
    """
    if text.get("model_type") not in LATENT or not text.get("kv_lora_rank"):
        return 0
    indexer = int(text.get("index_head_dim") or 0)  # of sparse attention, which keeps its own keys
    return int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]) + indexer


def head_channels(text: Mapping[str, Any]) -> int:
    """Return the channels of a head's queries and keys from the language model's part of a config.json."""
    if text.get("qk_nope_head_dim"):  # latent attention, whose `head_dim`, if present, is that of the rotary part
        return int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
    return int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))


def kv_bytes_per_token(layers: int, kv_heads: int, channels: int, dtype: str, latent: int = 0) -> int:
    """Return the cache bytes of one token in all layers: keys and values, `channels` of each head, or
    `latent_numbers`."""
    return layers * (latent or 2 * kv_heads * channels) * DTYPE_BYTES[dtype]


def kv_bytes(settings: EngineSettings, per_token: int, free: int) -> int:
    """Return the bytes of KV cache on the CPU: `max_num_seqs` full sequences, at most a quarter of the free memory, at
    least one sequence. The cache is allocated at once, so it should not be larger than needed.

    `per_token` are the bytes of one token, `free` those of the machine's free memory. Raises TrinityError if one
    sequence takes more than half of them.
    """
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * GIB)
    block = settings.block_size or CPU_BLOCK_TOKENS
    tokens = -(-settings.max_model_len // block) * block
    longest = tokens * per_token
    if longest > free // 2:
        raise TrinityError(
            f"one sequence of {settings.max_model_len} tokens needs {longest / GIB:.1f} GiB of KV cache, and "
            f"{free / GIB:.1f} GiB of memory are free; lower model.max_model_len",
            key="model.max_model_len",
        )
    # vLLM keeps one block for itself.
    return max(longest, min((settings.max_num_seqs or SEQUENCES) * longest, free // 4)) + block * per_token
