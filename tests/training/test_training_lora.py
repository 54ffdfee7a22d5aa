"""A policy with a LoRA adapter: what is trained, compared, published, saved, converted and resumed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from batches import make_answers, make_batch
from raising import raising
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.layout import ADAPTER
from trinity_core.config import LoraConfig
from trinity_core.exchange.checkpoints.adapters import (
    A,
    differences,
    is_adapter,
    linear_names,
    merged_tensor,
    merged_weight,
    plain_name,
    require_matrices,
    write_adapter,
)
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.exchange.sync.tensorfile import digest
from trinity_core.exchange.sync.versions import VersionPublisher
from trinity_core.training.checkpoint import Savepoints, largest_file, load, model_bytes
from trinity_core.training.distributed import Ranks, join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.lora import add_adapter, refuse_other_adapter
from trinity_core.training.policy import FastPaths
from trinity_core.training.publish import Publisher, kept_versions, make_weight_check, policy_weights, trainer_rank
from trinity_core.training.state import base_weights, optimizer_state, weights

LORA = "[{lora_rank: 4, lora_alpha: 12}]"
PATH = "buffer__trainer_input__experience_buffer__path"
KL = {"algorithm__kl_loss_fn": "k2", "algorithm__kl_loss_fn_args": "{kl_coef: 0.1}"}


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return join(0, 1, *meeting_point(), use_gpu=False)


@pytest.fixture
def learner(make_config: Any, ranks: Ranks) -> Any:
    def make(algorithm: str = "grpo", lora: str = LORA, **overrides: Any) -> Learner:
        config = make_config(algorithm, model__lora_configs=lora, **overrides)
        learner = Learner(config, 4, ranks)
        learner.config = config  # type: ignore[attr-defined]
        return learner

    return make


def trained(one: Learner, *steps: int) -> Learner:
    for step in steps:
        one.step(make_batch(step), step)
    return one


def logprobs(one: Learner) -> torch.Tensor:
    return torch.tensor(make_weight_check(one, 24).logprobs, dtype=torch.float64)


def test_merging_is_w_plus_s_b_a() -> None:
    """Compared with element-wise sums in float64, rounded once in half precision."""
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3, 5), (2, 5), (3, 2)))
    by_hand = torch.tensor(
        [[w[i, j] + 1.5 * sum(b[i, k] * a[k, j] for k in range(2)) for j in range(5)] for i in range(3)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(merged_weight(w, a, b, 1.5), by_hand, atol=1e-14, rtol=0)
    half = [matrix.to(torch.bfloat16) for matrix in (w, a, b)]
    exact = merged_weight(*(matrix.double() for matrix in half), 1.5)
    assert torch.equal(merged_weight(*half, 1.5), exact.to(torch.bfloat16))
    new = torch.tensor([[-0.0, 1.0]])
    unchanged = merged_weight(new, torch.ones(2, 2), torch.zeros(1, 2), 1.5)
    assert digest(unchanged) == digest(new), "a new adapter leaves the base as the engines have it, bit for bit"
    adapter = {"x.lora_A": a, "x.lora_B": b}
    assert torch.equal(merged_tensor("x.weight", w, adapter, 1.5), merged_weight(w, a, b, 1.5))
    assert merged_tensor("x.bias", w, adapter, 1.5) is w
    require_matrices(adapter, ["x.weight"])
    with raising(DataError, key="x"):
        require_matrices(adapter, ["y.weight"])


def test_only_the_adapter_is_trained_and_the_reference_is_the_base(
    learner: Any, ranks: Ranks, make_config: Any
) -> None:
    one = learner(**KL)
    base = {name: tensor.clone() for name, tensor in base_weights(one.engine)}
    whole = Learner(make_config(**KL), 4, ranks)
    start = logprobs(whole)
    assert torch.equal(logprobs(one), start), "a new adapter changes nothing"
    assert "actor/kl" in " ".join(trained(one, 1).step(make_batch(2), 2))
    assert all(torch.equal(base[name], tensor) for name, tensor in base_weights(one.engine))
    assert base.keys() == {name for name, _ in weights(whole.engine, tied=True)}
    assert (logprobs(one) - start).abs().max() > 1e-4
    assert all(tensor.any() for name, tensor in weights(one.engine) if name.endswith("B")), "each B has had a gradient"
    with one.reference.on_device():
        assert torch.equal(logprobs(one), start)
    batch = make_batch(3)
    assert one.step(batch, 3)["actor/kl_loss"] > 0, "the adapter is on again, and the reference does not follow it"
    merged = dict(base_weights(one.engine, merged=True))
    with torch.no_grad():
        for name, p in whole.engine.module.lm.named_parameters():
            p.copy_(merged[name])
    torch.testing.assert_close(logprobs(whole), logprobs(one), atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "ppo"])
def test_training_changes_only_the_adapter(learner: Any, make_config: Any, ranks: Ranks, algorithm: str) -> None:
    """The initial loss is that of the whole model."""
    rows, overrides = (make_batch(7), {}) if algorithm == "ppo" else (make_answers(7, repeats=2), {PATH: "rows"})
    one, whole = learner(algorithm, **overrides), Learner(make_config(algorithm, **overrides), 4, ranks)
    base = {name: tensor.clone() for name, tensor in base_weights(one.engine)}
    loss, expected = (trained.step(rows, 1)["actor/final_loss"] for trained in (one, whole))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(base[name], tensor) for name, tensor in base_weights(one.engine))
    assert all(tensor.any() for name, tensor in weights(one.engine) if name.endswith("B"))


def test_dropout_only_in_supervised_training(learner: Any) -> None:
    dropping = "[{lora_rank: 4, lora_dropout: 0.5}]"
    one, other = (
        learner("sft", dropping, **{PATH: "rows"}),
        learner("grpo", dropping),
    )
    layers = [
        [m for m in trained.engine.module.modules() if isinstance(m, torch.nn.Dropout) and m.training]
        for trained in (one, other)
    ]
    assert layers[0] and not layers[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_checkpoint_holds_the_adapter_and_resumes_bit_for_bit(learner: Any, tmp_path: Path, stage: int) -> None:
    one = trained(learner(trainer__zero_stage=stage), 1, 2)
    savepoints = Savepoints(one.config, one.ranks, one.engine.module.lm)
    savepoints.save(one, 2, None)
    savepoints.writer.close()
    folder = savepoints.layout.step(2)
    [file] = (folder / "actor").glob("model_*.pt")
    saved = torch.load(file, weights_only=True)
    assert len(saved) == 2 * 2 * 7 and {name.rpartition(".")[2] for name in saved} == {"lora_A", "lora_B"}
    trained(one, 3)
    following = {name: t.clone() for state in (weights, optimizer_state) for name, t in state(one.engine)}
    again = learner(trainer__zero_stage=stage)
    Savepoints(one.config, one.ranks, again.engine.module.lm).load(again, 2)
    trained(again, 3)
    for state in (weights, optimizer_state):
        for name, tensor in state(again.engine):
            assert torch.equal(tensor, following[name]), name


def test_another_adapter_or_base_is_refused(learner: Any, make_config: Any, tiny_model: Path, tmp_path: Path) -> None:
    base = copytree(tiny_model, tmp_path / "base")
    one = trained(learner(model__model_path=str(base)), 1)
    savepoints = Savepoints(one.config, one.ranks, one.engine.module.lm)
    savepoints.save(one, 1, None)
    savepoints.writer.close()
    folder = savepoints.layout.step(1)
    for lora in ("[{lora_rank: 8, lora_alpha: 12}]", "[]"):
        with pytest.raises(DataError):
            load(learner(lora=lora, model__model_path=str(base)), folder)
    tensors = load_file(base / "model.safetensors")
    save_file({name: value + 0.01 for name, value in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    again = learner(model__model_path=str(base))
    with raising(TrinityError, key="model.model_path"):
        Savepoints(again.config, one.ranks, again.engine.module.lm).load(again, 1)
    with pytest.raises(DataError):
        convert(folder, merge=True)
    assert differences({"target_modules": ["b", "a"], "r": 4}, {"target_modules": ["a", "b"], "r": 4}) == []


def test_conversion_writes_what_peft_reads_and_with_merge_a_whole_model(
    learner: Any, tiny_model: Path, make_config: Any, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    one = trained(learner(), 1, 2)
    savepoints = Savepoints(one.config, one.ranks, one.engine.module.lm)
    savepoints.save(one, 2, None)
    savepoints.writer.close()
    folder, whole = (convert(savepoints.layout.step(2), merge=merged) for merged in (False, True))
    assert folder.name == ADAPTER and convert(savepoints.layout.step(2)) == folder
    tokens = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert model_bytes(one) >= sum(p.nbytes for p in base.parameters()) > largest_file(one)
    with torch.no_grad():
        plain = base(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, folder).eval()(tokens).logits
        ours = one.engine.module.lm(tokens).logits
    torch.testing.assert_close(adapted, ours, atol=1e-4, rtol=0)
    torch.testing.assert_close(merged, ours, atol=1e-4, rtol=0)
    assert (plain - ours).abs().max() > 1e-3
    # A further run begins with that adapter, also with dropout, without which the fast paths are tried.
    settings = f"lora_rank: 4, lora_alpha: 12, path: '{folder}'"
    dropping = learner("sft", f"[{{{settings}, lora_dropout: 0.5}}]", **{PATH: "r"})
    assert dropping.engine.module.fast_paths == one.engine.module.fast_paths == FastPaths(True, True)
    at_start = learner(lora=f"[{{{settings}}}]")
    torch.testing.assert_close(logprobs(at_start), logprobs(one), atol=1e-6, rtol=0)
    with pytest.raises(TrinityError):
        learner(lora=f"[{{lora_rank: 4, path: '{folder}'}}]")
    with raising(TrinityError, key="model.lora_configs[0].path"):
        learner(lora=f"[{{lora_rank: 4, lora_alpha: 12, target_modules: [q_proj], path: '{folder}'}}]")


@pytest.mark.parametrize("stage", [0, 3])
def test_the_adapter_is_published_with_the_digests_of_its_base(learner: Any, tmp_path: Path, stage: int) -> None:
    one = trained(learner(trainer__zero_stage=stage), 1)
    versions = CheckpointVersions(one.config.job_dir)
    rank = trainer_rank(policy_weights(one.config, one), one.ranks, lambda version: True, lambda: False)
    writer = VersionPublisher(versions, rank)
    Publisher(one.config, one, versions, writer, lambda: 0).publish(1)
    published = dict(versions.load(1))
    held = dict(weights(one.engine))
    assert published.keys() == held.keys()
    for name, tensor in held.items():
        torch.testing.assert_close(published[name], tensor.detach() * (3.0 if name.endswith("B") else 1.0))
    base = {name: digest(tensor).values for name, tensor in base_weights(one.engine)}
    values = versions.values(1, "float32")
    assert {name: value for name, value in values.items() if name not in published} == base
    [file] = tmp_path.rglob("*.safetensors")
    assert file.stat().st_size < sum(tensor.nbytes for tensor in held.values()) + 10_000
    kept = {name: tensor.clone() for name, tensor in published.items()}
    writer.publish_kept(2, versions.check(1), kept)
    assert versions.values(2, "float32") == values


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(target_modules=["c_attn"])])
def test_transposed_matrices_are_refused(lora: LoraConfig) -> None:
    """Merging would add B A untransposed; for a square matrix without an error. The error names one of them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    lm = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with raising(TrinityError, key="model.lora_configs[0].target_modules") as caught:
        add_adapter(lm, lora, "gpt2", 0, dropout=False)
    assert "transformer.h.0.attn.c_attn" in str(caught.value)


