"""Task operators that ask no model: filters of rows by their text, and Data-Juicer's operators."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import regex
from annotated_types import Ge, Le

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.files import expanded
from trinity_core.data.files import Row, data_files, stream_rows
from trinity_core.pipelines.data_juicer.client import PLACE, Processes, Step, measured, steps_of
from trinity_core.pipelines.tasks.task_operator import (
    TASK_OPERATORS,
    Memory,
    Outcome,
    TaskOperator,
    Unusable,
    checked_keys,
    text_of,
)

# A decimal point or a sign changes a number: "1.5" is one word, and "-5" is not "5".
_WORD = re.compile(r"(?<!\w)-?\d+(?:[.,]\d+)*|\w+")


def words(text: str) -> list[str]:
    """Return words and numbers in lower case, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(words: list[str], n: int) -> Iterator[str]:
    """Yield every sequence of `n` words; a shorter text is one sequence."""
    for start in range(max(1, len(words) - n + 1) if words else 0):
        yield " ".join(words[start : start + n])


def digest(text: str, size: int = 8) -> bytes:
    """Return a hash of `size` bytes that is the same in every process."""
    return blake2b(text.encode(), digest_size=size).digest()


@TASK_OPERATORS.register("text_length_filter")
class TextLengthFilter(TaskOperator):
    """Keep rows in which the text of each column has between `min_len` and `max_len` characters, inclusive."""

    def __init__(
        self,
        input_keys: list[str],
        min_len: Annotated[int, Ge(0)] = 1,
        max_len: Annotated[int, Ge(0)] | None = None,
    ) -> None:
        self._keys = checked_keys("text_length_filter", input_keys)
        self._min, self._max = min_len, float("inf") if max_len is None else max_len
        if self._max < self._min:
            raise InputError(f"text_length_filter: max_len {max_len} is below min_len {min_len}", key="max_len")

    def row(self, row: Row, memory: Memory) -> list[Row]:
        return [row] if all(self._min <= len(text_of(row, key)) <= self._max for key in self._keys) else []


SEARCH_SECONDS = 1.0
"""Time limit per row. Some expressions, such as `(a|aa)+$`, take time exponential in the text's length."""


@TASK_OPERATORS.register("format_check_filter")
class FormatCheckFilter(TaskOperator):
    """Keep rows whose column `input_key` matches the regular expression `pattern` somewhere."""

    def __init__(self, input_key: str, pattern: str) -> None:
        self._key = input_key
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise InputError(
                f"format_check_filter: pattern {pattern!r} is no regular expression: {error}", key="pattern"
            ) from error

    def row(self, row: Row, memory: Memory) -> Outcome:
        try:
            return [row] if self._pattern.search(text_of(row, self._key), timeout=SEARCH_SECONDS) else []
        except TimeoutError:
            return Unusable(f"format_check_filter: searching '{self._key}' took longer than {SEARCH_SECONDS:g} s")


@TASK_OPERATORS.register("duplicate_filter")
class DuplicateFilter(TaskOperator):
    """Drop rows whose columns `input_keys` contain the same text as those of an earlier row.

    With `ignore_format`, texts that differ only in case, punctuation or spaces count as the same.
    """

    def __init__(self, input_keys: list[str], ignore_format: bool = True) -> None:
        self._keys = checked_keys("duplicate_filter", input_keys)
        self._ignore_format = ignore_format

    def row(self, row: Row, memory: Memory) -> list[Row]:
        texts = [text_of(row, key) for key in self._keys]
        # Formulas may differ only in symbols, so a text without words is compared unchanged.
        compared = [" ".join(words(text)) or text for text in texts] if self._ignore_format else texts
        return [row] if memory.add(self.label, digest("\0".join(compared), 16)) else []


@TASK_OPERATORS.register("contamination_filter")
class ContaminationFilter(TaskOperator):
    """Drop rows that share a sequence of `ngram` words with a row of an eval set; without `remove`, only mark them.

    A marked row has the column `contaminated`, true or false. An eval text with fewer words than `ngram` counts only if
    it is the whole training text. The n-grams of the eval sets are in memory; the training set is not.
    """

    def __init__(
        self,
        eval_paths: list[str],
        input_keys: list[str],
        split: str = "test",
        ngram: Annotated[int, Ge(1)] = 13,
        remove: bool = True,
    ) -> None:
        self._paths, self._split, self._ngram, self._remove = eval_paths, split, ngram, remove
        self._keys = checked_keys("contamination_filter", input_keys)
        self._known: set[bytes] = set()

    @property
    def files(self) -> Sequence[Path]:
        return [file for path in self._paths for file in data_files(path, self._split)]

    def start(self) -> None:
        for path in self._paths:
            for location, row in stream_rows(path, self._split):
                if isinstance(row, str):
                    raise DataError(f"contamination_filter cannot read the eval set: {location}: {row}")
                self._known |= self._digests(row)

    def _digests(self, row: Row) -> set[bytes]:
        return {digest(run) for key in self._keys for run in ngrams(words(text_of(row, key)), self._ngram)}

    def row(self, row: Row, memory: Memory) -> list[Row]:
        contaminated = not self._known.isdisjoint(self._digests(row))
        if self._remove:
            return [] if contaminated else [row]
        return [{**row, "contaminated": contaminated}]


