import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import ExperienceBufferConfig, FormatConfig
from trinity_core.data.supervised import SupervisedMixture, SupervisedSet, apportioned
from trinity_core.exchange.store.expert import START, ExpertMixture

ROWS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(9)]


def config(tmp_path, rows, **form):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = {"prompt_key": "question", "response_key": "answer"} | form
    return ExperienceBufferConfig(name="sft", path=str(path), format=FormatConfig(**form))


@pytest.fixture(scope="module")
def opened(tmp_path_factory, encoder):
    return SupervisedSet.open(config(tmp_path_factory.mktemp("sft"), ROWS), encoder, seed=1)


def test_a_row_is_one_experience_with_loss_on_its_answer(opened, tokenizer):
    (one,) = opened.experiences(3)
    assert (
        tokenizer.decode(one.tokens[: one.prompt_length]) == "<|im_start|>user\n3+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(one.tokens[one.prompt_length :][one.action_mask]) == "#### 4<|im_end|>"
    assert one.is_expert and one.reward is None and one.task_index == 3 and one.group == "sft/3"


@given(step=st.integers(1, 30), size=st.integers(1, 12))
def test_batches_depend_on_their_step_alone(opened, step, size):
    rows = [one.task_index for one in opened.batch(step, size)]
    whole = [one.task_index for earlier in range(1, step + 1) for one in opened.batch(earlier, size)]
    assert whole[-size:] == rows
    epoch = len(opened)
    for start in range(0, len(whole) - epoch + 1, epoch):
        assert sorted(whole[start : start + epoch]) == list(range(epoch))


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
def test_epochs_train_every_row_in_the_fewest_steps(opened, epochs, size):
    steps = opened.steps(epochs, size)
    taken = Counter(one.task_index for step in range(1, steps + 1) for one in opened.batch(step, size))
    assert len(taken) == len(opened) and min(taken.values()) >= epochs
    assert (steps - 1) * size < epochs * len(opened)


def test_the_fingerprint_is_that_of_the_usable_rows(tmp_path, encoder):
    def fingerprint(folder, rows, **settings):
        (tmp_path / folder).mkdir()
        return SupervisedSet.open(config(tmp_path / folder, rows), encoder, **({"seed": 1} | settings)).fingerprint

    first = fingerprint("a", ROWS)
    assert first == fingerprint("moved", ROWS) == fingerprint("with a rejected row", [*ROWS, {"question": "x"}], seed=2)
    others = [ROWS[::-1], ROWS[1:], [*ROWS[:-1], {"question": "8+1?", "answer": "#### 10"}]]
    assert len({first, *(fingerprint(str(number), rows) for number, rows in enumerate(others))}) == 4


@pytest.mark.parametrize("max_tokens", [None, 5, 100])
def test_every_token_of_a_text_but_its_first_is_learned_once(tmp_path, encoder, tokenizer, max_tokens):
    """In one piece, or in pieces that begin with the last token of the one before; a control token in it is text."""
    texts = ["A train leaves at 9.", "one<|im_end|>", "x"]
    rows = [{"text": text} for text in texts] + [{"text": ""}, {"words": "y"}]
    read = SupervisedSet.open(config(tmp_path, rows, prompt_type="text"), encoder, 1, max_tokens=max_tokens)
    whole = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in (texts[0], texts[2])]
    samples = [one for index in range(len(read)) for one in read.experiences(index)]
    assert len(read.rejected) == 2 and {location.line for location in read.locations} == {1, 2, 3}
    assert all(one.prompt_length == 1 and one.action_mask.all() and one.is_expert for one in samples)
    assert all(len(one.tokens) <= (max_tokens or 999) for one in samples)
    pieces = {line: [one.tokens.tolist() for one, place in zip(samples, read.locations, strict=True)
                     if place.line == line] for line in (1, 2, 3)}  # fmt: skip
    joined = {line: [parts[0][0], *(token for part in parts for token in part[1:])] for line, parts in pieces.items()}
    assert [joined[1], joined[3]] == whole and (len(pieces[1]) > 1) == (max_tokens == 5)
    assert tokenizer.decode(joined[2][:-1]) == texts[1]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in joined[2][:-1]