@pytest.mark.parametrize(("modules", "refused"), [(["gate_proj", "up_proj", "down_proj"], True), (["o_proj"], False)])
def test_adapters_of_experts_are_refused(modules: list[str], refused: bool) -> None:
    """peft matches these names with the experts' matrices, whose adapters would all have the same name."""
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=4, hidden_size=32)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(lora_rank=4, target_modules=modules)
    with raising(TrinityError, key="model.lora_configs[0].target_modules") if refused else nullcontext():
        add_adapter(lm, lora, "base", 0, False)


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text", "qwen3_moe", "mixtral"])
def test_moe_adapters_only_on_linear_layers(kind: str, tmp_path: Path) -> None:
    """In trainer, engine and folder. Routers of the first two are linear layers by class but return a pair; for the
    others, peft's `all-linear` would include the experts."""
    import peft

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads)).eval()
    lm.save_pretrained(tmp_path / "base")
    told = linear_names(lm)
    adapter = add_adapter(lm, LoraConfig(lora_rank=4), str(tmp_path / "base"), 0, False)
    refuse_other_adapter(adapter.config | {"target_modules": "all-linear"}, adapter, tmp_path)
    with pytest.raises(DataError):
        refuse_other_adapter(adapter.config | {"target_modules": told[1:]}, adapter, tmp_path)
    tensors = {plain_name(name): p.detach() for name, p in lm.named_parameters() if is_adapter(plain_name(name))}
    assert {name.split(".")[-2] for name in tensors} == set(told)
    for tensor in tensors.values():
        tensor.normal_(std=0.1)
    write_adapter(tensors, adapter.config, tmp_path)
    tokens = torch.arange(3, 9)[None]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()(tokens).logits
        torch.testing.assert_close(adapted, lm(tokens).logits, atol=1e-5, rtol=0)


