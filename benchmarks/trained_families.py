"""Training of many model families against transformers: log-probs, entropies and gradients.

Uses a small model of each family, with random weights in float32, on the CPU. Prints the largest gap between the
trainer's micro-batch and transformers computing one row after another: in nats for log-probs and entropies, relative to
the largest one for gradients. `rows` are packed or padded, as the trainer chooses; `padded`, `sliced` (the head in
slices of the vocabulary), `recomputed` (gradient checkpointing), `compiled` (packed rows, as torch captures layers),
`critic` and `adapter` are other ways through the model. `untrained` is 0 if the trainer chooses no faster ways for
initial weights in bfloat16, which hide much. The claim: each gap is below 1e-4, for the families of docs/training.md.

    python benchmarks/trained_families.py                 # all families
    python benchmarks/trained_families.py gemma2 mixtral  # these
"""

import argparse
import logging
import tempfile

import numpy as np
import torch
from model_families import EXPERTS, FAMILIES, GROUPS, LATENT, REFUSED, SIZES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from trinity_core.base.errors import TrinityError
from trinity_core.config import LoraConfig
from trinity_core.data.experience import Experience
from trinity_core.training import policy as policy_module
from trinity_core.training.engine import decoder_layers
from trinity_core.training.lora import add_adapter
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import Policy, ValueModel, decoder, find_fast_paths, load_causal_lm

LIMIT = 1e-4
WINDOW = 16
"""Longer than the rows on which the trainer tries its ways, shorter than the longest row here."""
STATES = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_d_ssm": 256, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16,
    "mamba_chunk_size": 16, "chunk_size": 16, "mamba_dt_rank": 8, "use_mamba_kernels": False,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}  # fmt: skip
ROTARY = {"rotary_dim": 16}
MIXED = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
TRAINED = {
    **FAMILIES,
    **REFUSED,
    **{
        kind: {}
        for kind in (
            "glm", "nemotron", "cohere", "olmo", "apertus", "arcee", "helium", "persimmon", "biogpt", "diffllama",
            "bloom", "gpt_bigcode",
        )
    },
    **dict.fromkeys(("granitemoe", "phimoe", "minimax_m2", "jetmoe", "ernie4_5_moe", "flex_olmo", "laguna"), EXPERTS),
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.1},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": [2, 2]},
    "dots1": {**EXPERTS, **GROUPS},
    "youtu": LATENT,
    **dict.fromkeys(("gptj", "codegen"), ROTARY),
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_layers": 2},
    "vaultgemma": {"sliding_window": WINDOW, "num_hidden_layers": 4, "query_pre_attn_scalar": 32},
    "mimo_v2_flash": {**EXPERTS, "sliding_window": WINDOW, "num_hidden_layers": 4},
    "llama4_text": {**EXPERTS, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 96, "num_hidden_layers": 4},
    "doge": {"keep_window_size": WINDOW},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 48},
    "olmo_hybrid": LINEAR,
    "granitemoehybrid": {**EXPERTS, **STATES, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96},
    "bamba": {**STATES, "attn_layer_indices": [1]},
    "falcon_h1": STATES,
    "jamba": {**EXPERTS, **STATES, **MIXED},
    "mamba": {"state_size": 16, "expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "recurrent_gemma": {"attention_window_size": WINDOW, "lru_width": 128, "num_hidden_layers": 3},
}  # fmt: skip


def config_of(kind):
    settings = {**SIZES, **TRAINED[kind]}
    if "sliding_window" in settings:
        settings["sliding_window"] = WINDOW
    return AutoConfig.for_model(kind, **settings)


