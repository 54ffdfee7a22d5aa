"""Conversations as token ids, exactly as the chat template renders them, with a mask of their answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.data.control_tokens import ControlTokens, control_tokens
from trinity_core.data.formats import Conversation, Tool
from trinity_core.data.messages import Message, thoughts_of, with_text_arguments
from trinity_core.data.turns import MARK, text_after_mark

if TYPE_CHECKING:
    from tokenizers import Encoding


_DATE = date(2024, 7, 26)
"""Today's date for templates, the default date of Llama's: prompts must not change during a run or on resume."""
_THOUGHTS = re.compile(r"<think>(.*?)</think>", re.DOTALL)
REWRITTEN = (
    "the chat template writes this conversation differently once it continues, so its answers cannot be located; use a "
    "template that keeps earlier turns as they are"
)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt; `too_long` if they were truncated."""

    tokens: list[int]
    too_long: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EncodedConversation:
    """tokens int32 [L]; answer bool [L], true on the tokens of answers, end-of-turn tokens included."""

    tokens: np.ndarray
    answer: np.ndarray

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first answer."""
        return int(self.answer.argmax())


@dataclass(frozen=True, slots=True)
class Closing:
    """What a template writes after the answer that ends a conversation."""

    text: str
    end: int | None
    """The token that ends the answer; None if the template writes no special token."""
    after: tuple[int, ...]
    """Special tokens behind it that disappear when the conversation continues: no policy samples them."""


_ASKED: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_CALLS = [
    {"id": f"call0000{n}", "type": "function", "function": {"name": "look", "arguments": {"at": "here"}}}
    for n in (1, 2)
]
"""Two calls of one answer. Mistral's templates require ids of nine letters and digits."""


