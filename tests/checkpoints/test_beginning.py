"""Digests of models, by values and names, wherever and however they are stored; the one that a run began with."""

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from raising import raising
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.exchange.checkpoints.beginning import Beginning, begin_from
from trinity_core.exchange.checkpoints.huggingface import tensors_sha256
from trinity_core.exchange.weights_digest import weights_digest
from trinity_core.run.driver import scores_by_stage


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(3000, 16, generator=generator),
        "norm": torch.randn(16, generator=generator),
        "head": torch.randn(5, 16, generator=generator),
    }


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    return folder


def test_copies_and_other_shards_are_equal(model, tmp_path):
    digest = weights_digest(str(model))
    (model / "config.json").write_text("{}")
    assert weights_digest(str(model)) == weights_digest(str(copytree(model, tmp_path / "copy"))) == digest != ""
    shards = tmp_path / "shards"
    shards.mkdir()
    values = tensors()
    save_file({"norm": values["norm"], "embed": values["embed"]}, shards / "model-00001-of-00002.safetensors")
    save_file({"head": values["head"]}, shards / "model-00002-of-00002.safetensors")
    assert weights_digest(str(shards)) == digest


@pytest.mark.parametrize("name", ["embed", "norm", "head"])
def test_each_tensor_counts(model, name):
    before, values = weights_digest(str(model)), tensors()
    values[name] += 1e-3
    save_file(values, model / "model.safetensors")
    assert weights_digest(str(model)) != before
    save_file(
        {("other" if key == name else key): value for key, value in tensors().items()}, model / "model.safetensors"
    )
    assert weights_digest(str(model)) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda _whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n",
        lambda whole: whole[:20],
        lambda whole: whole[:-20],
        lambda whole: whole[:8] + b"x" * (len(whole) - 8),
        lambda whole: whole[:8] + b"[]".ljust(int.from_bytes(whole[:8], "little")) + whole[8:],
        lambda _whole: b"",
    ],
    ids=["lfs_pointer", "cut_header", "cut_tensors", "no_json", "no_object", "empty"],
)
def test_a_damaged_file_is_named(model, damage):
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError):
        weights_digest(str(model))


def test_weights_of_torch_are_read_too(tmp_path):
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    first = weights_digest(str(tmp_path))
    torch.save(tensors(1), tmp_path / "pytorch_model.bin")
    assert first != weights_digest(str(tmp_path)) != ""
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    assert weights_digest(str(tmp_path)) == first


def test_hub_name_is_read_from_the_cache(model, tmp_path, monkeypatch):
    """The same weights under a name and in a folder are one model; another commit of the name is another one."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (model / "config.json").write_text("{}")
    assert weights_digest("org/name") == "" and weights_digest("neither / one") == ""
    copytree(model, repository / "snapshots" / "first")
    (repository / "refs" / "main").write_text("first")
    began = Beginning.of("org/name")
    assert began.digest and not began.differs(Beginning.of(str(model)))
    copytree(model, repository / "snapshots" / "second")
    save_file(tensors(1), repository / "snapshots" / "second" / "model.safetensors")
    (repository / "refs" / "main").write_text("second")
    assert began.differs(Beginning.of("org/name"))


def test_rollouts_of_another_adapter_are_not_trained_on(model, tmp_path):
    """Before the first checkpoint, which holds the adapter itself."""
    adapter, run = tmp_path / "adapter", tmp_path / "run"
    adapter.mkdir()
    run.mkdir()
    save_file(tensors(), adapter / "adapter_model.safetensors")
    begin_from(run, str(model), False, str(adapter))
    begin_from(run, str(model), True, str(copytree(adapter, tmp_path / "copy")))
    save_file(tensors(1), adapter / "adapter_model.safetensors")
    for other in (str(adapter), None):
        with raising(TrinityError, key="model.lora_configs[0].path"):
            begin_from(run, str(model), True, other)
    begin_from(run, str(model), False, str(adapter))
    begin_from(run, str(model), True, str(adapter))


def test_a_model_is_noted_once_the_weights_of_another_are_gone(model, tmp_path):
    """If they cannot be removed, the next start tries it again. The same model from elsewhere removes nothing."""
    (run := tmp_path / "run").mkdir()
    tries = []

    def fail():
        tries.append("failed")
        raise PermissionError("another user's shared memory")

    for _ in range(2):
        with pytest.raises(PermissionError):
            begin_from(run, str(model), False, forget=fail)
    begin_from(run, str(model), False, forget=lambda: tries.append("removed"))
    begin_from(run, str(copytree(model, tmp_path / "moved")), False, forget=fail)
    save_file(tensors(1), model / "model.safetensors")
    begin_from(run, str(model), False, forget=lambda: tries.append("removed"))
    assert tries == ["failed", "failed", "removed", "removed"]


def test_digest_does_not_depend_on_division_into_files(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, dtype=np.float16)}
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for folder in (one, two, other):
        folder.mkdir()
    save_arrays(tensors, one / "model.safetensors", {"format": "pt"})
    for name, value in tensors.items():
        save_arrays({name: value}, two / f"model-{name}.safetensors")
    assert tensors_sha256(one) == tensors_sha256(two)
    save_arrays({**tensors, "a": np.zeros(4, dtype=np.float16)}, other / "model.safetensors")
    assert tensors_sha256(other) != tensors_sha256(one)


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with raising(TrinityError, key=str(tmp_path)):
        tensors_sha256(tmp_path)


def test_stage_without_score_takes_first_score_of_next_stage() -> None:
    summaries = {"sft": {"score": None, "scores": {}}, "rft": {"score": 0.9, "scores": {"step 0": 0.4, "step 8": 0.9}}}
    assert [*scores_by_stage({"score": 0.1}, summaries).items()] == [("before", 0.1), ("sft", 0.4), ("rft", 0.9)]
    assert scores_by_stage({}, {"sft": summaries["sft"]}) == {"before": None, "sft": None}
