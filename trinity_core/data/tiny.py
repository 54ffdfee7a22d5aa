"""A data set and a model small enough to train on a laptop's CPU in minutes: `trinity tiny`.

What you get: word problems in GSM8K's own format (`question`, `answer` with `<<a+b=c>>` and `#### c`), and a Qwen2
model of about a million random parameters with its own tokenizer, as an ordinary Hugging Face folder.
What it does not show: that arithmetic generalises. There are 57 sums and differences of numbers to 6; what is
learned is to read a problem, to write its working down in the asked form, the facts, and when to subtract.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trinity_core.errors import DataError
from trinity_core.files import clear_errors
from trinity_core.lazy import lean_imports

Row = dict[str, Any]
INITIALIZER_RANGE = 0.08
"""Standard deviation of the initial weights, near 1/sqrt(hidden size). With the usual 0.02 the tied embeddings are so
small that no token gets a high probability for hundreds of steps: greedy answers look right, sampled ones are noise."""
END_OF_TURN, START_OF_TURN, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uwe", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip

THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "flowers", "marbles", "pens", "shells", "stamps", "toys",
)  # fmt: skip

ADDITIONS = ("finds", "buys", "gets", "wins")

SUBTRACTIONS = ("loses", "sells", "drops", "lends", "mails", "breaks", "donates", "forgets")
"""The first is the one that worked examples use; the others are rare there."""

QUESTION = "{name} has {a} {thing} and {verb} {b}. How many {thing} does {name} have now?"

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of +, -, *, / and brackets.",
        "parameters": {
            "properties": {"expression": {"type": "string"}},
            "additionalProperties": False,
            "required": ["expression"],
            "type": "object",
        },
    },
}
"""The built-in tool of that name, as the model sees it."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The distribution of problems, and what the worked examples leave to be learned by exploring.

    A verb says whether to add or to subtract. Worked examples show all sums and differences, but differences seldom,
    and most of their verbs hardly ever: a warm-up learns to write answers and to calculate, and mostly adds.
    """

    largest: int = 6
    """Numbers run from 1 to this."""
    subtractions: float = 0.6
    """Share of differences in `train` and `test`."""
    sft_subtractions: float = 0.2
    """Share of differences among the worked examples."""
    sft_rare_verbs: float = 0.012
    """Share of worked examples whose verb is one of the rare ones."""

    def __post_init__(self) -> None:
        if not 2 <= self.largest <= 9:
            raise DataError(f"numbers run to 2 at least and 9 at most, not to {self.largest}", key="largest")


@dataclass(frozen=True, slots=True)
class TinySize:
    """The shape of the model. The defaults give about 0.9 million parameters."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    """Attention heads; each has `hidden_size / heads` channels; vLLM wants 32, 64, 96 or 128."""
    key_value_heads: int = 2
    max_position_embeddings: int = 1024
    """The longest sequence; also the tokenizer's `model_max_length`."""
    vocabulary: int | None = None
    """Rows of the embeddings. As in many real models those beyond the tokenizer's tokens stand for none; None: no row
    beyond them."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.key_value_heads:
            raise DataError(
                f"a model of hidden size {self.hidden_size} cannot have {self.heads} heads and {self.key_value_heads} "
                "key-value heads: each must divide the one before"
            )


@dataclass(frozen=True, slots=True)
class TinyFolders:
    """The files that `make_tiny` has written."""

    model: Path
    data: Path
    """Holds train.jsonl, test.jsonl, sft.jsonl, calls.jsonl and dpo.jsonl."""
    parameters: int
    rows: dict[str, int]
    """Rows by split."""


def problems(rng: random.Random, largest: int, verbs: dict[str, float]) -> Iterator[Row]:
    """An endless stream of problems over the numbers 1 to `largest`; texts may repeat.

    `verbs` gives the weight of each of `ADDITIONS` and `SUBTRACTIONS`.
    """
    for pair in pairs(rng, largest, verbs):
        yield {"question": pair["question"], "answer": pair["chosen"]}


def pairs(rng: random.Random, largest: int, verbs: dict[str, float]) -> Iterator[Row]:
    """Make word problems, each with the right answer (`chosen`) and one that takes a sum for a difference, or a
    difference for a sum (`rejected`)."""
    choices, weights = list(verbs), list(verbs.values())
    while True:
        (verb,) = rng.choices(choices, weights)
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        adds = verb in ADDITIONS
        if not adds:
            a, b = max(a, b), min(a, b)
        question = QUESTION.format(name=name, verb=verb, thing=thing, a=a, b=b)
        yield {
            "question": question,
            "chosen": _answer(a, b, thing, adds),
            "rejected": _answer(max(a, b), min(a, b), thing, not adds),
        }


def _answer(a: int, b: int, thing: str, adds: bool) -> str:
    """Working and result in GSM8K's form."""
    working, c = (f"{a}+{b}", a + b) if adds else (f"{a}-{b}", a - b)
    return f"{working}=<<{working}={c}>>{c} {thing}.\n#### {c}"


def _verbs(subtractions: float, rare: float | None = None) -> dict[str, float]:
    """The weight of each verb: all alike within sums and within differences, unless the rare ones get a share."""
    common, *others = SUBTRACTIONS
    rare = subtractions * len(others) / len(SUBTRACTIONS) if rare is None else rare
    additions = dict.fromkeys(ADDITIONS, (1 - subtractions) / len(ADDITIONS))
    return additions | {common: subtractions - rare} | dict.fromkeys(others, rare / len(others))


