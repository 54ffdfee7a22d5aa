"""Conversion to Hugging Face: every format of shards, and what the command promises."""

import json
import multiprocessing
import os
import pickle
import shutil
import weakref
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkserver import PROCESSES
from ports import free_port
from raising import raising
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trinity_core.base.errors import DataError
from trinity_core.base.layout import ABANDONED, ADAPTER, JobLayout, shard_name
from trinity_core.data.tiny import make_tokenizer
from trinity_core.exchange.checkpoints import adapters, shards
from trinity_core.exchange.checkpoints import convert as convert_module
from trinity_core.exchange.checkpoints.adapters import CONFIG, WEIGHTS, A, B, read_config, write_adapter
from trinity_core.exchange.checkpoints.beginning import STATE
from trinity_core.exchange.checkpoints.commit import PUBLISHED, remove_old, write_manifest
from trinity_core.exchange.checkpoints.convert import convert, convert_all, find_steps, is_complete

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT = torch.arange(10)[None]


def tiny(tied=False, dtype=torch.float32, qwen3=False):
    torch.manual_seed(0)
    config = (Qwen3Config if qwen3 else Qwen2Config)(**SIZES, tie_word_embeddings=tied)
    if qwen3:
        config.head_dim = 8
    model = (Qwen3ForCausalLM if qwen3 else Qwen2ForCausalLM)(config).to(dtype).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def folder_for(root, step, model, with_config=True):
    actor = root / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    if with_config:
        model.config.save_pretrained(actor / "huggingface")
    return actor


def save_whole(actor, tensors, ranks=1):
    """As our trainer does: whole tensors, each in the file of one rank. Returns the step's folder."""
    for rank in range(ranks):
        mine = {name: t for i, (name, t) in enumerate(tensors.items()) if i % ranks == rank}
        torch.save(mine, actor / shard_name("model", ranks, rank))
    return actor.parent


def check(folder, model):
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == model.dtype
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_our_own_shards(tmp_path, dtype, tied, ranks):
    model = tiny(tied, dtype)
    actor = folder_for(tmp_path, 5, model)
    tensors = weights_of(model)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_whole(actor, tensors, ranks)
    folder = convert(actor.parent)
    check(folder, model)
    assert folder == actor / "huggingface"


def test_flat_pieces_are_refused(tmp_path):
    model = tiny()
    actor = folder_for(tmp_path, 1, model)
    tensors, ranks = weights_of(model), 3
    files = [{} for _ in range(ranks)]
    for name, t in tensors.items():
        flat = torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % ranks))
        for rank, piece in enumerate(flat.chunk(ranks)):
            files[rank][name] = piece.clone()
    for rank, content in enumerate(files):
        torch.save(content, actor / shard_name("model", ranks, rank))
    with pytest.raises(DataError) as caught:
        convert(actor.parent)
    assert caught.value.key in tensors


LAYOUTS = {
    "whole": ((1,), "s"),
    "two": ((2,), "s"),
    "three": ((3,), "s"),
    "hybrid": ((2, 2), "rs"),
    "tp": ((2, 2), "st"),
}
"""Name -> ranks along each dimension of the mesh, and how each divides a tensor: by rows, by columns or not."""


def _save_layouts(root):
    """What FSDP saves in each layout, one rank's part after the other: other members of a group are only pretended."""
    from torch.distributed.tensor import Replicate, Shard

    model = tiny()
    for name, (mesh_shape, kinds) in LAYOUTS.items():
        actor = folder_for(root / name, 1, model)

        def placements_of(tensor, kinds=kinds):
            at = {"s": Shard(0), "r": Replicate(), "t": Shard(tensor.dim() - 1) if tensor.dim() > 1 else Replicate()}
            return [at[kind] for kind in kinds]

        save_dtensors(actor, weights_of(model), mesh_shape, placements_of)


