"""Rows that share a prompt give the log-probs and gradients of a padded batch."""

import json
from contextlib import nullcontext
from dataclasses import replace
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import VOCABULARY, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_outcomes import assert_as_alone, attend_by_length, outcome, save_random
from raising import raising
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl
from triton.errors import TritonError

from trinity_core.base.errors import TrinityError
from trinity_core.data.experience import Experience
from trinity_core.training import learner
from trinity_core.training.distributed import Ranks, SequenceGroup
from trinity_core.training.engine import beginning_on, decoder_layers
from trinity_core.training.micro import Padded, build_micro
from trinity_core.training.packing import Packed, masked_attention, pack
from trinity_core.training.policy import FastPaths, Policy, ValueModel, find_fast_paths, load_causal_lm
from trinity_core.training.sequence_parallel import install


@pytest.fixture(scope="module")
def lm(tiny_model):
    return load_causal_lm(str(tiny_model), torch.float64)


@pytest.mark.parametrize(("packing", "by_length"), [(True, False), (True, True), (False, False)])
def test_logprobs_and_gradients_equal_plain_computation(lm, packing, by_length, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_length)
    rows = make_batch(1)
    order = [5, 4, 6, 7, 0, 1, 2, 15, 9]
    width = max(e.response_length for e in rows)
    plain = build_micro(rows, order, width, packing=False)
    truth, gradients = outcome(lm, FastPaths(False, False), plain, "sdpa")
    micro = build_micro(rows, order, width, packing)
    assert isinstance(micro.inputs, Packed if packing else Padded)
    logprobs, own = outcome(lm, FastPaths(packing, True, by_length), micro, "trinity_packed")
    torch.testing.assert_close(logprobs, truth, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


class _OnCuda(torch.Tensor):
    is_cuda = True


def _on_cuda(*arguments, **others):
    micro = build_micro(*arguments, **others)
    return replace(micro, targets=micro.targets.as_subclass(_OnCuda))


@pytest.mark.parametrize("older", [False, True])
def test_attention_by_lengths_is_used_where_its_kernel_fits(tiny_model, older, monkeypatch):
    """With another torch version, whose kernel takes other arguments (2.11 has no `enable_gqa`), masks are used."""

    def in_torch_2_11(query, key, value, queries, keys, longest, longest_keys, *, scale, window_size):
        raise AssertionError("never called so")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", in_torch_2_11 if older else attend_by_length)
    lm = load_causal_lm(str(tiny_model), torch.bfloat16)

    monkeypatch.setattr("trinity_core.training.policy.build_micro", _on_cuda)
    assert find_fast_paths(lm) == FastPaths(True, True, by_length=not older)


def test_a_head_kernel_that_does_not_compile_is_not_used(tiny_model, monkeypatch):
    def compile_for_this_gpu(*args, kernels, **others):
        raise TritonError("out of shared memory")

    monkeypatch.setattr("trinity_core.training.policy.token_logprobs_and_entropy", compile_for_this_gpu)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_length)
    monkeypatch.setattr("trinity_core.training.policy.build_micro", _on_cuda)
    assert not find_fast_paths(load_causal_lm(str(tiny_model), torch.bfloat16)).head_kernels


