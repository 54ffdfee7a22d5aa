"""Engine settings derived from a configuration."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import pytest
from raising import raising
from transformers import AutoConfig

from trinity_core.base.errors import TrinityError
from trinity_core.config import LoraConfig, config_from_dict
from trinity_core.exchange.checkpoints.adapters import adapter_config
from trinity_core.rollout.inference import vllm_types
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.settings import EngineSettings, gpu_sequences, policy_engine
from trinity_core.rollout.inference.weight_receiver import with_head


def config(overrides=(), **rollout_model):
    return config_from_dict({
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": "some/model", "max_prompt_tokens": 30, "max_response_tokens": 70},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "some/data"}}},
        "explorer": {"runner_per_model": 3, "rollout_model": rollout_model},
    }, overrides)  # fmt: skip


def test_policy_engine_fits_the_run():
    settings = policy_engine(config(), on_gpu=False, threads=2)
    assert (settings.max_model_len, settings.max_num_seqs, settings.compute_dtype) == (100, 12, "float32")
    environment = settings.environment()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_gpu_engine_keeps_vllm_defaults():
    settings = policy_engine(config(tensor_parallel_size=2), on_gpu=True)
    assert (settings.compute_dtype, settings.max_num_seqs) == ("bfloat16", None)
    arguments = vllm_types.engine_arguments(settings)
    assert arguments["tensor_parallel_size"] == 2
    assert [gpu_sequences(gib << 30) for gib in (0, 24, 48, 80)] == [1024, 256, 256, 1024]
    assert "enable_chunked_prefill" not in arguments
    assert arguments["language_model_only"], "a model that reads images starts without a tokenizer"
    assert "OMP_NUM_THREADS" not in settings.environment()


def test_sockets_of_a_gpu_engine_have_short_paths(monkeypatch):
    """vLLM names each by a UUID in the temporary folder, which may be that of a cluster's job."""
    settings = EngineSettings("model", 100, on_gpu=True)
    assert "VLLM_RPC_BASE_PATH" not in settings.environment()
    monkeypatch.setattr("tempfile.tempdir", "/scratch/" + "long" * 20)
    assert len(f"{settings.environment()['VLLM_RPC_BASE_PATH']}/{uuid4()}") <= 107


def test_kv_cache_of_a_gpu_engine_can_be_fixed():
    settings = EngineSettings("model", 100, on_gpu=True)
    assert "kv_cache_memory_bytes" not in vllm_types.engine_arguments(settings), "vLLM measures"
    fixed = vllm_types.engine_arguments(replace(settings, kv_cache_gib=2.5))
    assert fixed["kv_cache_memory_bytes"] == 5 << 29


def test_gpu_engine_with_a_fixed_kv_cache_starts_beside_a_trainer(monkeypatch):
    """vLLM demands that its share of the GPU is free, before it looks at the size of the cache."""
    from vllm.v1.worker.utils import request_memory

    monkeypatch.setattr(vllm_types, "_gpu_memory", lambda: 24 << 30)
    gpu = SimpleNamespace(total_memory=24 << 30, free_memory=19 << 30, device_="cuda:0")
    for gib in (4, 18, 20, 30):
        arguments = vllm_types.engine_arguments(EngineSettings("model", 100, on_gpu=True, kv_cache_gib=gib))
        share = SimpleNamespace(gpu_memory_utilization=arguments["gpu_memory_utilization"])
        with nullcontext() if gib < 19 else pytest.raises(ValueError, match="Free memory"):
            assert request_memory(gpu, share) == pytest.approx(gib << 30)


