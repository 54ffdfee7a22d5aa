"""Keeps the text of messages text: a control token that stands in it, such as `<|im_end|>`, begins and ends no turn.

A chat template writes control tokens and the text of messages into one string, in which they look alike. So a control
token in a message is rendered as a *placeholder*: private-use characters of the same length. `encode` then knows which
control tokens the template wrote, and tokenises the others as text. Text without placeholders, nearly all of it, is
tokenised as usual.

Control tokens are those that the tokenizer flags as special, and other added tokens with which the chat template writes
plain turns, such as DeepSeek's `<｜User｜>`. Added tokens such as Qwen's `<think>` and `<tool_call>` are tokens in any
text. An answer may hold control tokens around thoughts, which templates look for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

RESERVED = range(0x108000, 0x10FFFE)
"""Private-use characters that occur in no real text: two for each control token."""
_RESERVED = re.compile(f"[{chr(RESERVED[0])}-{chr(RESERVED[-1])}]")
_THOUGHTS = re.compile("think", re.IGNORECASE)
"""Matches the control tokens that an answer may hold."""
_MARKUP = re.compile(r"[<\[].+[>\]]", re.DOTALL)
"""Matches added tokens that may begin a turn; others are white space or words."""
_TALK = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of rendered text. Raises DataError if the tokenizer cannot write a control token as text."""
    if _RESERVED.search(text):
        return control_tokens(tokenizer).encode([text])[0][0]
    return list(tokenizer.encode(text, add_special_tokens=False))


def control_tokens(tokenizer: Any, template: str | None = None) -> ControlTokens:
    """Return a tokenizer's control tokens with a chat template, by default its own."""
    return _control_tokens(tokenizer, template, len(tokenizer))  # tokens may have been added since


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, template: str | None, _: int) -> ControlTokens:
    return ControlTokens(tokenizer, template)