@dataclass(slots=True)
class ChatEncoder:
    """A tokenizer and a chat template.

    A conversation is always rendered and tokenised as a whole: pieces are never joined, and decoded text is never
    tokenised again. Raises DataError if there is no template or it refuses a conversation.
    """

    tokenizer: Any
    template: str | None = None
    """Jinja source; None means the tokenizer's own."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`. `written_bos` is always set: the BOS token if the
    tokenizer adds one to texts, else empty."""
    vocabulary: int | None = None
    """Number of tokens that the model has embeddings for; None if unknown."""
    _special: frozenset[int] = field(init=False, repr=False)
    _closing: Closing | None = field(init=False, repr=False, default=None)
    _ends: tuple[int, ...] | None = field(init=False, repr=False, default=None)
    _writes_tools: bool | None = field(init=False, repr=False, default=None)
    _written_bos: str = field(init=False, repr=False)
    _control: ControlTokens = field(init=False, repr=False)
    _written: set[tuple[Any, ...]] = field(init=False, repr=False, default_factory=set)
    """Shapes of conversations of which the template writes every message."""

    def __post_init__(self) -> None:
        if not (self.template or self.tokenizer.chat_template):
            raise DataError(
                "the model has no chat template; give one as model.custom_chat_template or chat_template_path",
                key="model.custom_chat_template",
            )
        added = self.tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | {self.tokenizer.eos_token_id}
        self._special = frozenset(special - {None})
        begins = self.tokenizer("")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        self._written_bos = self.tokenizer.bos_token if begins else ""
        self._control = control_tokens(self.tokenizer, self.template)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The tokens with which the template ends an answer: the usual one first, then that of tool calls if it
        differs. Empty if the template writes no special token after an answer."""
        if self._ends is None:
            usual = self.closing.end
            ends = dict.fromkeys([] if usual is None else [usual])
            for calls in (_CALLS, _CALLS[:1]):  # some templates write only one call a turn
                *earlier, last = self._answer_tokens({"role": "assistant", "content": "", "tool_calls": calls}) or [-1]
                if last in self._special and last not in earlier:  # otherwise it ends a call, not the turn
                    ends.setdefault(last)
                if earlier:
                    break
            self._ends = tuple(ends)
        return self._ends

    @property
    def closing(self) -> Closing:
        """What the template writes after the answer that ends a conversation."""
        if self._closing is None:
            text, marks = self._after_answer(_ASKED)
            marks_before_more = self._after_answer([*_ASKED, {"role": "user", "content": "?"}])[1]
            count = _shared(marks, marks_before_more) or min(len(marks), 1)
            self._closing = Closing(text, marks[count - 1] if count else None, tuple(marks[count:]))
        return self._closing

    def _answer_tokens(self, answer: Message) -> list[int]:
        """Return the tokens of an answer to a question, without those that end the document; empty if the template
        refuses it."""
        question = _ASKED[:1]
        try:
            prompt_text, text = self.render(question, prompt=True), self.render([*question, answer])
        except DataError:
            return []
        written = text[len(prompt_text) :].rstrip() if text.startswith(prompt_text) else ""
        tokens: list[int] = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        after = self.closing.after
        return tokens[: -len(after)] if after and tuple(tokens[-len(after) :]) == after else tokens

    def _after_answer(self, messages: list[Message]) -> tuple[str, list[int]]:
        """Return the text after the mark, and the added tokens in it; empty if the template does not write the mark."""
        try:
            text = text_after_mark(self.render(messages)) or ""
        except DataError:  # it may require another kind of conversation
            text = ""
        added = self._special | set(self.tokenizer.added_tokens_decoder)
        return text, [token for token in self.tokenizer(text, add_special_tokens=False)["input_ids"] if token in added]

    def with_template(self, template: str | None) -> ChatEncoder:
        """Return the same tokenizer with another template; None keeps the current one."""
        return replace(self, template=template) if template else self

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt`, up to the start of the next answer.

        Placeholders stand for control tokens in the text of messages: see `control_tokens`, whose `encode` reads them.
        """
        render = partial(self._rendered, prompt=prompt)
        try:
            return self._control.rendered(render, messages, tools)
        except DataError as error:
            texts = [with_text_arguments(message) for message in messages]
            if texts == list(messages):
                raise
            try:  # DeepSeek's templates take the arguments of calls as JSON text
                return self._control.rendered(render, texts, tools)
            except DataError:
                raise error from None

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] | None, prompt: bool) -> str:
        from jinja2 import TemplateError

        if any(message["role"] == "developer" for message in messages) and not self._knows_developers:
            messages = _as_system(messages)
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
                **{"written_bos": self._written_bos, "strftime_now": _DATE.strftime, **self.template_args},
            )
        except (TemplateError, TypeError, ValueError) as error:  # the last two if an expression of the template fails
            raise DataError(f"the chat template refuses a conversation: {error}") from error
        return text.encode(errors="replace").decode()  # a tool may return half of a surrogate pair, which is not UTF-8

    @property
    def _knows_developers(self) -> bool:
        template = str(self.template or self.tokenizer.chat_template)
        return '"developer"' in template or "'developer'" in template

    def tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, prompt: bool = False
    ) -> list[int]:
        """Return the tokens of a conversation; see `render`."""
        return self._control.encode([self.render(messages, tools, prompt)])[0][0]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> EncodedPrompt:
        """Return the tokens of a prompt, truncated on the right to `max_tokens`."""
        tokens = self.tokens(messages, tools, prompt=True)
        too_long = max_tokens is not None and len(tokens) > max_tokens
        return EncodedPrompt(tokens[:max_tokens] if too_long else tokens, too_long)

    def prompts(
        self, requests: Sequence[tuple[Sequence[Message], Sequence[Tool] | None]]
    ) -> list[list[int] | DataError]:
        """Return the tokens of each prompt, tokenised in parallel, or a DataError (see `rendered`)."""
        texts = self.rendered(requests)
        encoded = iter(self._control.encode([text for text in texts if isinstance(text, str)]))
        return [self._embedded(next(encoded)[0]) if isinstance(text, str) else text for text in texts]

    def _embedded(self, tokens: list[int]) -> list[int] | DataError:
        """Return tokens, or a DataError if the model has no embedding for one of them."""
        if self.vocabulary is None or not tokens or max(tokens) < self.vocabulary:
            return tokens
        text = self.tokenizer.convert_ids_to_tokens(max(tokens))
        return DataError(
            f"the model has {self.vocabulary} embeddings, and none for token {max(tokens)} of its tokenizer, {text!r}; "
            "use the tokenizer of the model, or a model whose embeddings were resized for it",
            key="tokenizer.json",
        )

    def rendered(self, requests: Sequence[tuple[Sequence[Message], Sequence[Tool] | None]]) -> list[str | DataError]:
        """Return the text of each prompt, or a DataError if the template refuses it or leaves out its tools."""
        texts: list[str | DataError] = []
        for messages, tools in requests:
            try:
                self._check_tools(messages, tools)
                text = self.render(messages, tools, prompt=True)
                self._check_messages(messages, tools)
                texts.append(text)
            except DataError as error:
                texts.append(error)
        return texts

    def conversations(self, conversations: Sequence[Conversation]) -> list[EncodedConversation | DataError]:
        """Return the tokens and answer mask of each conversation, or a DataError if its answers cannot be located."""
        results: list[EncodedConversation | DataError] = []
        rendered: list[tuple[str, list[tuple[int, int]]]] = []
        for conversation in conversations:
            try:
                if conversation.text is None:
                    rendered.append(self._answers(conversation))
                else:
                    rendered.append((self._control.shielded(conversation.text), [(0, 0)]))
            except DataError as error:
                rendered.append((str(error), []))
        encoded = iter(self._control.encode([text for text, spans in rendered if spans]))
        for conversation, (text, spans) in zip(conversations, rendered, strict=True):
            if not spans:
                results.append(DataError(text))
            elif conversation.text is None:
                results.append(self._marked(text, *next(encoded), spans))
            else:
                results.append(self._text(next(encoded)[0]))
        return results

    def _text(self, tokens: list[int]) -> EncodedConversation | DataError:
        """Return a text between the special tokens that its tokenizer writes before it and its end-of-text token. All
        but the first token, which nothing predicts, carry loss."""
        prefix, end = self.tokenizer.encode(""), self.tokenizer.eos_token_id
        tokens = [*(token for token in prefix if token != end), *tokens, *([] if end is None else [end])]
        if len(tokens) < 2:
            return DataError("the text has no token to learn")
        embedded = self._embedded(tokens)
        answer = np.arange(len(tokens)) > 0
        return embedded if isinstance(embedded, DataError) else EncodedConversation(np.array(tokens, np.int32), answer)

    def _answers(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text, and the characters [first, last + 1] of each turn that carries loss."""
        messages, tools = conversation.messages, conversation.tools
        text = self.render(messages, tools)
        self._check_tools(messages, tools)
        self._check_messages(messages, tools)
        spans = []
        for turn in conversation.learned_turns:
            prompt_text = self.render(messages[:turn], tools, prompt=True)
            if not text.startswith(prompt_text):
                raise DataError(self._why_not(conversation, turn, text))
            self._check_calls(messages[: turn + 1], tools)
            end = len(text) if turn == len(messages) - 1 else self._end_of_turn(conversation, turn, text)
            _check_thoughts(messages[turn], self._control.plain(text[len(prompt_text) : end]))
            spans.append((len(prompt_text), end))
        return text, spans

    def _why_not(self, conversation: Conversation, turn: int, text: str) -> str:
        """Return why the prompt of the answer at `turn` is not a prefix of the whole conversation."""
        messages, tools = conversation.messages, conversation.tools
        earlier = messages[:turn]
        prompt = self.render(earlier, tools, prompt=True)
        shared = _shared(prompt, text)
        if shared < _shared(prompt, self.render(earlier, tools)):
            return REWRITTEN
        calm = ChatEncoder(self.tokenizer, self.template, {**self.template_args, "enable_thinking": False})
        helps = calm.render(messages, tools).startswith(calm.render(earlier, tools, prompt=True))
        return (
            f"the chat template's prompt for an answer ends in {prompt[shared:]!r}, where this conversation has "
            f"{text[shared:][:40]!r}, so its answers cannot be located; "
            + ("set model.enable_thinking: false, or " if helps else "")
            + "use a template that writes both the same way"
        )

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
        """Raise DataError if the template leaves out the tools: the policy would not know of them."""
        if not tools:
            return
        if self._writes_tools is None:
            self._writes_tools = not self._writes_alike((_ASKED, [_TOOL]), (_ASKED, None))
        if not self._writes_tools and self._writes_alike((messages, tools), (messages, None)):
            raise DataError(
                "the chat template leaves out tools; use a template that writes them, or no format.tools_key",
                key="format.tools_key",
            )

    def _check_messages(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
        """Raise DataError if the template leaves out the text of a message that is no answer, for example of an unknown
        role. Checked once for all conversations of the same roles."""
        shapes = [_shape(message) for message in messages]
        if (bool(tools), *shapes) in self._written:
            return
        texts = [index for index, (role, has_text, _) in enumerate(shapes) if has_text and role != "assistant"]
        marked = [m | {"content": f"{MARK}{i}{MARK}"} if i in texts else m for i, m in enumerate(messages)]
        try:
            written = self.render(marked, tools)
            doubtful = [index for index in texts if f"{MARK}{index}{MARK}" not in written]
        except DataError:
            doubtful = texts
        for index in doubtful:
            message = messages[index]
            other = [*messages[:index], message | {"content": f"{message['content']}."}, *messages[index + 1 :]]
            if self._writes_alike((messages, tools), (other, tools)):
                raise DataError(
                    f"the chat template leaves out message {index + 1}, of role {message['role']!r}; use another role, "
                    "or a template that writes it"
                )
        self._written.add((bool(tools), *shapes))

    def _check_calls(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
        """Raise DataError if the template leaves out the tool calls of the last message, or the text next to them."""
        earlier, last = messages[:-1], messages[-1]
        if not last.get("tool_calls"):
            return
        words = last.get("content") or ""
        if self._writes_alike((messages, tools), ([*earlier, {"role": "assistant", "content": words}], tools)):
            raise DataError("the chat template leaves out tool calls; use a template that writes them")
        if words.strip() and self._writes_alike((messages, tools), ([*earlier, last | {"content": ""}], tools)):
            raise DataError("the chat template leaves out the text next to tool calls; use a template that writes it")

    def _writes_alike(self, *conversations: tuple[Sequence[Message], Sequence[Tool] | None]) -> bool:
        """True if the template renders two conversations alike; False if it refuses one."""
        try:
            first, second = (self.render(messages, tools) for messages, tools in conversations)
        except DataError:
            return False
        return first == second

    def _end_of_turn(self, conversation: Conversation, turn: int, text: str) -> int:
        """Return the position in `text` after everything that rendering up to and including `turn` adds.

        A template may close the last turn of a conversation differently from earlier ones (Harmony's `<|return|>`
        becomes `<|end|>`): the difference is not the policy's. If it renders the answer itself differently, for example
        without the thoughts of earlier turns, the end is that of the rendered answer.
        """
        messages, tools = conversation.messages, conversation.tools
        alone = self.render(messages[: turn + 1], tools)
        shared = _shared(alone, text)
        if len(alone) - shared <= len(self.closing.text):
            return shared
        marked = {**messages[turn], "content": MARK}
        after = text_after_mark(self.render([*messages[:turn], marked, *messages[turn + 1 :]], tools))
        closed = text_after_mark(self.render([*messages[:turn], marked], tools))
        if after is None or closed is None or not text.endswith(after):
            raise DataError(REWRITTEN)
        return len(text) - len(after) + _shared(after, closed)

    def _marked(
        self, text: str, tokens: list[int], encoding: Encoding | None, spans: list[tuple[int, int]]
    ) -> EncodedConversation | DataError:
        """Mark the tokens of each turn up to the one that ends it.

        A token across the first character counts as prompt, one across the last as the text that follows.
        """
        if encoding is None:
            raise DataError(
                "the model's tokenizer does not say which characters a token stands for, so answers cannot be located; "
                "use a model folder with a tokenizer.json",
                key="tokenizer.json",
            )
        if isinstance(embedded := self._embedded(tokens), DataError):
            return embedded
        offsets = encoding.offsets
        answer = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in spans:
            first = _first_token(encoding, offsets, start)
            behind = next((i for i in range(first, len(tokens)) if offsets[i][1] > end), len(tokens))
            turn = [(tokens[i], text[slice(*offsets[i])]) for i in range(first, behind)]
            answer[first : first + self._length(turn)] = True
        if not answer.any():
            return DataError("the answer is empty once the chat template has rendered it")
        if answer[0]:
            return DataError("there is nothing before the answer once the chat template has rendered it")
        return EncodedConversation(np.asarray(tokens, dtype=np.int32), answer)

    def _length(self, turn: list[tuple[int, str]]) -> int:
        """Return the number of tokens of a turn up to the one that ends it, from the tokens and their texts.

        Whitespace behind a special token is the template's, and so is a second special token that ends the document. If
        a turn ends without a special token, all of its text is the policy's.
        """

        def trimmed(count: int) -> int:
            while count and turn[count - 1][0] not in self._special and not turn[count - 1][1].strip():
                count -= 1
            return count

        count, after = trimmed(len(turn)), self.closing.after
        if after and tuple(token for token, _ in turn[:count][-len(after) :]) == after:
            count = trimmed(count - len(after))
        ended = count > 0 and turn[count - 1][0] in self._special | {self.closing.end}
        return count if ended else len(turn)


def _check_thoughts(answer: Message, written: str) -> None:
    """Raise DataError if the template drops the thoughts of an answer, in a separate field or in its text: the policy
    would learn to answer without them."""
    among = _THOUGHTS.search(answer.get("content") or "")
    thoughts = str(thoughts_of(answer) or (among[1] if among else ""))
    if thoughts.encode(errors="replace").decode().strip() not in written:  # as `render` writes half a surrogate pair
        raise DataError(
            "the chat template leaves out the thoughts of an answer that carries loss; use a template that writes "
            "them, or leave them out of the data"
        )


def _as_system(messages: Sequence[Message]) -> list[Message]:
    """Join the texts of developers and system prompts into one system prompt, as vLLM's server does for a template that
    knows no developers."""
    joins = ("developer", "system")
    texts = [message["content"] for message in messages if message["role"] in joins and message.get("content")]
    others = [message for message in messages if message["role"] not in joins]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _shape(message: Message) -> tuple[str, bool, bool]:
    """Return what decides whether a template writes a message: its role, whether it has text, and calls."""
    content = message.get("content")
    return message["role"], isinstance(content, str) and bool(content.strip()), bool(message.get("tool_calls"))


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _first_token(encoding: Encoding, offsets: Sequence[tuple[int, int]], start: int) -> int:
    # A token across the character begins before it. Some characters belong to no token.
    length = len(offsets)
    end = offsets[-1][1] if length else 0
    token = next((t for c in range(start, end) if (t := encoding.char_to_token(c)) is not None), length)
    straddles = start > 0 and encoding.char_to_token(start - 1) == token
    return token + 1 if straddles else token