def test_versions_of_another_sync_method_are_ignored(tmp_path: Path) -> None:
    """With nccl a version is full weights, with other methods an adapter: the engines could not load the other kind."""
    for version, name in ((1, "x.weight"), (2, f"x{A}")):
        file = tmp_path / f"rollout_weights_{version}.safetensors"
        save_file({name: torch.ones(1)}, file, {"version": str(version), "check": "null"})
    assert [list(kept_versions(tmp_path, of_adapter)) for of_adapter in (False, True)] == [[1], [2]]


def test_excluded_matrices_get_no_adapter(learner: Any) -> None:
    lm = learner(lora="[{lora_rank: 4, exclude_modules: [q_proj, gate_proj]}]").engine.module.lm
    names = {plain_name(name).split(".")[-2] for name, p in lm.named_parameters() if p.requires_grad}
    assert names == {"k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    with raising(TrinityError, key="model.lora_configs[0].exclude_modules"):
        learner(lora="[{lora_rank: 4, exclude_modules: [qq_proj]}]")


def test_target_modules_that_cannot_be_trained_are_refused(learner: Any) -> None:
    for names in ("[no_such_proj]", "[embed_tokens]", "[q_proj, lm_head]"):
        with raising(TrinityError, key="model.lora_configs[0].target_modules"):
            learner(lora=f"[{{target_modules: {names}}}]")