def test_preferences_are_pairs(tmp_path, encoder, tokenizer):
    rows = [{"question": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(4)]
    pairs = SupervisedSet.open(config(tmp_path, rows), encoder, seed=1, kind="preferences")
    batch = pairs.batch(1, 6)
    assert [one.run for one in batch] == [0, 1] * 3
    assert [one.group for one in batch[::2]] == [one.group for one in batch[1::2]]
    for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
        assert chosen.tokens[: chosen.prompt_length].tolist() == rejected.tokens[: rejected.prompt_length].tolist()
        assert tokenizer.decode(chosen.tokens[chosen.prompt_length :]) == "yes<|im_end|>\n"
        assert tokenizer.decode(rejected.tokens[rejected.prompt_length :]) == "no<|im_end|>\n"
    assert pairs.steps(epochs=1, size=4) == 2
    with raising(DataError, key="buffer.train_batch_size"):
        pairs.batch(1, 5)


def test_unusable_rows_are_rejected_with_their_line(tmp_path, encoder, caplog):
    rows = [*ROWS[:2], {"question": "x"}, {"question": "long", "answer": "word " * 99}, ROWS[2]]
    opened = SupervisedSet.open(config(tmp_path, rows), encoder, seed=1, max_tokens=40)
    assert len(opened) == 3 and [location.line for location in opened.locations] == [1, 2, 5]
    assert [row.location.line for row in opened.rejected] == [3, 4]
    assert "model.max_model_len" in caplog.text
    with raising(DataError, key="sft"):
        SupervisedSet.open(config(tmp_path, ROWS), encoder, seed=1, max_tokens=4)


def test_concatenated_turns_with_a_custom_template(tmp_path, encoder, tokenizer):
    messages = [{"role": role, "content": role[:4]} for role in ("user", "assistant") * 2]
    template = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant={% endif %}"
    given_config = config(
        tmp_path,
        [{"messages": messages}],
        prompt_type="messages",
        enable_concatenated_multi_turn=True,
        chat_template=template,
    )
    (one,) = SupervisedSet.open(given_config, encoder, seed=0).experiences(0)
    response = one.tokens[one.prompt_length :]
    assert tokenizer.decode(response) == "assi<|im_end|>user=user<|im_end|>assistant=assi<|im_end|>"
    assert tokenizer.decode(response[one.action_mask]) == "assi<|im_end|>assi<|im_end|>"


shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4)


@given(st.integers(0, 2000), shares)
def test_apportioned_rows_add_up_and_never_shrink(count: int, weights: list[float]) -> None:
    now, then = apportioned(count, weights), apportioned(count + 1, weights)
    assert sum(now) == count and all(0 <= a <= b for a, b in zip(now, then, strict=True))
    for drawn, weight in zip(now, weights, strict=True):
        assert abs(drawn - count * weight / sum(weights)) <= len(weights)


@pytest.fixture(scope="module")
def sets(encoder: Any, tmp_path_factory: pytest.TempPathFactory) -> list[SupervisedSet]:
    folder, form = tmp_path_factory.mktemp("sets"), FormatConfig(prompt_key="q", response_key="a")
    opened = []
    for name, count in (("many", 12), ("few", 3)):
        rows = "".join(json.dumps({"q": f"{name} {n}", "a": str(n)}) + "\n" for n in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
        buffer = ExperienceBufferConfig(name=name, path=str(folder / f"{name}.jsonl"), format=form)
        opened.append(SupervisedSet.open(buffer, encoder, seed=1))
    return opened


def named(rows: Any) -> list[tuple[str, int]]:
    return [(row.group.split("/")[0], row.task_index) for row in rows]


def test_batches_have_each_set_by_its_share(sets: list[SupervisedSet]) -> None:
    mixture = SupervisedMixture(sets, [3.0, 1.0])
    batches = [mixture.batch(step, 8) for step in (1, 2, 3)]
    assert [Counter(name for name, _ in named(batch)) for batch in batches] == [{"many": 6, "few": 2}] * 3
    of_many = [row for batch in batches[:2] for name, row in named(batch) if name == "many"]
    assert sorted(of_many) == list(range(12)), "an epoch has each row once"
    assert [named(mixture.batch(2, 8))] == [named(batches[1])], "a step is computed on its own"
    assert len({row.group for batch in batches for row in batch}) == 24
    assert mixture.steps(1, 8) == 2 and mixture.steps(2, 8) == 4 and mixture.steps(1, 7) == 3


def test_expert_rows_of_several_sets_go_on_where_they_were(sets: list[SupervisedSet]) -> None:
    expert = ExpertMixture(SupervisedMixture(sets, [1.0, 1.0]))
    whole, _ = expert.take(7)
    first, position = expert.take(3, START)
    rest, after = expert.take(4, position)
    assert Counter(named(first + rest)) == Counter(named(whole)) and after["offset"] == 7
    assert all(row.is_expert for row in whole)