def save_dtensors(actor, tensors, mesh_shape, placements_of):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = prod(mesh_shape)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", mesh_shape)
        content = {}
        for name, whole in tensors.items():
            local, placements = whole, placements_of(whole)
            for dimension, placement in enumerate(placements):
                if placement.is_shard():
                    pieces = list(local.chunk(mesh_shape[dimension], dim=placement.dim))
                    pieces += [local.narrow(placement.dim, 0, 0)] * (mesh_shape[dimension] - len(pieces))
                    local = pieces[mesh.get_coordinate()[dimension]].clone()
            content[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        torch.save(content, actor / shard_name("model", world, rank))
        dist.destroy_process_group()


def _rank_of_two(rank, root, port):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.save(model.state_dict(), root / "real/global_step_1/actor" / shard_name("model", 2, rank))
    dist.destroy_process_group()


def _save_all(root, port):
    second = multiprocessing.get_context("fork").Process(target=_rank_of_two, args=(1, root, port))
    second.start()
    _rank_of_two(0, root, port)
    second.join()
    _save_layouts(root)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A folder for each of `LAYOUTS`, and `real`, which two processes have written.

    None of it in this process: torch keeps the groups of a process in tables that all of them share.
    """
    root = tmp_path_factory.mktemp("layouts")
    folder_for(root / "real", 1, tiny())
    first = PROCESSES.Process(target=_save_all, args=(root, free_port()))
    first.start()
    first.join()
    assert first.exitcode == 0
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "real"])
def test_fsdp_shards(layouts, name):
    check(convert(layouts / name / "global_step_1"), tiny())


def to_megatron(model, stacked, prefix=""):
    """The inverse of the mapping, from Megatron-Core's own description of its layout."""
    c, w = model.config, weights_of(model)
    groups, size = c.num_key_value_heads, w["model.layers.0.self_attn.k_proj.weight"].shape[0] // c.num_key_value_heads
    out = {
        "embedding.word_embeddings.weight": torch.nn.functional.pad(w["model.embed_tokens.weight"], (0, 0, 0, 14)),
        "decoder.final_layernorm.weight": w["model.norm.weight"],
        "output_layer.weight": torch.nn.functional.pad(w["lm_head.weight"], (0, 0, 0, 14)),
    }
    layers = []
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        layer = {
            "self_attention.linear_proj.weight": w[p + "self_attn.o_proj.weight"],
            "self_attention.linear_qkv.layer_norm_weight": w[p + "input_layernorm.weight"],
            "mlp.linear_fc1.layer_norm_weight": w[p + "post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat([w[p + "mlp.gate_proj.weight"], w[p + "mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": w[p + "mlp.down_proj.weight"],
        }
        for kind in ("weight", "bias"):
            if p + f"self_attn.q_proj.{kind}" in w:
                q, k, v = (w[p + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                rows = []
                for g in range(groups):
                    per = q.shape[0] // groups
                    rows += [q[g * per : (g + 1) * per], k[g * size : (g + 1) * size], v[g * size : (g + 1) * size]]
                layer[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        if p + "self_attn.q_norm.weight" in w:
            layer["self_attention.q_layernorm.weight"] = w[p + "self_attn.q_norm.weight"]
            layer["self_attention.k_layernorm.weight"] = w[p + "self_attn.k_norm.weight"]
        layers.append(layer)
    for name in layers[0]:
        if stacked:
            out[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            out |= {f"decoder.layers.{i}.{name}": layer[name] for i, layer in enumerate(layers)}
    return {prefix + name: tensor.contiguous() for name, tensor in out.items()}


@pytest.mark.parametrize(
    ("stacked", "qwen3", "prefix", "where"),
    [(False, False, "", "dist_ckpt"), (True, False, "model.", ""), (False, True, "model.module.", "dist_ckpt")],
)
def test_megatron(tmp_path, stacked, qwen3, prefix, where):
    from torch.distributed import checkpoint as dcp

    model = tiny(qwen3=qwen3)
    actor = folder_for(tmp_path, 1, model)
    state = to_megatron(model, stacked, prefix)
    state["optimizer.state.exp_avg"] = torch.zeros(3)
    dcp.save(state, checkpoint_id=actor / where, no_dist=True)
    check(convert(actor.parent), model)


class Evil:
    def __reduce__(self):
        return (print, ("this code must never run",))


def test_no_code_of_a_checkpoint_runs(tmp_path, capsys):
    model = tiny()
    actor = folder_for(tmp_path, 1, model)
    torch.save({"model.embed_tokens.weight": Evil()}, actor / shard_name("model", 1, 0))
    with raising(DataError, key=str(actor / shard_name("model", 1, 0))):
        convert(actor.parent)
    (actor / shard_name("model", 1, 0)).unlink()
    (actor / ".metadata").write_bytes(pickle.dumps(Evil()))
    with raising(DataError, key="builtins.print"):
        shards.read_megatron(actor)
    assert "never run" not in capsys.readouterr().out


def test_batch_single_step_and_paths_within(tmp_path):
    model = tiny()
    for step in (1, 2):
        save_whole(folder_for(tmp_path / "stage", step, model), weights_of(model))
    (tmp_path / "stage" / "global_step_3" / "actor").mkdir(parents=True)  # weights handed over, no checkpoint
    (tmp_path / "stage" / ".global_step_4.tmp-1" / "global_step_4").mkdir(parents=True)
    one = tmp_path / "stage" / "global_step_1"
    for inside in (one, one / "actor", one / "actor" / "huggingface"):
        assert find_steps(inside) == [one]
    (tmp_path / "latest").symlink_to(one)
    assert find_steps(tmp_path / "latest") == [one]
    assert [f.parent.parent.name for f in convert_all(tmp_path)] == ["global_step_1", "global_step_2"]
    folder, nothing = tmp_path / "stage" / "global_step_3", tmp_path / "nothing"
    with raising(DataError, key=str(folder / "actor")):
        convert_all(folder, _base(tmp_path, model))
    nothing.mkdir()
    for path in (nothing, tmp_path / "missing"):
        with raising(DataError, key=str(path)):
            convert_all(path)


def test_the_checkpoints_of_a_pipeline_are_those_of_its_stages(tmp_path):
    model = tiny()
    for stage, step in (("warm_up", 3), ("rft", 2)):
        save_whole(folder_for(tmp_path / f"run_{stage}", step, model), weights_of(model))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stages.json").write_text(json.dumps({"warm_up": "run_warm_up", "rft": "run_rft"}))
    assert [f.parent.parent.name for f in convert_all(tmp_path / "run")] == ["global_step_2", "global_step_3"]


def test_a_batch_leaves_out_what_cannot_be_converted(tmp_path):
    """What is damaged fails the call, after all others; what the run has abandoned does not."""
    model = tiny()
    for step in (1, 2, 3):
        save_whole(folder_for(tmp_path, step, model), weights_of(model))
    whole = (tmp_path / "global_step_3/actor" / shard_name("model", 1, 0)).read_bytes()
    for step in (1, 2):
        (tmp_path / f"global_step_{step}/actor" / shard_name("model", 1, 0)).write_bytes(whole[:100])
    (tmp_path / "global_step_2" / ABANDONED).touch()
    with pytest.raises(DataError):
        convert_all(tmp_path)
    assert is_complete(tmp_path / "global_step_3/actor/huggingface")
    (tmp_path / "global_step_1" / ABANDONED).touch()
    assert [f.parent.parent.name for f in convert_all(tmp_path)] == ["global_step_3"]
    (tmp_path / "global_step_3" / ABANDONED).touch()
    with raising(DataError, key=str(tmp_path)):
        convert_all(tmp_path)


def _base(tmp_path, model):
    base = tmp_path / "base"
    model.config.save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_text("not to be copied")
    return base


def test_a_second_conversion_does_nothing(tmp_path):
    model = tiny()
    actor = folder_for(tmp_path, 1, model)
    save_whole(actor, weights_of(model))
    file = convert(actor.parent) / "model.safetensors"
    before = file.stat().st_mtime_ns
    (actor / shard_name("model", 1, 0)).unlink()
    assert convert_all(tmp_path) == [file.parent]
    assert file.stat().st_mtime_ns == before


def test_missing_config_comes_from_base_model(tmp_path):
    model = tiny()
    actor = folder_for(tmp_path, 1, model, with_config=False)
    save_whole(actor, weights_of(model))
    with raising(DataError, key="--base-model-dir"):
        convert_all(tmp_path)
    folder = convert(actor.parent, _base(tmp_path, model))
    check_files = sorted(path.name for path in folder.iterdir())
    assert check_files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] or (
        check_files == ["config.json", "model.safetensors", "tokenizer.json"]
    )


def test_converted_models_stop_where_their_template_ends_answers(tmp_path):
    """As checkpoints of other trainers do not, whose base model has another end of sequence."""
    model = tiny()
    base, actor = _base(tmp_path, model), folder_for(tmp_path, 1, model)
    save_whole(actor, weights_of(model))
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id, "top_k": 3}))
    written = json.loads((convert(actor.parent, base) / "generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(written["eos_token_id"]) == ["<|endoftext|>", "<|im_end|>"]
    assert written["top_k"] == 3
    kept = json.loads((base / "generation_config.json").read_text())
    assert kept["eos_token_id"] == tokenizer.eos_token_id


def test_the_configuration_names_the_data_type(tmp_path, monkeypatch):
    """Torch's default, which all threads share, stays as it is: a train step may run beside the conversion."""
    model = tiny(dtype=torch.float32)
    model.config.dtype = torch.bfloat16
    actor = folder_for(tmp_path, 1, model)
    save_whole(actor, weights_of(model))
    defaults = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "set_default_dtype", defaults.append)
        folder = convert(actor.parent)
    assert set(defaults) <= {torch.get_default_dtype()}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


@pytest.mark.parametrize("harm", ["missing tensor", "wrong shape", "missing rank", "two worlds", "garbage", "untied"])
def test_what_does_not_fit_is_refused(tmp_path, harm):
    model = tiny(tied=harm == "untied")
    actor = folder_for(tmp_path, 1, model)
    tensors = weights_of(model)
    if harm == "missing tensor":
        tensors.pop("model.norm.weight")
    elif harm == "wrong shape":
        tensors["model.norm.weight"] = torch.ones(3)
    elif harm == "untied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_whole(actor, tensors, 2)
    if harm == "missing rank":
        (actor / shard_name("model", 2, 1)).unlink()
    elif harm == "two worlds":
        shutil.copy(actor / shard_name("model", 2, 1), actor / shard_name("model", 1, 0))
    elif harm == "garbage":
        (actor / shard_name("model", 2, 1)).write_bytes(b"garbage")
    with pytest.raises(DataError):
        convert(actor.parent)
    assert not is_complete(actor / "huggingface")


def test_damaged_checkpoint_is_not_converted(tmp_path):
    """Its size fits, its content does not."""
    model = tiny()
    actor = folder_for(tmp_path, 1, model)
    save_whole(actor, weights_of(model))
    write_manifest(actor.parent, 1)
    shard = actor / shard_name("model", 1, 0)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = b"\xff" * 64
    shard.write_bytes(content)
    with pytest.raises(DataError):
        convert(actor.parent)
    assert not is_complete(actor / "huggingface")


@pytest.mark.parametrize("published", [False, True])
def test_checkpoint_removed_meanwhile_is_not_made_again(tmp_path, monkeypatch, published):
    """The trainer saves step 4 while step 2 is converted. Where explorers may load step 2, its weights stay."""
    model, layout = tiny(), JobLayout(tmp_path)
    for step in (2, 4):
        save_whole(folder_for(tmp_path, step, model), weights_of(model))
        write_manifest(layout.step(step), step)
    for name in PUBLISHED if published else ():
        (layout.step(2) / name).write_text("{}")
    checked = convert_module.check_names

    def removing(*args):
        checked(*args)
        remove_old(layout, 4, 1)

    monkeypatch.setattr(convert_module, "check_names", removing)
    with raising(DataError, key=str(layout.step(2))):
        convert(layout.step(2))
    assert layout.steps() == ([2, 4] if published else [4]) and not layout.huggingface(2).exists()


def adapter_for(root, base, ranks=1):
    """A checkpoint of an adapter of the model in the folder `base`; its step's folder."""
    step = root / "global_step_1"
    (step / "actor" / ADAPTER).mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (step / "actor" / ADAPTER / CONFIG).write_text(json.dumps(config))
    (step / STATE).write_text(json.dumps({"began": {}}))
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"{name}{A}": torch.ones(2, 16), f"{name}{B}": torch.ones(16, 2)}
    if ranks:
        save_whole(step / "actor", tensors, ranks)
    return step


def test_an_adapter_is_merged_into_weights_of_torch_too(tmp_path):
    model = tiny()
    base = tmp_path / "base"
    model.config.save_pretrained(base)
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    folder = convert(adapter_for(tmp_path, base), base, merge=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight += 4.0
    check(folder, model)


def test_an_adapter_of_a_moved_stage_is_merged(tmp_path):
    model, root = tiny(), tmp_path / "root"
    base = convert(save_whole(folder_for(root / "p" / "warm_up", 3, model), weights_of(model)))
    adapter_for(root / "p" / "sft", base)
    model.config.save_pretrained(root / "p" / "sft" / "global_step_1" / "actor" / "huggingface")
    moved = root.rename(tmp_path / "moved") / "p" / "sft" / "global_step_1"
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight += 4.0
    check(convert(moved, merge=True), model)
    shutil.rmtree(tmp_path / "moved" / "p" / "warm_up")
    shutil.rmtree(moved / "actor" / "huggingface")
    model.config.save_pretrained(moved / "actor" / "huggingface")
    with raising(DataError, key="--base-model-dir"):
        convert(moved, merge=True)


@pytest.fixture
def held(monkeypatch):
    """With files of 4,000 bytes: bytes of the tensors that are held after each that was joined or merged."""
    monkeypatch.setattr("trinity_core.exchange.checkpoints.convert.LARGEST_FILE", 4000)
    made, held = [], []

    def counted(makes):
        def make(name, *args):
            tensor = makes(name, *args).clone()
            made.append(weakref.ref(tensor))
            held.append(sum(value.nbytes for one in made if (value := one()) is not None))
            return tensor

        return make

    for module, name in ((adapters, "merged_tensor"), (shards, "merge_dtensors")):
        monkeypatch.setattr(module, name, counted(vars(module)[name]))
    return held


def test_merging_holds_one_files_tensors_at_a_time(tmp_path, held):
    """Those that are merged; the others are mapped from the base's file."""
    model = tiny()
    model.save_pretrained(tmp_path / "base")
    folder = convert(adapter_for(tmp_path, tmp_path / "base"), tmp_path / "base", merge=True)
    assert len(held) == len([*model.parameters()]) and max(held) <= 4000
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight += 4.0
    check(folder, model)


def test_an_adapter_without_shards_is_not_converted(tmp_path):
    tiny().config.save_pretrained(tmp_path / "base")
    step = adapter_for(tmp_path, tmp_path / "base", ranks=0)
    for merged in (False, True):
        with raising(DataError, key=str(step / "actor")):
            convert(step, tmp_path / "base", merged)
    assert not (step / "actor" / ADAPTER / WEIGHTS).exists()


TENSORS = {"x.lora_A": torch.ones(2, 3), "x.lora_B": torch.ones(3, 2)}


@pytest.mark.parametrize(
    "more",
    [
        {"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"q_proj": 4}}, {"lora_bias": True},
        {"fan_in_fan_out": True}, {"init_lora_weights": "pissa"}, {"target_parameters": ["experts.down_proj"]},
        {"use_rslora": True}, {"layer_replication": [[0, 4], [2, 5]]}, {"trainable_token_indices": [0]},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_an_adapter_that_is_more_than_two_matrices_and_a_scale_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    write_adapter(TENSORS, {"r": 2, "lora_alpha": 4, **more}, tmp_path)
    with raising(DataError, key=next(iter(more))):
        read_config(tmp_path)


def test_an_adapter_as_peft_writes_it_is_read(tmp_path: Path) -> None:
    import peft

    peft.LoraConfig(r=2, lora_alpha=4, target_modules=["x"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    assert read_config(tmp_path)["r"] == 2


@pytest.mark.slow
def test_joining_holds_one_files_tensors_at_a_time(layouts, held, tmp_path):
    shutil.copytree(layouts / "two", tmp_path / "two", ignore=shutil.ignore_patterns("*.safetensors*"))
    check(convert(tmp_path / "two/global_step_1"), tiny())
    assert held and max(held) <= 4000


def test_large_models_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr("trinity_core.exchange.checkpoints.convert.LARGEST_FILE", 4000)
    model = tiny()
    actor = folder_for(tmp_path, 1, model)
    save_whole(actor, weights_of(model))
    folder = convert(actor.parent)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    check(folder, model)
    half_written = next(folder.glob("model-*.safetensors"))
    half_written.write_bytes(half_written.read_bytes()[:-100])
    assert not is_complete(folder)
    assert convert(actor.parent) == folder
    check(folder, model)
    half_written.unlink()
    assert not is_complete(folder)
