"""The fast way to load a tokenizer gives the same tokens as the slow one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from raising import raising

from trinity_core.base.errors import InputError
from trinity_core.config import ModelConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tiny import make_tokenizer
from trinity_core.data.tokenizer import (
    endless_answers,
    load_tokenizer,
    policy_encoder,
    stop_tokens,
    write_chat_template,
    write_stop_tokens,
)

TEXTS = ("Anna has 3 apples and buys 4.", "3+4=<<3+4=7>>7 apples.\n#### 7<|im_end|>", "Ünïcode, 漢字 and\ttabs\n\n")


def test_fast_tokenizer_equals_auto_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path)
    light, auto = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert light.encode(text) == auto.encode(text)
        assert light.decode(light.encode(text)) == text
    chat = [{"role": "user", "content": TEXTS[0]}]
    written = [t.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for t in (light, auto)]
    assert written[0] == written[1]
    assert (light.eos_token_id, light.pad_token_id) == (auto.eos_token_id, auto.pad_token_id)


def test_a_tokenizer_of_mistral_common_is_refused(tmp_path):
    """It takes no chat template, and its tokenizer has another interface."""
    import mistral_common

    shutil.copy(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json", tmp_path / "tekken.json")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with raising(InputError, key=str(tmp_path)):
        load_tokenizer(str(tmp_path))


PLAIN_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def base_tokenizer(folder: Path) -> ChatEncoder:
    """Saved in a folder, with the end of sequence of a base model."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    return ChatEncoder(load_tokenizer(str(folder)))


def test_stop_tokens_join_those_of_tokenizer_model_and_template(tmp_path: Path) -> None:
    encoder = base_tokenizer(tmp_path)
    eos, end = encoder.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert eos != end and stop_tokens(str(tmp_path), encoder) == tuple(sorted({eos, end}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert stop_tokens(str(tmp_path), encoder) == tuple(sorted({eos, end, 5, 7}))
    without = ChatEncoder(encoder.tokenizer, PLAIN_END)
    assert stop_tokens(str(tmp_path), without) == tuple(sorted({eos, 5, 7}))
    assert endless_answers(without) and not endless_answers(encoder)


def test_stop_tokens_are_added_to_the_generation_config(tmp_path: Path) -> None:
    encoder = base_tokenizer(tmp_path)
    eos, end = encoder.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    path = tmp_path / "generation_config.json"
    write_stop_tokens(tmp_path, encoder.tokenizer)
    assert set(json.loads(path.read_text())["eos_token_id"]) == {eos, end}
    path.write_text(json.dumps({"eos_token_id": [9, end], "top_k": 3}))
    write_stop_tokens(tmp_path, encoder.tokenizer)
    assert json.loads(path.read_text()) == {"eos_token_id": [9, end, eos], "top_k": 3}
    written = path.stat().st_mtime_ns
    write_stop_tokens(tmp_path, encoder.tokenizer)
    assert path.stat().st_mtime_ns == written, "they are all there"


def test_a_custom_template_is_in_force(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    model = ModelConfig(model_path=str(tmp_path), chat_template_path=str(tmp_path / "chat.jinja"))
    assert policy_encoder(model).template == "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_a_written_template_replaces_all_of_the_model(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "embedded"}))
    write_chat_template(tmp_path, PLAIN_END)
    assert load_tokenizer(str(tmp_path)).chat_template == PLAIN_END
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
