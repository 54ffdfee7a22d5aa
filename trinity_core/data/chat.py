"""Conversations as token ids, exactly as the chat template renders them, and the mask of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.data.formats import Conversation, Message, Tool
from trinity_core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt; `too_long` where they were cut to a limit."""

    tokens: list[int]
    too_long: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EncodedConversation:
    """tokens int32 [L]; answer bool [L], true on the tokens of answers, the end of the turn included."""

    tokens: np.ndarray
    answer: np.ndarray

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first answer."""
        return int(self.answer.argmax())


@dataclass(slots=True)
class ChatEncoder:
    """A tokenizer and the chat template in force.

    A conversation is always rendered and tokenised as a whole: pieces are never joined, and decoded text is never
    tokenised again. Raises DataError if there is no template or it refuses a conversation.
    """

    tokenizer: Any
    template: str | None = None
    """Jinja text; None means the tokenizer's own."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    _eos: int | None = field(init=False, repr=False)
    _ends: frozenset[int] = field(init=False, repr=False)
    """Special tokens, any of which may end a turn."""

    def __post_init__(self) -> None:
        if not (self.template or self.tokenizer.chat_template):
            raise DataError(
                "the model has no chat template; give one as model.custom_chat_template or chat_template_path"
            )
        added = self.tokenizer.added_tokens_decoder
        self._eos = self.tokenizer.eos_token_id
        self._ends = frozenset(number for number, token in added.items() if token.special)

    def with_template(self, template: str | None) -> ChatEncoder:
        """The same tokenizer with another template; None leaves the present one."""
        return ChatEncoder(self.tokenizer, template, self.template_args) if template else self

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, up to the start of the next answer."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.template_args,
            )
        except (TemplateError, TypeError, ValueError) as error:  # the latter where an expression of the template fails
            raise DataError(f"the chat template refuses a conversation: {error}") from error

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> EncodedPrompt:
        """The tokens of a prompt, truncated on the right to `max_tokens`."""
        text = self.render(messages, tools, prompt=True)
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        too_long = max_tokens is not None and len(tokens) > max_tokens
        return EncodedPrompt(tokens[:max_tokens] if too_long else tokens, too_long)

    def prompts(self, given: Sequence[tuple[Sequence[Message], Sequence[Tool] | None]]) -> list[list[int] | DataError]:
        """The tokens of each prompt, tokenised in parallel; a DataError for one that the template refuses."""
        texts = self.rendered(given)
        encodings = iter(self._encodings([text for text in texts if isinstance(text, str)]))
        return [next(encodings).ids if isinstance(text, str) else text for text in texts]

    def rendered(self, given: Sequence[tuple[Sequence[Message], Sequence[Tool] | None]]) -> list[str | DataError]:
        """The text of each prompt; a DataError for one that the template refuses."""
        texts: list[str | DataError] = []
        for messages, tools in given:
            try:
                texts.append(self.render(messages, tools, prompt=True))
            except DataError as error:
                texts.append(error)
        return texts

    def conversations(self, given: Sequence[Conversation]) -> list[EncodedConversation | DataError]:
        """The tokens and answer mask of each conversation, or a DataError if its answers cannot be located."""
        results: list[EncodedConversation | DataError] = []
        rendered: list[tuple[str, list[int]]] = []
        for conversation in given:
            try:
                rendered.append(self._answers(conversation))
            except DataError as error:
                rendered.append((str(error), []))
        encodings = iter(self._encodings([text for text, starts in rendered if starts]))
        for text, starts in rendered:
            results.append(self._marked(next(encodings), starts) if starts else DataError(text))
        return results

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        """Tokenise texts in parallel; each encoding maps characters to tokens."""
        return self.tokenizer(texts, add_special_tokens=False, verbose=False).encodings if texts else []

    def _answers(self, conversation: Conversation) -> tuple[str, list[int]]:
        """The rendered text, and the character at which each answer that carries loss begins."""
        messages, tools = conversation.messages, conversation.tools
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.render(messages, tools)
        starts = []
        for turn in turns if conversation.every_turn else turns[-1:]:
            before = self.render(messages[:turn], tools, prompt=True)
            if not text.startswith(before):
                raise DataError(
                    "the chat template writes this conversation differently once it continues, so its answers cannot "
                    "be located; use a template that keeps earlier turns as they are"
                )
            starts.append(len(before))
        return text, starts

    def _marked(self, encoding: Encoding, starts: list[int]) -> EncodedConversation | DataError:
        """Mark the tokens from each answer's first character to its end-of-turn token.

        The end is the end-of-sequence token; where the template ends turns with another special token, that one;
        where it uses none, the end of the text. A token that straddles the first character belongs to the prompt.
        """
        tokens: list[int] = encoding.ids
        answer = np.zeros(len(tokens), dtype=np.bool_)
        firsts = [_first_token(encoding, start) for start in starts]
        for first, limit in zip(firsts, [*firsts[1:], len(tokens)], strict=True):
            answer[first : self._end(tokens, first, limit)] = True
        if not answer.any():
            return DataError("the answer is empty once the chat template has rendered it")
        if answer[0]:
            return DataError("there is nothing before the answer once the chat template has rendered it")
        return EncodedConversation(np.asarray(tokens, dtype=np.int32), answer)

    def _end(self, tokens: list[int], first: int, limit: int) -> int:
        span = tokens[first:limit]
        if self._eos in span:
            return first + span.index(self._eos) + 1
        return first + next((i + 1 for i, token in enumerate(span) if token in self._ends), len(span))


def _first_token(encoding: Encoding, start: int) -> int:
    """The first token that begins at or after a character."""
    # A token that straddles the character begins before it. Some characters belong to no token.
    length = len(encoding.ids)
    end = encoding.offsets[-1][1] if length else 0
    token = next((t for c in range(start, end) if (t := encoding.char_to_token(c)) is not None), length)
    straddles = start > 0 and encoding.char_to_token(start - 1) == token
    return token + 1 if straddles else token
