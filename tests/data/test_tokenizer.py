"""The light way to load a tokenizer gives the tokens of the long way, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

from trinity_core.config import ModelConfig
from trinity_core.data.tiny import make_tokenizer
from trinity_core.data.tokenizer import load_tokenizer, policy_encoder, stop_tokens

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


def test_tokenizer_loads_without_torch(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys; from trinity_core.data.tokenizer import load_tokenizer, stop_tokens;"
        f"stop_tokens({str(tmp_path)!r}, load_tokenizer({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_stop_tokens_join_tokenizer_and_generation_config(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert stop_tokens(str(tmp_path), tokenizer) == (tokenizer.eos_token_id,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert stop_tokens(str(tmp_path), tokenizer) == tuple(sorted({tokenizer.eos_token_id, 0, 5}))


def test_a_custom_template_is_in_force(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    model = ModelConfig(model_path=str(tmp_path), chat_template_path=str(tmp_path / "chat.jinja"))
    assert policy_encoder(model).template == "{% for m in messages %}[{{ m.content }}]{% endfor %}"