def test_repeated_heads_equal_grouped_query_attention():
    """The order of heads must match an explicit softmax(q k) v."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 4, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, 9, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 1, 4, 9, generator=generator) > 0.3
    outcomes = []
    for repeat_heads in (True, False):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        out = masked_attention(*inputs, mask, 0.3, repeat_heads)
        outcomes.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*outcomes)
    for head in range(6):
        scores = (query[:, head] @ key[:, head // 3].mT * 0.3).masked_fill(~mask[:, 0], -torch.inf)
        torch.testing.assert_close(outcomes[0][0][:, head], scores.softmax(-1) @ value[:, head // 3])


def test_logprobs_align_with_their_tokens(lm):
    rows = make_batch(2)
    micro = build_micro(rows, range(len(rows)), max(e.response_length for e in rows)).to(torch.device("cpu"))
    lm.set_attn_implementation("trinity_packed")
    with torch.no_grad():
        grid = micro.grid(Policy(lm, FastPaths(True, True))(micro, 1.0, "none")[0])
    lm.set_attn_implementation("eager")
    assert_as_alone(grid, rows, lm)


def test_gradient_checkpointing_changes_nothing(lm):
    rows = make_batch(3)
    micro = build_micro(rows, range(6), max(e.response_length for e in rows))
    truth, gradients = outcome(lm, FastPaths(True, True), micro, "trinity_packed")
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs, own = outcome(lm, FastPaths(True, True), micro, "trinity_packed")
    lm.gradient_checkpointing_disable()
    assert torch.equal(logprobs, truth)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient)


def test_first_layers_of_a_model_compute(tiny_model):
    """The device has no room for its last layers."""
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    lm = load_causal_lm(str(tiny_model), torch.float32, overrides=layers)
    tokens, names = torch.arange(3, 20)[None], list(lm.state_dict())
    whole = lm(tokens).logits
    with beginning_on(torch.device("cpu"), lm):
        assert len(decoder_layers(lm)) == 2
        assert find_fast_paths(lm) == FastPaths(packing=True, own_head=True)
        lm.set_attn_implementation("sdpa")
        assert not torch.allclose(lm(tokens).logits, whole)
    assert list(lm.state_dict()) == names and torch.equal(lm(tokens).logits, whole)


def test_fast_paths_are_tried_before_use(tiny_model):
    lm = load_causal_lm(str(tiny_model), torch.float32)
    assert find_fast_paths(lm) == FastPaths(packing=True, own_head=True)
    assert lm.config._attn_implementation == "trinity_packed"
    window = {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"]}
    windowed = load_causal_lm(str(tiny_model), torch.float32, overrides=window)
    assert find_fast_paths(windowed) == FastPaths(packing=False, own_head=True)
    assert windowed.config._attn_implementation == "sdpa"


def test_sliding_window_of_all_layers_is_detected(tmp_path):
    """Mistral names no layer types. The rows are longer than the window."""
    save_random("mistral", tmp_path, num_key_value_heads=1, sliding_window=16)
    fast_paths = find_fast_paths(lm := load_causal_lm(str(tmp_path), torch.float32))
    assert fast_paths == FastPaths(packing=False, own_head=True)
    rng = np.random.default_rng(0)
    rows = [
        Experience(tokens=rng.integers(3, VOCABULARY, 10 + n), prompt_length=10, action_mask=np.ones(n, dtype=bool))
        for n in (30, 17)
    ]
    micro = build_micro(rows, range(2), 30, fast_paths.packing).to(torch.device("cpu"))
    plain = load_causal_lm(str(tmp_path), torch.float32)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        assert_as_alone(micro.grid(Policy(lm, fast_paths)(micro, 1.0, "none")[0]), rows, plain)
    assert find_fast_paths(load_causal_lm(str(tmp_path), torch.float32, overrides={"sliding_window": None})).packing


MODELS = {
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "packing"), [("deepseek_v3", True), ("gpt_oss", False)])
def test_attention_of_other_shapes(kind, packing, tmp_path):
    """Values of another size than keys; sinks and windows, for which transformers has no SDPA."""
    from transformers import AutoModelForCausalLM

    save_random(kind, tmp_path, num_key_value_heads=2, **MODELS[kind])
    lm = load_causal_lm(str(tmp_path), torch.float32)
    fast_paths = find_fast_paths(lm)
    assert fast_paths == FastPaths(packing, own_head=True)
    rows = make_batch(2)
    micro = build_micro(rows, range(4), max(e.response_length for e in rows), packing).to(torch.device("cpu"))
    logprobs = Policy(lm, fast_paths)(micro, 1.0, "none")[0]
    logprobs.sum().backward()
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert_as_alone(micro.grid(logprobs.detach()), rows, plain)
    if packing:
        with raising(TrinityError, key="trainer.ulysses_sequence_parallel_size"):
            install(lm, SequenceGroup(0, 2, None))


def test_unsupported_path_is_not_used(tiny_model, monkeypatch):
    lm = load_causal_lm(str(tiny_model), torch.float32)
    forward = lm.base_model.forward

    def of_its_own_code(*args, **kwargs):
        if "packed" in kwargs:
            raise TypeError("forward() got an unexpected keyword argument 'packed'")
        return forward(*args, **kwargs)

    monkeypatch.setattr(lm.base_model, "forward", of_its_own_code)
    assert find_fast_paths(lm) == FastPaths(packing=False, own_head=True)
    assert lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("by_length", [False, True])
def test_a_trial_that_runs_out_of_memory_raises(tiny_model, by_length, monkeypatch):
    """Running out of memory says nothing about the path, and must not disable packing."""
    lm = load_causal_lm(str(tiny_model), torch.bfloat16)
    forward = lm.base_model.forward

    def full(*args, **kwargs):
        if "packed" in kwargs and by_length == (kwargs["packed"].mask is None):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(lm.base_model, "forward", full)
    monkeypatch.setattr("trinity_core.training.policy.build_micro", _on_cuda)
    with pytest.raises(torch.OutOfMemoryError):
        find_fast_paths(lm)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ('{"model_type": "no_such_model"}', "model.model_path"),
        ('{"auto_map": {"AutoConfig": "own.Config"}}', "model.trust_remote_code"),
    ],
)
def test_a_model_that_transformers_cannot_load(config, key, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with raising(TrinityError, key=key):
        load_causal_lm(str(tmp_path), torch.float32)


@pytest.mark.parametrize("reads", [True, False])
def test_attention_named_in_a_models_folder_is_not_used(tiny_model, reads, tmp_path):
    """Its package need not be installed."""
    folder = copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attn_implementation": "flash_attention_2"}))
    lm = load_causal_lm(str(folder), torch.float32, reads=reads)
    assert lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.5}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5, "dropout": 0.5, "attention_dropout": 0.5}),
        ("qwen2", {"num_key_value_heads": 1, "attention_dropout": 0.5}),
    ],
)
def test_dropout_is_off_in_training(kind, dropout, tmp_path):
    """Probabilities in modules (GPT-2), in attributes of layers (OPT), or passed to attention (Qwen2)."""
    save_random(kind, tmp_path, **dropout)
    lm = load_causal_lm(str(tmp_path), torch.float32)
    fast_paths = find_fast_paths(lm)
    assert fast_paths == FastPaths(packing=True, own_head=True)
    rows = make_batch(2)
    micro = build_micro(rows, range(4), max(e.response_length for e in rows)).to(torch.device("cpu"))
    with torch.no_grad():
        training = Policy(lm.train(), fast_paths).train()(micro, 1.0, "none")[0]
        evaluating = Policy(lm, fast_paths).eval()(micro, 1.0, "none")[0]
    assert torch.equal(training, evaluating)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kind", "noise"), [("mixtral", {}), ("phimoe", {"input_jitter_noise": 0.3})])
def test_router_noise_is_off_in_training(kind, noise, checkpointing, tmp_path):
    """Mixtral adds noise to the router's input; Phi-MoE also samples its experts."""
    from transformers import AutoModelForCausalLM

    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}
    save_random(kind, tmp_path, **experts, **noise)
    lm = load_causal_lm(str(tmp_path), torch.float32)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    rows = make_batch(2)
    micro = build_micro(rows, range(4), max(e.response_length for e in rows), packing=False)
    policy = Policy(lm, FastPaths(packing=False, own_head=True)).train()
    first, second = policy(micro, 1.0, "none")[0], policy(micro, 1.0, "none")[0]
    assert first.requires_grad and torch.equal(first, second)
    recomputed = []
    for layer in lm.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: recomputed.append(1))
    policy(micro, 1.0, "none")[0].sum().backward()
    assert len(recomputed) == (4 if checkpointing else 2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        truth = Policy(plain, FastPaths(packing=False, own_head=False)).eval()(micro, 1.0, "none")[0]
    torch.testing.assert_close(first.detach(), truth, atol=1e-5, rtol=0)


def test_values_belong_to_state_before_the_token(lm):
    rows = make_batch(4)[:1]
    model = ValueModel(lm, FastPaths(True, True), 64, torch.float64)
    torch.nn.init.normal_(model.value_head.weight)
    lm.set_attn_implementation("trinity_packed")
    values = model(build_micro(rows, [0], rows[0].response_length).to(torch.device("cpu")))
    lm.set_attn_implementation("eager")
    hidden = lm.base_model(torch.tensor(rows[0].tokens[None]).long()).last_hidden_state[0]
    places = rows[0].prompt_length - 1 + np.flatnonzero(rows[0].action_mask)
    torch.testing.assert_close(values, model.value_head(hidden[places]).squeeze(-1).float(), atol=1e-5, rtol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12))
