from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trinity_core.base.errors import DataError
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.formats import Conversation
from trinity_core.data.tiny import make_tokenizer

# Templates of other families. `[INST]` is no token of its own, so letters next to it may merge with it: the hard case.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
HEADERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITES = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": None, "brackets": BRACKETS, "headers": HEADERS, "no_end": NO_END, "forgets": FORGETS_THOUGHTS}


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def answers(tokenizer, encoded):
    """The decoded stretches that carry loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.answer.astype(int), [0]])))
    return [tokenizer.decode(encoded.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(contents=st.lists(st.text("ab1 .\n[]é", min_size=1, max_size=6), min_size=2, max_size=6), every=st.booleans())
@settings(max_examples=40)
def test_tokens_are_those_of_the_template(tokenizer, template, contents, every):
    """Whatever the mask, the tokens are those of the template's own tokenisation of the whole conversation."""
    messages = turns(*contents[: len(contents) // 2 * 2])
    (one,) = ChatEncoder(tokenizer, template).conversations([Conversation(messages, every_turn=every)])
    if isinstance(one, DataError):
        return
    own = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=False)
    assert one.tokens.tolist() == own
    assert not one.answer[: one.prompt_length].any() and one.answer[one.prompt_length]


@pytest.mark.parametrize("template", [None, HEADERS], ids=["chatml", "headers"])
@given(question=st.text("ab1 .é", max_size=5), answer=st.text("ab1 .é", min_size=1, max_size=5))
@settings(max_examples=40)
def test_demonstration_starts_with_the_rollouts_prompt(tokenizer, template, question, answer):
    encoder = ChatEncoder(tokenizer, template)
    messages = turns(question, answer)
    (one,) = encoder.conversations([Conversation(messages)])
    assert one.tokens[: one.prompt_length].tolist() == encoder.prompt(messages[:1]).tokens
    assert answers(tokenizer, one)[0].startswith(answer)


def test_token_across_prompt_boundary_counts_as_prompt(tokenizer):
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    spaced += "{% if add_generation_prompt %}assistant: {% endif %}"
    (one,) = ChatEncoder(tokenizer, spaced).conversations([Conversation(turns("hi", "has 3"))])
    assert tokenizer.decode(one.tokens[: one.prompt_length]).endswith("assistant: has")
    assert answers(tokenizer, one) == [" 3\n"]


def test_rewritten_conversations_do_not_stop_the_others(tokenizer, encoder):
    good = Conversation(turns("hi", "there"))
    first, second, third = ChatEncoder(tokenizer, REWRITES).conversations([good, good, good])
    assert all(isinstance(one, DataError) for one in (first, second, third))
    refuses = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + HEADERS
    rejected, fine = ChatEncoder(tokenizer, refuses).conversations([Conversation(turns("no", "x")), good])
    assert isinstance(rejected, DataError) and "not this" in str(rejected)
    assert answers(tokenizer, fine) == ["there<|endoftext|>"]


def test_long_prompts_are_truncated_and_marked(encoder):
    messages = turns("one two three")[:1]
    whole = encoder.prompt(messages)
    assert not whole.too_long and encoder.prompt(messages, max_tokens=len(whole.tokens)) == whole
    cut = encoder.prompt(messages, max_tokens=5)
    assert cut.too_long and cut.tokens == whole.tokens[:5]
    assert encoder.prompts([(messages, None)] * 2) == [whole.tokens] * 2
    assert encoder.prompts([]) == []


def test_a_refused_prompt_does_not_cost_the_others(tokenizer):
    refuses = "{{ messages[0]['content'] + messages[0]['name'] }}"
    good = [{"role": "user", "content": "a", "name": "b"}]
    bad, wrong = [{"role": "user", "content": "a"}], [{"role": "user", "content": "a", "name": 3}]
    encoder = ChatEncoder(tokenizer, refuses)
    texts = encoder.rendered([(bad, None), (good, None), (wrong, None)])
    assert texts[1] == "ab" and [tokenizer.decode(one) for one in encoder.prompts([(good, None)])] == ["ab"]
    assert all(isinstance(texts[i], DataError) for i in (0, 2))


def test_template_arguments_reach_the_template(tokenizer):
    template = "{{ 'thinks' if enable_thinking else 'answers' }}"
    assert ChatEncoder(tokenizer, template, {"enable_thinking": True}).render(turns("x")) == "thinks"
    assert ChatEncoder(tokenizer, template).render(turns("x")) == "answers"


def test_a_prompt_is_the_same_on_every_day(tokenizer):
    assert ChatEncoder(tokenizer, "{{ strftime_now('%d %b %Y') }}").render(turns("x")) == "26 Jul 2024"


def test_a_model_without_template_is_refused():
    from trinity_core.data.tiny import make_tokenizer

    bare = make_tokenizer()
    bare.chat_template = None
    with raising(DataError, key="model.custom_chat_template"):
        ChatEncoder(bare)


def test_half_of_a_surrogate_pair_is_written_as_a_question_mark(encoder):
    """Tools and environments may return one: from a cut emoji, a file's name, or JSON that the policy wrote."""
    prompts = [encoder.prompt([{"role": "user", "content": f"a{half}b"}]) for half in ("\ud83d", "?")]
    assert prompts[0].tokens == prompts[1].tokens


def test_a_vocabulary_with_control_tokens_as_text_is_told():
    """As in huggingface/transformers#29279."""
    words = ["<|im_start|>", "<|im_end|>", "user", "hi", "<unk>", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|im_start\|>|<\|im_end\|>"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": words[:2]})
    encoder = ChatEncoder(fast, MARKED.replace("START", words[0]).replace("END", words[1]))
    with pytest.raises(DataError):
        encoder.prompt(turns("hi<|im_end|>"))
    assert encoder.prompt(turns("hi there")).tokens


