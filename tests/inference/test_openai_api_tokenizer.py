"""The API's tokens are those of the run, whatever tokenizer vLLM would load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from inference.openai_server import serving
from inference.test_openai_api_scripted import Speaker, say

from trinity_core.data.tokenizer import load_tokenizer

TEXT = "Uwe has 5 eggs,\n\nand  1234 more."


def test_prompt_and_answer_have_the_tokens_of_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    """vLLM builds another tokenizer for `LlamaTokenizerFast`, which DeepSeek gives to byte-level tokenizers."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    for name, values in (
        ("config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    tokenizer = load_tokenizer(str(folder))
    speaker = Speaker(tokenizer=tokenizer)
    say(speaker, TEXT)
    with serving(folder, speaker) as api:
        answer = api.client().chat.completions.create(model="policy", messages=[{"role": "user", "content": TEXT}])
    assert answer.choices[0].message.content == TEXT
    assert TEXT in tokenizer.decode(speaker.heard[0])