def save_model(kind, folder):
    """A model whose parts all tell, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="eager").float()
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
        elif not name.endswith(("A_log", "dt_bias")):
            p.data += 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)


def make_rows():
    """Rows that share prompts or not, shorter and longer than the window; the last has a prompt alone."""
    rng = np.random.default_rng(0)
    rows = []
    for group, (prompt_length, responses) in enumerate([(6, (20, 9)), (13, (3, 14)), (1, (11,)), (9, (5,))]):
        prompt = rng.integers(3, SIZES["vocab_size"], prompt_length)
        for length in responses:
            tokens = np.concatenate([prompt, rng.integers(3, SIZES["vocab_size"], length)])
            mask = (rng.random(length) < 0.8) & (group < 3)
            rows.append(Experience(tokens=tokens, prompt_length=prompt_length, action_mask=mask))
    return rows


ROWS = make_rows()


def micro(packing):
    return build_micro(ROWS, range(len(ROWS)), 20, packing)


def outcome(lm, values, entropies):
    """Values, entropies, and gradients by name of a sum of both."""
    lm.zero_grad()
    ((values * torch.linspace(-1, 1, len(values))).sum() + 0.1 * entropies.sum()).backward()
    named = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    return values.detach(), entropies.detach(), named


def alone(lm, of):
    """`of(tokens)`, [L, ...], at the tokens with loss: of one row after another."""
    parts = []
    for row in ROWS:
        tokens = torch.tensor(row.tokens).long()
        parts.append(of(tokens)[row.prompt_length - 1 : -1][torch.tensor(row.action_mask)])
    return torch.cat(parts)


def expected_policy(lm):
    def logprobs(tokens):
        logprobs = (lm(tokens[None], use_cache=False).logits[0].float() / 0.7).log_softmax(-1)
        chosen = logprobs.gather(-1, tokens.roll(-1)[:, None])[:, 0]
        return torch.stack([chosen, -(logprobs.exp() * logprobs).sum(-1)], -1)

    return outcome(lm, *alone(lm, logprobs).unbind(-1))


def gap(expected, actual):
    largest = max(float(gradient.abs().max()) for gradient in expected[2].values())
    gaps = [float((a - b).abs().max()) for a, b in zip(expected[:2], actual[:2], strict=True)]
    for name in {**expected[2], **actual[2]}:
        a, b = (grads.get(name, torch.zeros(())) for grads in (expected[2], actual[2]))
        gaps.append(float((a - b).abs().max()) / largest)
    return max(gaps)


def policy_gaps(lm, plain):
    expected, paths = expected_policy(plain), find_fast_paths(lm)

    def of(packing):
        return gap(expected, outcome(lm, *Policy(lm, paths)(micro(packing), 0.7, "loss")))

    gaps = {"rows": of(paths.packing), "padded": of(False)}
    if paths.own_head:
        at_once, policy_module.LOGITS_AT_ONCE = policy_module.LOGITS_AT_ONCE, 0
        gaps["sliced"] = of(paths.packing)
        policy_module.LOGITS_AT_ONCE = at_once
    if lm.supports_gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        gaps["recomputed"] = of(paths.packing)
        lm.gradient_checkpointing_disable()
    if paths.packing:  # as torch captures the layers, forward and backward; not their code for a GPU
        torch._dynamo.reset()
        for layer in decoder_layers(lm):
            layer.compile(dynamic=True, backend="aot_eager")
        gaps["compiled"] = of(True)
        for layer in decoder_layers(lm):
            layer._compiled_call_impl = None
    return gaps, paths


def critic_gap(lm, plain, paths):
    critic = ValueModel(lm, paths, lm.get_output_embeddings().weight.shape[1], torch.float32)
    torch.nn.init.normal_(critic.value_head.weight, std=0.1)
    nothing = torch.zeros(1)
    hidden = alone(plain, lambda tokens: decoder(plain)(tokens[None], use_cache=False).last_hidden_state[0])
    expected = outcome(plain, critic.value_head(hidden)[:, 0], nothing)
    return gap(expected, outcome(lm, critic(micro(paths.packing)), nothing))


def adapter_gap(folder):
    lm = load_causal_lm(folder, torch.float32, max_model_len=64)
    add_adapter(lm, LoraConfig(lora_rank=4), folder, 0, dropout=False)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    paths = find_fast_paths(lm)
    actual = outcome(lm, *Policy(lm, paths)(micro(paths.packing), 0.7, "loss"))
    lm.eval().set_attn_implementation("eager")
    return gap(expected_policy(lm), actual)


def is_slower(kind, paths, folder):
    """Whether untrained weights in half precision give no faster ways than these."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(folder)
    other = find_fast_paths(load_causal_lm(folder, torch.bfloat16, max_model_len=64))
    return other.packing <= paths.packing and other.own_head <= paths.own_head


def check(kind):
    """Gaps by the way through the model, and whether its rows share prompts."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as untrained:
        save_model(kind, folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        lm = load_causal_lm(folder, torch.float32, max_model_len=64)
        gaps, paths = policy_gaps(lm, plain)
        gaps["critic"] = critic_gap(lm, plain, paths)
        try:
            gaps["adapter"] = adapter_gap(folder)
        except TrinityError as error:
            logging.info("%s: %s", kind, error)  # GPT-2's matrices, Mamba's
        gaps["untrained"] = 0.0 if is_slower(kind, paths, untrained) else 1.0
    return gaps, paths.packing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(TRAINED), metavar="KIND")
    disable_progress_bar()
    logging.disable(logging.WARNING)
    kinds, within = parser.parse_args().kinds, 0
    for kind in kinds:
        gaps, packing = check(kind)
        within += max(gaps.values()) < LIMIT
        parts = "  ".join(f"{way} {gap:.0e}" for way, gap in gaps.items())
        print(f"{kind:18} {'packed' if packing else 'padded'}  {parts}", flush=True)
    print(f"{within} of {len(kinds)} families are within {LIMIT:g}")


if __name__ == "__main__":
    main()