MARKED = "{% for m in messages %}START{{ m.role }}\n{{ m.content }}END\n{% endfor %}START"


def trained(normalizer: Any, pre_tokenizer: Any) -> Callable[[], PreTrainedTokenizerBase]:
    def make() -> PreTrainedTokenizerBase:
        tokenizer = Tokenizer(models.BPE(unk_token="?"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
        trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
        tokenizer.train_from_iterator(["< | s > e user assistant ab ba a b ab\u00e9 \n ? START END"] * 9, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return make


KINDS = {
    "byte level": make_tokenizer,
    "metaspace": trained(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "prepended": trained(
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        pre_tokenizers.Split("\n", "isolated"),
    ),
    "lower case": trained(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), pre_tokenizers.WhitespaceSplit()
    ),
    "in Python": ByT5Tokenizer,
}
PIECES = ("<|s|>", "<|e|>", "<|S|>", "\uff1c|e|\uff1e", "<|", "s|>", "<t>", " ", "\n", "a", "ab", "b\u00e9", "\u2581")


@pytest.mark.parametrize(
    "kind, flags",
    [
        *((kind, {}) for kind in KINDS),
        ("byte level", {"lstrip": True, "rstrip": True}),
        ("byte level", {"normalized": True}),
        ("lower case", {"normalized": True}),
    ],
)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=1, max_size=3))
@settings(max_examples=25)
def test_a_text_is_tokenised_as_if_it_held_no_control_tokens(kind, flags, texts):
    """The same template with other control tokens, of which the texts hold none, gives the same tokens."""

    def encoder(start: str, end: str) -> ChatEncoder:
        tokenizer = KINDS[kind]()
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [AddedToken(one, special=True, **flags) for one in (start, end)]}
        )
        tokenizer.add_tokens(["<t>"])
        return ChatEncoder(tokenizer, MARKED.replace("START", start).replace("END", end))

    one, other = encoder("<|s|>", "<|e|>"), encoder("[[S]]", "[[E]]")
    if kind == "lower case" and flags and any("|S|" in text or "\uff1c" in text for text in texts):
        with pytest.raises(DataError):
            one.prompt(turns(*texts))
        return
    assert one.prompt(turns(*texts)).tokens == other.prompt(turns(*texts)).tokens
