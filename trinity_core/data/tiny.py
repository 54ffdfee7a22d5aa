"""A data set and a model small enough to train on a laptop's CPU in minutes: `trinity tiny`.

You get word problems in GSM8K's own format (`question`, `answer` with `<<a+b=c>>` and `#### c`), and a Qwen2 model of
about a million random parameters with its own tokenizer, as an ordinary Hugging Face folder. It does not show that
arithmetic generalises. There are 57 sums and differences of numbers to 6; the model learns to read a problem, to write
its working in the requested form, the facts, and when to subtract.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.files import clear_errors
from trinity_core.base.lazy import lean_imports

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
"""Worked examples use the first verb; the others are rare in them."""

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

    A verb determines whether to add or to subtract. Worked examples show all sums and differences, but differences
    seldom, and most of their verbs hardly ever: a warm-up learns to write answers and to calculate, and mostly adds.
    """

    largest: int = 6
    """Largest number; the smallest is 1."""
    subtractions: float = 0.6
    """Fraction of differences in `train` and `test`."""
    sft_subtractions: float = 0.2
    """Fraction of differences in the worked examples."""
    sft_rare_verbs: float = 0.012
    """Fraction of worked examples with a rare verb."""

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
    """Attention heads of `hidden_size / heads` channels each; vLLM requires 32, 64, 96 or 128."""
    key_value_heads: int = 2
    max_position_embeddings: int = 1024
    """The longest sequence; also the tokenizer's `model_max_length`."""
    vocabulary: int | None = None
    """Rows of the embeddings. Those beyond the tokenizer's tokens are unused, as in many real models; None: no such
    rows."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.key_value_heads:
            raise DataError(
                f"a model of hidden size {self.hidden_size} cannot have {self.heads} heads and {self.key_value_heads} "
                "key-value heads: each must divide the one before"
            )


@dataclass(frozen=True, slots=True)
class TinyFolders:
    model: Path
    data: Path
    """Holds train.jsonl, test.jsonl, sft.jsonl, calls.jsonl and dpo.jsonl."""
    parameters: int
    rows: dict[str, int]


def problems(rng: random.Random, largest: int, verbs: dict[str, float]) -> Iterator[Row]:
    """Yield an endless stream of problems over the numbers 1 to `largest`; texts may repeat.

    `verbs` holds the weight of each of `ADDITIONS` and `SUBTRACTIONS`.
    """
    for pair in pairs(rng, largest, verbs):
        yield {"question": pair["question"], "answer": pair["chosen"]}


def pairs(rng: random.Random, largest: int, verbs: dict[str, float]) -> Iterator[Row]:
    """Yield word problems, each with the right answer (`chosen`) and one that confuses sum and difference
    (`rejected`)."""
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
    """Return working and result in GSM8K's form."""
    working, c = (f"{a}+{b}", a + b) if adds else (f"{a}-{b}", a - b)
    return f"{working}=<<{working}={c}>>{c} {thing}.\n#### {c}"


def _verbs(subtractions: float, rare: float | None = None) -> dict[str, float]:
    """Return the weight of each verb: equal within sums and within differences, unless the rare ones get a share."""
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
    """Return rows by split (`train`, `test`, `sft`); no problem text occurs twice, within a split or over splits.

    Raises DataError if more different problems are requested than the generator has.
    """
    rng = random.Random(seed)
    level = difficulty or Difficulty()
    explored = problems(rng, level.largest, _verbs(level.subtractions))
    shown = problems(rng, level.largest, _verbs(level.sft_subtractions, level.sft_rare_verbs))
    seen: set[str] = set()
    counts = {"test": count_test, "train": count_train, "sft": count_sft}
    return {split: _different(shown if split == "sft" else explored, count, seen) for split, count in counts.items()}


def make_pairs(seed: int, count: int, taken: Iterable[Row], difficulty: Difficulty | None = None) -> list[Row]:
    """Return preferences (`question`, `chosen`, `rejected`) on problems as in `train` whose texts are not in
    `taken`."""
    level = difficulty or Difficulty()
    stream = pairs(random.Random(f"pairs {seed}"), level.largest, _verbs(level.subtractions))
    return _different(stream, count, {row["question"] for row in taken})


def with_call(row: Row) -> Row:
    """Convert a worked example to a conversation (`messages`, `tools`) that calls the tool `calculate` for the sum."""
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
    """Return a byte-level BPE tokenizer (Qwen2's class and pre-tokenizer) with one token for every word of the
    problems.

    Every digit is a token too. It does not depend on a seed. Other text is split into bytes, so it is never lossy.
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
    """Return a Qwen2 model with weights from torch's generator, on torch's default device; by default of
    `make_tokenizer`."""
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
    """Write a randomly initialised Qwen2 model and its tokenizer to `folder`; return the number of parameters."""
    import torch
    from safetensors.torch import save_file

    size = size or TinySize()
    tokenizer = make_tokenizer(size.max_position_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_untrained(size, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    # model.save_pretrained writes the same, but imports DeepSpeed, which takes seconds and warns, and draws a bar.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Write one JSON object a line, in UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_tiny(
    folder: str | Path,
    seed: int = 42,
    count_train: int = 4000,
    count_test: int = 400,
    count_sft: int = 2000,
    size: TinySize | None = None,
    difficulty: Difficulty | None = None,
    count_dpo: int = 1000,
) -> TinyFolders:
    """Make `folder/model` and `folder/data`; the same arguments always produce the same files."""
    folder = Path(folder)
    data = folder / "data"
    splits = make_problems(seed, count_train, count_test, count_sft, difficulty)
    splits["dpo"] = make_pairs(seed, count_dpo, [row for rows in splits.values() for row in rows], difficulty)
    splits["calls"] = [with_call(row) for row in splits["sft"]]
    with clear_errors("writing to", folder, "choose another folder"):
        for split, rows in splits.items():
            write_jsonl(data / f"{split}.jsonl", rows)
        parameters = make_model(folder / "model", seed, size)
    return TinyFolders(folder / "model", data, parameters, {split: len(rows) for split, rows in splits.items()})