def make_problems(
    seed: int,
    count_train: int = 4000,
    count_test: int = 400,
    count_sft: int = 2000,
    difficulty: Difficulty | None = None,
) -> dict[str, list[Row]]:
    """Rows by split (`train`, `test`, `sft`); no problem text occurs twice, within a split or over splits.

    Raises DataError where more different problems are asked for than the generator has.
    """
    rng = random.Random(seed)
    level = difficulty or Difficulty()
    explored = problems(rng, level.largest, _verbs(level.subtractions))
    shown = problems(rng, level.largest, _verbs(level.sft_subtractions, level.sft_rare_verbs))
    seen: set[str] = set()
    counts = {"test": count_test, "train": count_train, "sft": count_sft}
    return {split: _different(shown if split == "sft" else explored, count, seen) for split, count in counts.items()}


def make_pairs(seed: int, count: int, taken: Iterable[Row], difficulty: Difficulty | None = None) -> list[Row]:
    """Preferences (`question`, `chosen`, `rejected`) on problems as in `train` whose texts are not among `taken`."""
    level = difficulty or Difficulty()
    stream = pairs(random.Random(f"pairs {seed}"), level.largest, _verbs(level.subtractions))
    return _different(stream, count, {row["question"] for row in taken})


def with_call(row: Row) -> Row:
    """A worked example as a conversation (`messages`, `tools`) that lets the tool `calculate` do the sum."""
    working, _, rest = row["answer"].partition("=")
    end = rest.partition(">>")[2]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": working}}}
    messages = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": end.partition(" ")[0]},
        {"role": "assistant", "content": end},
    ]
    return {"messages": messages, "tools": [CALCULATE]}


def _different(stream: Iterator[Row], count: int, seen: set[str]) -> list[Row]:
    """`count` rows whose questions are not yet in `seen`, to which they are added."""
    rows: list[Row] = []
    repeated = 0
    while len(rows) < count:
        row = next(stream)
        if row["question"] in seen:
            repeated += 1
            if repeated > 1000:
                raise DataError(
                    f"there are not {count} more different problems; ask for fewer rows or larger numbers", key="count"
                )
            continue
        repeated = 0
        seen.add(row["question"])
        rows.append(row)
    return rows


def make_tokenizer(max_tokens: int = 1024) -> Any:
    """A byte-level BPE tokenizer (Qwen2's class and pre-tokenizer) in which every word of the problems is one token.

    So is every digit. It depends on no seed. Any other text falls apart into bytes, so it is never lossy.
    """
    from transformers import Qwen2Tokenizer

    vocabulary, merges = _learnt()
    return Qwen2Tokenizer(
        vocab=dict(vocabulary),
        merges=list(merges),
        unk_token=PAD,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


@cache
def _learnt() -> tuple[dict[str, int], Any]:
    """The vocabulary and the merges of the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    blank = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = blank.normalizer, blank.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[PAD, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = problems(random.Random(0), 9, _verbs(0.5))
    texts = [text for _ in range(4000) for text in next(stream).values()]
    learner.train_from_iterator(texts + ["system\nuser\nassistant\ntool\n"] * 2, trainer)
    learnt = json.loads(learner.to_str())["model"]
    return learnt["vocab"], [tuple(pair) for pair in learnt["merges"]]


def make_untrained(size: TinySize, tokenizer: Any = None) -> Any:
    """A Qwen2 model with weights from torch's generator, on torch's default device; by default of `make_tokenizer`."""
    with lean_imports():
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = tokenizer or make_tokenizer(size.max_position_embeddings)
    config = Qwen2Config(
        vocab_size=max(size.vocabulary or 0, len(tokenizer)),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=size.max_position_embeddings,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        architectures=[Qwen2ForCausalLM.__name__],
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def make_model(folder: Path, seed: int, size: TinySize | None = None) -> int:
    """Write a randomly initialised Qwen2 model and its tokenizer to `folder`; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    size = size or TinySize()
    tokenizer = make_tokenizer(size.max_position_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_untrained(size, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    # model.save_pretrained writes the same; it imports DeepSpeed, which takes seconds and warns, and draws a bar.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """One JSON object a line, UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_tiny(
    folder: Path,
    seed: int = 42,
    count_train: int = 4000,
    count_test: int = 400,
    count_sft: int = 2000,
    size: TinySize | None = None,
    difficulty: Difficulty | None = None,
    count_dpo: int = 1000,
) -> TinyFolders:
    """Make `folder/model` and `folder/data`; the same arguments always give the same files."""
    data = folder / "data"
    splits = make_problems(seed, count_train, count_test, count_sft, difficulty)
    splits["dpo"] = make_pairs(seed, count_dpo, [row for rows in splits.values() for row in rows], difficulty)
    splits["calls"] = [with_call(row) for row in splits["sft"]]
    with clear_errors("writing to", folder, "choose another folder"):
        for split, rows in splits.items():
            write_jsonl(data / f"{split}.jsonl", rows)
        parameters = make_model(folder / "model", seed, size)
    return TinyFolders(folder / "model", data, parameters, {split: len(rows) for split, rows in splits.items()})