class ControlTokens:
    """The control tokens of a tokenizer, in text and as tokens."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.items() if token[1].content][: len(RESERVED) // 2]
        self._tokenizer, self._added = tokenizer, {token.content: (number, token) for number, token in added}
        self._placeholders = {text: chr(RESERVED[2 * i]) * len(text) for i, text in enumerate(self._added)}
        self._aliases = {text: chr(RESERVED[2 * i + 1]) * len(text) for i, text in enumerate(self._added)}
        self._text_of = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._special = [text for text, (_, token) in self._added.items() if token.special]
        control = [*self._special, *self._turns(template)]
        self._control, self._placeholder = _any_of(control), _any_of(self._text_of)
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        normalizes = backend and backend.normalizer and any(self._added[text][1].normalized for text in control)
        self._normalized = backend.normalizer.normalize_str if backend and normalizes else None
        self._copies: dict[tuple[str, ...], tuple[Tokenizer, dict[int | None, int]]] = {}
        """For control tokens: see `_copy`."""

    def _turns(self, template: str | None) -> list[str]:
        """Return the added tokens, other than special ones and those of thoughts, in a plain conversation."""
        from jinja2 import TemplateError

        try:
            talk = self._tokenizer.apply_chat_template(
                _TALK, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError):  # none, or it refuses: reported when a conversation is rendered
            return []
        others = (text for text, (_, token) in self._added.items() if not token.special and text in talk)
        return [text for text in others if _MARKUP.fullmatch(text) and not _THOUGHTS.search(text)]

    def are_in(self, value: Any, role: str | None = None) -> bool:
        """True if a text in messages or tools holds a control token, or a reserved character."""
        if isinstance(value, str):
            text = value if self._normalized is None else value + self._normalized(value)
            return self._next(text, role) is not None or _RESERVED.search(value) is not None
        if isinstance(value, Mapping):
            role = value.get("role", role)
            return any(self.are_in(inner, role) for item in value.items() for inner in item)
        return isinstance(value, list | tuple) and any(self.are_in(inner, role) for inner in value)

    def _next(self, text: str, role: str | None) -> str | None:
        """Return a control token in the text of a message; None if there is none."""
        tokens = (match[0] for match in self._control.finditer(text))
        return next((token for token in tokens if role != "assistant" or not _THOUGHTS.search(token)), None)

    def rendered(self, render: Callable[[Any, Any], str], messages: Sequence[Any], tools: Any = None) -> str:
        """Return a rendered conversation, with placeholders for the control tokens in its messages and tools.

        Raises DataError if the template changes their text, so that it cannot be told from what the template writes.
        """
        if not self.are_in((messages, tools)):
            return render(messages, tools)
        shielded = _changed((messages, tools), self.shielded)
        text = render(*shielded)
        if self.plain(text) != render(*_changed(shielded, lambda inner, _: self.plain(inner))):
            raise DataError(
                "the text of a message holds a control token of the model, and the chat template changes that text, so "
                "that the token would begin or end a turn; take it out of the text"
            )
        return text

    def plain(self, text: str) -> str:
        """Return rendered text with the control tokens that its placeholders stand for."""
        return self._placeholder.sub(lambda match: self._text_of[match[0]], text)

    def shielded(self, text: str, role: str | None = None) -> str:
        """Return a text with placeholders for its control tokens, which `encode` takes as text. Raises DataError for a
        text that the tokenizer normalises to one."""
        is_control = partial(self._next, role=role)
        text = _RESERVED.sub("\N{REPLACEMENT CHARACTER}", text)
        text = self._control.sub(lambda match: self._placeholders[match[0]] if is_control(match[0]) else match[0], text)
        if self._normalized is not None and (token := is_control(self._normalized(text))):
            raise DataError(f"the model's tokenizer takes {text!r:.80} for its control token {token}; change that text")
        return text

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], Encoding | None]]:
        """Return the tokens of each rendered text, tokenised in parallel, and its encoding if the tokenizer has such.

        Raises DataError if the tokenizer cannot write a control token as text.
        """
        usual = [text for text in texts if not _RESERVED.search(text)]
        tokenised = self._tokenizer(usual, add_special_tokens=False, verbose=False) if usual else None
        encodings = tokenised.encodings or [None] * len(usual) if tokenised else []
        pairs = iter(zip(tokenised["input_ids"], encodings, strict=True) if tokenised else ())
        return [self._encode_shielded(text) if _RESERVED.search(text) else next(pairs) for text in texts]

    def _encode_shielded(self, text: str) -> tuple[list[int], Encoding | None]:
        """Tokenise a text with placeholders: the control tokens that the template wrote as their aliases."""
        if not self._tokenizer.is_fast:
            return self._encode_sections(text), None
        control = self._control_in(text)
        backend, number_of = self._copies.setdefault(control, self._copies.get(control) or self._copy(control))
        aliased = self.plain(_any_of(control).sub(lambda match: self._aliases[match[0]], text))
        encoding = backend.encode(aliased, add_special_tokens=False)
        self._check(encoding.ids, control, written=0)
        return [number_of.get(number, number) for number in encoding.ids], encoding

    def _copy(self, control: Sequence[str]) -> tuple[Tokenizer, dict[int | None, int]]:
        """Return a tokenizer that takes control tokens for text, with a token of the same properties for the alias of
        each, and the control tokens of these."""
        backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        backend.add_special_tokens(list(control))  # others than special ones would stay tokens
        backend.add_tokens([_alias(self._aliases[text], self._added[text][1]) for text in control])
        return backend, {backend.token_to_id(self._aliases[text]): self._added[text][0] for text in control}

    def _control_in(self, text: str) -> tuple[str, ...]:
        """Return the special tokens, and others whose placeholders are in a rendered text."""
        spelled = {self._text_of[match] for match in self._placeholder.findall(text)}
        return *self._special, *sorted(spelling for spelling in spelled if not self._added[spelling][1].special)

    def _encode_sections(self, text: str) -> list[int]:
        """Tokenise a text with placeholders in sections: added tokens, and what is between them."""
        added, control = _any_of(self._added), self._control_in(text)
        tokens: list[int] = []
        for section in re.split(f"({added.pattern})", text):
            split = _RESERVED.search(section) is not None
            tokens += self._tokenizer.encode(self.plain(section), add_special_tokens=False, split_special_tokens=split)
        self._check(tokens, control, written=len(_any_of(control).findall(text)))
        return tokens

    def _check(self, tokens: Sequence[int], control: Sequence[str], written: int) -> None:
        """Raise DataError unless `written` of these are control tokens: some vocabularies have them as text too."""
        numbers = {self._added[text][0] for text in control} - {self._tokenizer.unk_token_id}
        if sum(token in numbers for token in tokens) != written:
            raise DataError("the model's tokenizer takes a control token in a text for that token; change the text")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest of those that match; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _alias(text: str, token: Any) -> Any:
    """Return an added token that is matched like this one, but is none of the special tokens."""
    from tokenizers import AddedToken

    return AddedToken(
        text, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word, normalized=token.normalized
    )


def _changed(value: Any, change: Callable[[str, str | None], str], role: str | None = None) -> Any:
    """Return messages or tools with each text, of a message of some role, changed."""
    if isinstance(value, str):
        return change(value, role)
    if isinstance(value, Mapping):
        role = value.get("role", role)
        return {_changed(name, change, role): _changed(inner, change, role) for name, inner in value.items()}
    return [_changed(inner, change, role) for inner in value] if isinstance(value, list | tuple) else value
