"""The files next to a checkpoint's weights are made when training starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.training.checkpoint import make_model_files, write_model_files
from trinity_core.training.policy import load_causal_lm

UNUSUAL = {"temperature": 0.9, "top_p": 0.6}
"""Without `do_sample`: transformers loads this with a warning, and refuses to save it."""

TEXT = " Hello  world,\n\n12345 eggs; don't 你好"


@pytest.fixture
def model(make_config: Any, tiny_model: Path, tmp_path: Path) -> Any:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps(UNUSUAL))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return make_config(model__model_path=folder).model


def test_model_files_survive_the_loss_of_the_model(model: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    lm = load_causal_lm(model.model_path, torch.float32)
    files = make_model_files(lm, model)
    shutil.rmtree(model.model_path)  # whatever becomes of the model, the checkpoint is written
    write_model_files(files, tmp_path / "written")
    written = AutoConfig.from_pretrained(tmp_path / "written")
    assert written.to_diff_dict() == lm.config_as_given.to_diff_dict()
    assert (written.attention_dropout, lm.config.attention_dropout) == (0.1, 0.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "written").chat_template
    generation = GenerationConfig.from_pretrained(tmp_path / "written")
    assert {name: getattr(generation, name) for name in UNUSUAL} == UNUSUAL


def test_exported_model_stops_where_its_template_does(model: Any) -> None:
    """Other programs only read `generation_config.json`."""
    folder, template = Path(model.model_path), "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    files = make_model_files(load_causal_lm(model.model_path, torch.float32), model)
    usual = json.loads(files["generation_config.json"])["eos_token_id"]
    model = model.model_copy(update={"custom_chat_template": template})
    files = make_model_files(load_causal_lm(model.model_path, torch.float32), model)
    tokenizer = load_tokenizer(model.model_path)
    assert usual == [0, tokenizer.eos_token_id]
    ends = json.loads(files["generation_config.json"])["eos_token_id"]
    assert ends == [0, *sorted(tokenizer.convert_tokens_to_ids(["<|im_start|>", tokenizer.eos_token]))]


def test_model_with_broken_tokenizer_is_refused_at_start(model: Any) -> None:
    lm = load_causal_lm(model.model_path, torch.float32)
    (Path(model.model_path) / "tokenizer.json").write_text("{")
    with raising(TrinityError, key="model.model_path"):
        make_model_files(lm, model)


@pytest.mark.parametrize("given", ["custom_chat_template", "chat_template_path"])
def test_exported_tokenizer_has_the_chat_template_in_force(make_config: Any, tmp_path: Path, given: str) -> None:
    from transformers import AutoTokenizer

    template = '{% for m in messages %}<{{ m["role"] }}>{{ m["content"] }}{% endfor %}'
    (tmp_path / "chat.jinja").write_text(template)
    value = f"'{template}'" if given == "custom_chat_template" else str(tmp_path / "chat.jinja")
    model = make_config(**{f"model__{given}": value}).model
    write_model_files(make_model_files(load_causal_lm(model.model_path, torch.float32), model), tmp_path / "written")
    exported = AutoTokenizer.from_pretrained(tmp_path / "written")
    messages = [{"role": "user", "content": "1 + 1?"}]
    assert exported.apply_chat_template(messages, tokenize=False) == "<user>1 + 1?"


def test_exported_tokenizer_is_the_one_trained_with(model: Any, tmp_path: Path) -> None:
    """Transformers 5 builds another one for `LlamaTokenizerFast`, which DeepSeek gives to byte-level tokenizers."""
    from transformers import AutoTokenizer

    change(Path(model.model_path) / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    change(Path(model.model_path) / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    trained = load_tokenizer(model.model_path)
    files = make_model_files(load_causal_lm(model.model_path, torch.float32), model)
    assert files["tokenizer.json"] == (Path(model.model_path) / "tokenizer.json").read_bytes()
    write_model_files(files, tmp_path / "written")
    for exported in (AutoTokenizer.from_pretrained(tmp_path / "written"), load_tokenizer(str(tmp_path / "written"))):
        assert exported(TEXT)["input_ids"] == trained(TEXT)["input_ids"]
        assert exported.decode(trained(TEXT)["input_ids"]) == TEXT
    with_code = model.model_copy(update={"trust_remote_code": True})
    assert load_tokenizer(model.model_path, with_code.trust_remote_code)(TEXT) == trained(TEXT)


def test_exported_configuration_is_the_models_own_unless_the_run_changes_it(model: Any) -> None:
    """Transformers 4 reads `rope_theta`; in the form of transformers 5 it silently takes its default."""
    path = Path(model.model_path) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 500000.0}, indent=3))
    lm = load_causal_lm(model.model_path, torch.bfloat16)
    assert make_model_files(lm, model)["config.json"] == path.read_bytes()
    changed = load_causal_lm(model.model_path, torch.float32, False, {"max_position_embeddings": 77})
    written = json.loads(make_model_files(changed, model)["config.json"])
    assert written["max_position_embeddings"] == 77 and written["rope_parameters"]["rope_theta"] == 500000.0


def test_code_of_the_models_own_is_exported(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(model.model_path)
    (folder / "configuration_my.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass MyConfig(Qwen2Config):\n    model_type = 'my_model'\n"
    )
    (folder / "modeling_my.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\nfrom .configuration_my import MyConfig\n\n\n"
        "class MyModel(Qwen2ForCausalLM):\n    config_class = MyConfig\n"
    )
    classes = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    change(folder / "config.json", model_type="my_model", architectures=["MyModel"], auto_map=classes)
    lm = load_causal_lm(model.model_path, torch.float32, True)
    files = make_model_files(lm, model.model_copy(update={"trust_remote_code": True}))
    write_model_files(files, tmp_path / "written")
    shutil.copy(folder / "model.safetensors", tmp_path / "written")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "written", trust_remote_code=True)
    assert type(written).__name__ == "MyModel"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
