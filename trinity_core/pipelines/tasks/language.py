"""Keep rows that are written in a language."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator, checked_keys, text_of

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

WITHIN = {
    "ar": ("ary", "arz"),
    "ku": ("sdh",),
    "no": ("nn",),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
"""A language → others of its family that the library tells apart; ISO 639-3 counts them as its members."""
WORDLESS = "zxx"
"""No language at all. ISO 639-2's code for it."""
EVIDENCE = 0.1
"""A text in which no language is as likely as this, such as a formula, has no words of any."""


@TASK_OPERATORS.register("language_id_score_filter")
class LanguageIdScoreFilter(TaskOperator):
    """Keep rows in which the text of each column is most likely in one of the languages `lang` (ISO 639-1 codes).

    `min_score` is the least probability of that. Text without words of any language is kept where it is 0.
    """

    def __init__(
        self, input_keys: list[str], lang: list[str] | str, min_score: Annotated[float, Ge(0), Le(1)] = 0.0
    ) -> None:
        self._keys = checked_keys("language_id_score_filter", input_keys)
        self._lang = [lang] if isinstance(lang, str) else list(lang)
        self._min_score = min_score
        if not self._lang:
            raise InputError("language_id_score_filter: lang must name at least one language")

    def start(self) -> None:
        known = _identifier().labels
        if unknown := [each for each in self._lang if each not in known]:
            raise InputError(
                f"language_id_score_filter: no language {', '.join(unknown)} is known; lang takes codes of ISO 639, "
                f"as {', '.join(sorted(each for each in known if len(each) == 2))}"
            )

    def row(self, row: Row, memory: Memory) -> list[Row]:
        return [row] if all(self._fits(text_of(row, key)) for key in self._keys) else []

    def _fits(self, text: str) -> bool:
        likely = dict(_identifier().rank(text))
        wanted = sum(likely.pop(each, 0.0) for lang in self._lang for each in (lang, *WITHIN.get(lang, ())))
        wordless = likely.pop(WORDLESS)
        others = max(likely.values(), default=0.0)
        if max(wanted, others) < max(wordless, EVIDENCE):
            return self._min_score == 0
        return wanted >= max(others, self._min_score)


@cache
def _identifier() -> LanguageIdentifier:
    """The library's model, with probabilities; read once, in 0.3 s."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