if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

WITHIN = {
    "ar": ("ary", "arz"),
    "ku": ("sdh",),
    "no": ("nn",),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
"""A language → closely related languages that the library distinguishes; ISO 639-3 lists them as its members."""
WORDLESS = "zxx"
EVIDENCE = 0.1
"""If no language is at least this likely, as for a formula, the text has no words of any."""


@TASK_OPERATORS.register("language_id_score_filter")
class LanguageIdScoreFilter(TaskOperator):
    """Keep rows in which the text of each column is most likely in one of the languages `lang` (ISO 639-1 codes).

    `min_score` is the minimum probability of that. Text without words of any language is kept if it is 0.
    """

    def __init__(
        self, input_keys: list[str], lang: list[str] | str, min_score: Annotated[float, Ge(0), Le(1)] = 0.0
    ) -> None:
        self._keys = checked_keys("language_id_score_filter", input_keys)
        self._lang = [lang] if isinstance(lang, str) else list(lang)
        self._min_score = min_score
        if not self._lang:
            raise InputError("language_id_score_filter: lang must name at least one language", key="lang")

    def start(self) -> None:
        labels = _identifier().labels
        if unknown := [code for code in self._lang if code not in labels]:
            raise InputError(
                f"language_id_score_filter: no language {', '.join(unknown)} is known; lang takes codes of ISO 639, "
                f"as {', '.join(sorted(code for code in labels if len(code) == 2))}",
                key="lang",
            )

    def row(self, row: Row, memory: Memory) -> list[Row]:
        return [row] if all(self._fits(text_of(row, key)) for key in self._keys) else []

    def _fits(self, text: str) -> bool:
        likely = dict(_identifier().rank(text))
        score = sum(likely.pop(code, 0.0) for lang in self._lang for code in (lang, *WITHIN.get(lang, ())))
        wordless = likely.pop(WORDLESS)
        others = max(likely.values(), default=0.0)
        if max(score, others) < max(wordless, EVIDENCE):
            return self._min_score == 0
        return score >= max(others, self._min_score)


@cache
def _identifier() -> LanguageIdentifier:
    """Load the library's model with normalised probabilities; read once, in 0.3 s."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


WHOLE = ("deduplicator", "selector", "grouper", "aggregator")
"""Suffixes of Data-Juicer's operators that need all rows of a data set at once."""
OWN = "__dj__"


@TASK_OPERATORS.register("data_juicer")
class DataJuicerOperators(TaskOperator):
    """Run Data-Juicer's filters and mappers on rows. `operators` is a list as in its own configuration, `config_path`
    such a file.

    Filters' statistics become columns of the same name (`text_len`, `llm_quality_score` …). Operators that need all
    rows of a data set at once are refused, because rows are processed in chunks.
    """

    revision = 1

    def __init__(
        self,
        data_juicer_server: Processes | None = None,
        operators: list[dict[str, Any]] | None = None,
        config_path: str | None = None,
    ) -> None:
        self._server, self._path = data_juicer_server, config_path
        self._steps: list[Step] = list(steps_of(operators, config_path))
        names = [name for step in self._steps for name in step]
        if whole := [name for name in names if name.endswith(WHOLE)]:
            raise InputError(
                f"data_juicer: {whole[0]} looks at all rows of a data set at once, but rows pass in chunks; leave it "
                "out, or run Data-Juicer on the file first. duplicate_filter finds duplicates across chunks.",
                key="operators",
            )

    @property
    def files(self) -> Sequence[Path]:
        return () if self._path is None else (expanded(self._path),)

    def start(self) -> None:
        """See `TaskOperator`. Without rows, the server checks that it can create the operators."""
        assert self._server is not None, "whoever runs the pipeline gives the server"
        self._server.process([], self._steps)

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        """See `TaskOperator`. Raises TransientFault if the server is away, TrinityError if an operator fails."""
        assert self._server is not None, "whoever runs the pipeline gives the server"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        sent = [{PLACE: index, **{key: row.get(key) for key in columns}} for index, row in enumerate(rows)]
        outcomes: list[list[Row]] = [[] for _ in rows]
        for left in self._server.process(sent, self._steps):
            index = left[PLACE]
            outcomes[index].append(_row(left, rows[index]))
        return list(outcomes)


def _row(left: Row, original: Row) -> Row:
    """Return a row without Data-Juicer's own columns, and with its statistics."""
    columns = {key: value for key, value in left.items() if key != PLACE and not key.startswith(OWN)}
    return _restored(columns, original) | measured(left)


def _restored(left: Any, original: Any) -> Any:
    """Return a value as it was before it passed through Arrow, if no operator has changed it: Arrow gives all objects
    of a column the same keys, and makes integers beside decimals decimals."""
    if isinstance(left, dict) and isinstance(original, dict):
        return {
            key: _restored(value, original.get(key))
            for key, value in left.items()
            if value is not None or key in original
        }
    if isinstance(left, list) and isinstance(original, list) and len(left) == len(original):
        return [_restored(*values) for values in zip(left, original, strict=True)]
    return original if left == original else left
