"""Engines of many model families against transformers: log-probs, and weights from every source.

Uses a small model of each family, with random weights in float32, on the CPU. Prints the largest gap in a log-prob
(nats) between vLLM's engine and transformers: at the start from a converted checkpoint, of tokens that it samples,
after two published versions, and after loading a folder written by transformers; or the first error. Also prints how
far vLLM's bytes per token in the KV cache are from the estimate. The claim: each is below 1e-4, for the families of
docs/explorer.md.

    python benchmarks/model_families.py                 # all families, each in a process of its own
    python benchmarks/model_families.py gemma2 mixtral  # these
    python benchmarks/model_families.py --lora gemma2   # an adapter in place of all weights
    python benchmarks/model_families.py --together …    # in one process; a mixture of experts must be the first
"""

import argparse
import asyncio
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.base.layout import ADAPTER, shard_name
from trinity_core.config import LoraConfig
from trinity_core.exchange.checkpoints.adapters import CONFIG, B, is_adapter, linear_names, plain_name
from trinity_core.exchange.checkpoints.beginning import STATE
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.sync.tensorfile import digest
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.requests import Request, Sampling, WeightSource
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.inference.vllm_types import kv_bytes_of_a_token
from trinity_core.training.lora import add_adapter

LIMIT = 1e-4
"""Nats."""
RANK = 4
EXPERTS_TOO = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate", "gate", "kv_b_proj")
WITHOUT_ADAPTER = {
    "glm4": ("gate_up_proj",),
    **dict.fromkeys(("qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"), EXPERTS_TOO),
}
"""Matrices whose adapters are refused: docs/lora.md."""
TOKENS = (3, 14, 15, 92, 65, 35, 5, 77, 101, 33, 8, 9, 10, 4, 50, 61, 72, 83, 94, 105)
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "num_hidden_layers": 4}
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
EXPERTS = {**COUNTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
"""Of a width that vLLM's kernels take only with padding."""
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
FAMILIES = {
    **{
        kind: {}
        for kind in (
            "llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "olmo2", "glm4", "smollm3", "granite",
            "starcoder2", "stablelm", "ernie4_5", "hunyuan_v1_dense", "seed_oss",
        )
    },
    "gpt2": {"num_key_value_heads": 4},  # as many as of queries, whatever the configuration says
    **dict.fromkeys(("gemma3_text", "olmo3", "exaone4", "cohere2"), WINDOWS),
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 32},
    **dict.fromkeys(("qwen3_moe", "mixtral", "olmoe"), EXPERTS),
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "glm4_moe": {**EXPERTS, **GROUPS},
    "deepseek_v2": {**EXPERTS, **GROUPS, **LATENT},
    "deepseek_v3": {**EXPERTS, **GROUPS, **LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minicpm3": LATENT,
}  # fmt: skip
REFUSED = {"gpt_oss": {**EXPERTS, **WINDOWS}, "gpt_neox": {}}
"""Families that vLLM 0.32 computes or reloads otherwise: see docs/explorer.md."""


def made(kind):
    config = AutoConfig.for_model(kind, **{**SIZES, **{**FAMILIES, **REFUSED}[kind]})
    # Eager: transformers' SDPA leaves out Gemma 2's soft caps.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of a router; it is published, though no parameter
            buffer.copy_(0.1 * torch.randn(buffer.shape))
    return model


def changed(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


def logprobs(model, tokens=TOKENS):
    model.base_model.do_not_compile = True  # some classes are vLLM's too, which changes them in this process
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        return model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def converted(model, folder):
    """The Hugging Face folder of a checkpoint of the model, as a trainer makes both."""
    actor = folder / "global_step_1" / "actor"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(actor / "huggingface")
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    trained = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    torch.save(trained, actor / shard_name("model", 1, 0))
    return convert(actor.parent)


async def started(settings):
    """An engine, and by how much what it keeps of a token differs from the estimate, bytes."""
    engine = InProcessEngine(settings)
    os.environ.update(settings.environment())
    await engine.start()
    [specs] = engine._engine.collective_rpc("get_kv_cache_spec")
    kept = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    return engine, float(kept - kv_bytes_of_a_token(settings))


async def gaps_of(kind, folder):
    torch.manual_seed(0)
    model = made(kind)
    limits = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gib": 0.1}
    engine, beyond = await started(EngineSettings(str(converted(model, folder)), **limits))

    async def gap(of):
        return float((torch.tensor(await engine.score(TOKENS)) - logprobs(of)).abs().max())

    gaps = {"KV bytes": beyond, "start": await gap(model)}
    request = Request("one", np.array(TOKENS, np.int32), Sampling(max_tokens=8, min_tokens=8), seed=1)
    [sample] = (await engine.generate([request])).unpack()
    expected = logprobs(model, (*TOKENS, *sample.tokens.tolist()))[len(TOKENS) - 1 :]
    gaps["sampled"] = float((torch.tensor(sample.logprobs) - expected).abs().max())
    weights = open_versions("checkpoint", folder)
    for version in (1, 2):
        model = changed(model)
        weights.publish(version, model.state_dict().items(), WeightCheck(TOKENS, tuple(logprobs(model).tolist())))
        await engine.load(WeightSource("checkpoint", str(folder)), version)
        gaps[f"version {version}"] = await gap(model)
    model = changed(model)
    model.save_pretrained(folder / "other")
    await engine.load(WeightSource("folder", str(folder / "other")), 3)
    gaps["folder"] = await gap(model)
    await engine.stop()
    return gaps


async def gaps_with_adapter(kind, folder):
    """As `gaps_of`, of an adapter on all linear layers; and of the whole model into which it is merged."""
    torch.manual_seed(0)
    model = made(kind)
    base = converted(model, folder / "base")
    modules = [name for name in linear_names(model) if name not in WITHOUT_ADAPTER.get(kind, ())]
    adapter = add_adapter(model, LoraConfig(lora_rank=RANK, target_modules=modules), str(base), seed=0, dropout=False)
    named = {plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    matrices = {name: tensor.detach() for name, tensor in named.items() if is_adapter(name)}
    held = {name: digest(tensor) for name, tensor in named.items() if not is_adapter(name)}

    def change():
        for matrix in matrices.values():
            matrix.copy_(0.1 * torch.randn(matrix.shape))

    async def gap():
        return float((torch.tensor(await engine.score(TOKENS)) - logprobs(model)).abs().max())

    change()
    actor = folder / "global_step_1" / "actor"
    (actor / ADAPTER).mkdir(parents=True)
    (actor / ADAPTER / CONFIG).write_text(json.dumps(adapter.config))
    (actor.parent / STATE).write_text(json.dumps({"began": {}}))
    torch.save(matrices, actor / shard_name("model", 1, 0))
    merged = AutoModelForCausalLM.from_pretrained(convert(actor.parent, base, merge=True), attn_implementation="eager")
    gaps = {"merged": float((logprobs(merged) - logprobs(model)).abs().max())}
    limits = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gib": 0.1}
    adapted = {"lora_rank": RANK, "lora_modules": tuple(modules), "adapter_path": str(convert(actor.parent))}
    engine, gaps["KV bytes"] = await started(EngineSettings(str(base), **adapted, **limits))
    gaps["start"] = await gap()
    weights = open_versions("checkpoint", folder)
    for version in (2, 3):
        change()
        published = ((name, t * adapter.scaling if name.endswith(B) else t) for name, t in matrices.items())
        weights.publish(version, published, WeightCheck(TOKENS, tuple(logprobs(model).tolist())), pushed=held)
        await engine.load(WeightSource("checkpoint", str(folder)), version)
        gaps[f"version {version}"] = await gap()
    await engine.stop()
    return gaps


def together(kinds, measure):
    with tempfile.TemporaryDirectory() as folder:
        return {kind: asyncio.run(measure(kind, Path(folder) / kind)) for kind in kinds}


def alone(kind, options):
    """The gaps of a family from a process of its own, or the last line that this wrote."""
    command = [sys.executable, __file__, *options, "--together", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return {"error": next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "no reason")}
    return json.loads(done.stdout.splitlines()[-1])[kind]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(FAMILIES), metavar="KIND")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--lora", action="store_true", help="publish an adapter on all linear layers")
    args = parser.parse_args()
    if args.together:
        print(json.dumps(together(args.kinds, gaps_with_adapter if args.lora else gaps_of)))
        return
    within = 0
    for kind in args.kinds:
        gaps = alone(kind, ["--lora"] if args.lora else [])
        within += "error" not in gaps and max(map(abs, gaps.values())) < LIMIT
        print(f"{kind:18}", gaps.get("error") or "  ".join(f"{way} {gap:.1e}" for way, gap in gaps.items()), flush=True)
    print(f"{within} of {len(args.kinds)} families are within {LIMIT:g} nats")


if __name__ == "__main__":
    main()
