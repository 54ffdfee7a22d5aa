import json
import re

import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.data import tiny
from trinity_core.data.tiny import NAMES, QUESTION, SUBTRACTIONS, THINGS


def test_rows_are_in_gsm8k_format_and_right():
    for row in tiny.make_problems(3, 300, 100, 100)["train"]:
        working, answer = re.fullmatch(r"(.+)=<<\1=(\d+)>>\2 \w+\.\n#### \2", row["answer"]).groups()
        a, sign, b = re.fullmatch(r"(\d)([+-])(\d)", working).groups()
        assert int(answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert re.findall(r"\d", row["question"]) == [a, b]


def test_problems_are_unique_across_splits():
    splits = tiny.make_problems(5, 2000, 400, 1000)
    questions = [row["question"] for rows in splits.values() for row in rows]
    assert len(questions) == len(set(questions)) == 3400
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 400, "train": 2000, "sft": 1000}


def test_same_seed_same_rows():
    assert tiny.make_problems(1, 20, 5, 5) == tiny.make_problems(1, 20, 5, 5) != tiny.make_problems(2, 20, 5, 5)


def test_worked_examples_rarely_subtract():
    def shares(rows):
        verbs = [row["question"].split(" and ")[1].split()[0] for row in rows]
        subtractions = [verb for verb in verbs if verb in SUBTRACTIONS]
        assert all((row["answer"][1] == "-") == (verb in SUBTRACTIONS) for row, verb in zip(rows, verbs, strict=True))
        rare = [verb for verb in subtractions if verb != SUBTRACTIONS[0]]
        return len(subtractions) / len(rows), len(rare) / len(rows)

    splits = tiny.make_problems(1, 2000, 100, 2000)
    assert shares(splits["train"]) == pytest.approx((0.6, 0.525), abs=0.04)
    assert shares(splits["sft"]) == pytest.approx((0.2, 0.012), abs=0.03)
    digits = re.findall(r"\d", " ".join(row["question"] for row in splits["sft"]))
    assert set(digits) == set("123456")
    with raising(DataError, key="largest"):
        tiny.Difficulty(largest=12)


def test_tokenizer_keeps_words_whole_and_is_lossless():
    tokenizer = tiny.make_tokenizer()
    for word in [*NAMES, *(f" {thing}" for thing in THINGS), *"0123456789", tiny.END_OF_TURN, tiny.START_OF_TURN]:
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word
    assert len(tokenizer.encode("123", add_special_tokens=False)) == 3
    for text in ("Weng earns $12 an hour; wie schön! 漢字\n\t x ", QUESTION):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_folder_loads_with_transformers_alone(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size = tiny.TinySize(hidden_size=32, intermediate_size=64, layers=1, heads=1, key_value_heads=1)
    folders = tiny.make_tiny(str(tmp_path), seed=1, count_train=20, count_test=5, count_sft=5, size=size)
    tokenizer = AutoTokenizer.from_pretrained(folders.model)
    model = AutoModelForCausalLM.from_pretrained(folders.model)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings and model.num_parameters() == folders.parameters
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    new = tiny.make_tokenizer()
    row = json.loads((folders.data / "train.jsonl").read_text().splitlines()[0])
    for text in (row["question"], row["answer"], "12 €.\n\nOther   words"):
        assert tokenizer.encode(text) == new.encode(text)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": row["question"]}], return_dict=False)
    assert len(prompt) <= 30
    with torch.no_grad():
        assert model(torch.tensor([prompt])).logits.shape == (1, len(prompt), len(tokenizer))


def test_same_seed_same_weights(tmp_path):
    pytest.importorskip("torch")
    size = tiny.TinySize(hidden_size=32, intermediate_size=64, layers=1, heads=1, key_value_heads=1)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny.make_model(tmp_path / name, seed, size)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_rejected_answer_swaps_sum_and_difference():
    taken = tiny.make_problems(1, 300, 50, 50)
    rows = tiny.make_pairs(1, 200, taken["train"])
    assert rows == tiny.make_pairs(1, 200, taken["train"])
    assert not {row["question"] for row in rows} & {row["question"] for row in taken["train"]}
    for row in rows:
        right, wrong = (re.match(r"(\d)([+-])(\d)=<<.*>>(\d+) ", row[key]).groups() for key in ("chosen", "rejected"))
        assert {right[1], wrong[1]} == {"+", "-"}
        assert {right[0], right[2]} == {wrong[0], wrong[2]} and right[3] != wrong[3]


def test_calls_of_the_calculator_answer_the_same_problems():
    [row] = tiny.make_problems(1, 1, 1, 1)["sft"]
    called = tiny.with_call(row)
    question, call, result, answer = called["messages"]
    assert question == {"role": "user", "content": row["question"]} and called["tools"][0]["type"] == "function"
    expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
    end = row["answer"].partition("#### ")[2]
    assert row["answer"].startswith(f"{expression}=<<{expression}={end}>>")
    assert result["content"] == end and answer["content"].endswith(f"#### {end}") and "<<" not in answer["content"]