@settings(max_examples=40)
def test_packed_layout_has_each_prompt_once_at_right_positions(rows):
    prompts = [np.arange(100 * g, 100 * g + g + 1, dtype=np.int32) for g, _ in rows]
    responses = [np.arange(1000 + i, 1000 + i + r, dtype=np.int32) for i, (_, r) in enumerate(rows)]
    packed, last, first = pack(prompts, responses)
    tokens, positions = packed.tokens[0].numpy(), packed.positions[0].numpy()
    assert len(tokens) == sum(g + 1 for g in {g for g, _ in rows}) + sum(r for _, r in rows)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert tokens[last[i]] == prompt[-1] and positions[last[i]] == len(prompt) - 1
        place = slice(first[i], first[i] + len(response))
        assert (tokens[place] == response).all()
        assert (positions[place] == len(prompt) + np.arange(len(response))).all()
    assert (packed.slots[packed.home] == torch.arange(len(tokens))).all()
    assert len(packed.padding) + len(tokens) == len(packed.slots)


def test_paths_that_fail_on_the_device_are_not_used(lm, monkeypatch):
    """The trial on the host, before ZeRO 3 partitions the model, leaves the attention unchanged."""
    trials = iter([FastPaths(True, True), FastPaths(False, True)])
    monkeypatch.setattr(learner, "find_fast_paths", lambda _: next(trials))
    monkeypatch.setattr(learner, "beginning_on", lambda *_: nullcontext())
    ranks = Ranks(0, 1, torch.device("meta"))
    assert learner.fast_paths_on_first(lm, ranks) == FastPaths(False, True)


@pytest.mark.parametrize(("fails", "kernel"), [(None, "FA3"), ("import", None), ("head", None)])
def test_flash_attention_3_is_used_where_its_package_is_and_fits(tiny_model, fails, kernel, monkeypatch):
    """Otherwise FlashAttention 2, torch's own."""
    asked = []

    def register():
        if fails == "import":
            raise ImportError("built for another torch")
        return SimpleNamespace(remove=lambda: None)

    def attend(*inputs, **others):
        asked.append(current_flash_attention_impl())
        if asked[-1] == "FA3" and fails == "head":
            raise RuntimeError("head dimension not supported")
        return attend_by_length(*inputs, **others)

    lm = load_causal_lm(str(tiny_model), torch.bfloat16)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    monkeypatch.setattr("trinity_core.training.policy.build_micro", _on_cuda)
    monkeypatch.setattr("trinity_core.training.policy.find_spec", lambda name: name == "flash_attn_interface")
    try:
        assert find_fast_paths(lm) == FastPaths(True, True, by_length=True)
        assert current_flash_attention_impl() == asked[-1] == kernel
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