def test_further_arguments_reach_an_engine_on_a_gpu_alone():
    arguments_given = {"quantization": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    settings = policy_engine(config(extra_engine_args=arguments_given), on_gpu=True)
    arguments = vllm_types.engine_arguments(settings)
    assert {name: arguments[name] for name in arguments_given} == arguments_given
    assert settings.is_lossy and not policy_engine(config(), on_gpu=True).is_lossy
    sleeping = vllm_types.engine_arguments(replace(settings, sleeps=True))
    assert set(sleeping) - set(arguments) == {"enable_sleep_mode", "sleep_mode_offload_cudagraph"}
    with raising(TrinityError, key="explorer.rollout_model.extra_engine_args.quantization"):
        policy_engine(config(extra_engine_args=arguments_given), on_gpu=False)


def test_restricted_sampling_on_gpu_reports_raw_logprobs():
    restricted = config(overrides=["model.top_k=5"])
    assert vllm_types.engine_arguments(policy_engine(restricted, on_gpu=True))["logprobs_mode"] == "raw_logprobs"
    assert not policy_engine(config(), on_gpu=True).raw_logprobs
    cooler = config(overrides=["model.top_k=5", "model.temperature=0.7"])
    with raising(TrinityError, key="buffer.explorer_input.taskset.rollout_args.temperature"):
        policy_engine(cooler, on_gpu=True)
    assert not policy_engine(cooler, on_gpu=False).raw_logprobs


def test_an_engine_is_told_of_the_matrices_that_the_model_has(tiny_folder, tmp_path):
    """peft ignores other names, such as those of a list for several families. GLM 4 has the last one."""
    AutoConfig.for_model("glm4", num_hidden_layers=1).save_pretrained(tmp_path)
    for folder, expected in ((tiny_folder, ["o_proj", "q_proj"]), (tmp_path, ["gate_up_proj", "o_proj", "q_proj"])):
        names = ("q_proj", "self_attn.o_proj", "qkv_proj", "gate_up_proj")
        settings = EngineSettings(str(folder), 64, lora_rank=4, lora_modules=names)
        assert vllm_types.engine_arguments(settings)["lora_target_modules"] == expected


def test_an_engine_keeps_no_room_for_excluded_matrices(tiny_folder):
    adapter = LoraConfig(lora_rank=4, exclude_modules=["k_proj", "down_proj"])
    settings = EngineSettings(str(tiny_folder), 64, lora_rank=4, lora_excluded=adapter.exclude_modules)
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    trained = adapter_config(adapter, "base", linear)
    expected = ["gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert vllm_types.engine_arguments(settings)["lora_target_modules"] == trained["target_modules"] == expected


def test_windows_of_cohere_2_are_those_of_transformers(tmp_path):
    """vLLM adds a token to them; its other families' windows are as in config.json."""
    for kind, expected in (("cohere2", {"sliding_window": 7}), ("qwen2", {})):
        AutoConfig.for_model(kind, sliding_window=8).save_pretrained(tmp_path / kind)
        settings = EngineSettings(str(tmp_path / kind), 64, on_gpu=True)
        assert vllm_types.engine_arguments(settings)["hf_overrides"] == expected


def test_engine_gets_the_trainers_changes_to_the_model(tiny_folder):
    key = "trainer.trainer_config.actor_rollout_ref.model.override_config"
    changed = policy_engine(config([f"model.model_path={tiny_folder}", f"{key}={{sliding_window: 64}}"]), on_gpu=False)
    assert vllm_types.engine_arguments(changed)["hf_overrides"] == {"sliding_window": 64}
    plain = policy_engine(config([f"model.model_path={tiny_folder}"]), on_gpu=False)
    assert vllm_types.engine_arguments(plain)["hf_overrides"] == {}
    assert changed != plain and len({changed, plain, replace(changed)}) == 2


def test_cpu_kv_cache_holds_all_sequences(tiny_folder):
    few, many = [
        vllm_types.engine_arguments(EngineSettings(str(tiny_folder), 100, max_num_seqs=n))["kv_cache_memory_bytes"]
        for n in (1, 10)
    ]
    block = 32 * 2 * 4 * 2 * 32 * 4  # tokens * (key, value) * layers * heads * channels * bytes
    assert few == 4 * block + block
    assert many == 40 * block + block


def test_missing_model_folder_is_named(tmp_path):
    with raising(TrinityError, key="model.model_path"):
        vllm_types.check_model(str(tmp_path / "nowhere"))
    with raising(TrinityError, key="model.model_path"):
        vllm_types.check_model(str(tmp_path))


def test_compiling_on_the_cpu_is_opt_in_and_needs_a_compiler(monkeypatch, tmp_path):
    usual, compiled = policy_engine(config(), on_gpu=False), policy_engine(config(enforce_eager=False), on_gpu=False)
    assert usual.eager and not compiled.eager and not policy_engine(config(), on_gpu=True).eager
    assert "TORCHDYNAMO_DISABLE" in usual.environment() and "TORCHDYNAMO_DISABLE" not in compiled.environment()
    vllm_types.check_compiler(usual)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrinityError):
        vllm_types.check_compiler(compiled)


def test_tied_head_is_loaded_by_name():
    tied = [("model.embed_tokens.weight", "E"), ("model.norm.weight", "N")]
    assert list(with_head(iter(tied)))[-1] == ("lm_head.weight", "E")
    untied = [*tied, ("lm_head.weight", "H")]
    assert list(with_head(iter(untied))) == untied


def test_cpu_engine_refuses_pushed_weights():
    engine = InProcessEngine(EngineSettings("some/model", 100))
    with raising(TrinityError, key="synchronizer.sync_method"):
        asyncio.run(engine.init_weight_transfer_engine({}))


def test_kv_cache_fits_the_container(tiny_folder, monkeypatch):
    """The machine may have far more memory than the engine's container."""
    settings = EngineSettings(str(tiny_folder), 100, max_num_seqs=100_000)
    monkeypatch.setattr(vllm_types, "free_memory", lambda: 1 << 28)
    assert vllm_types.engine_arguments(settings)["kv_cache_memory_bytes"] < 1 << 27


def test_engines_that_serve_the_api_can_follow_a_grammar():
    """An engine without a tokenizer refuses every request in the batch of one with a grammar."""
    served = policy_engine(config(enable_openai_api=True, reasoning_parser="qwen3"), on_gpu=False)
    assert (served.grammars, served.reasoning_parser) == (True, "qwen3")
    assert not policy_engine(config(), on_gpu=False).grammars
