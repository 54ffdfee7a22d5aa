"""When two final answers are the same: what is a number, a list, text or a formula, for reference and answer alike.

Both are spelled alike (`spelling.plain`); `read` finds the first kind of `KINDS` that fits. Numbers are compared
exactly, text as text, lists item by item; math-verify compares formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from trinity_core.workflows.rewards.spelling import GREEK, LETTER, OTHER_NUMBER, closely, differ, plain

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+(?:_\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER = r"[eE](?P<e>[-+]?\d{1,4})|\s*(?:\\times|\\cdot|[xX])\s*10\s*\^\{\s*(?P<power>[-+]?\d{1,4})\s*\}"
_PART = (
    r"\s*(?:\\frac\s*(?:\{\s*(?P<a>\d+)\s*\}|(?P<c>\d))\s*(?:\{\s*(?P<b>\d+)\s*\}|(?P<d>\d))"
    r"|(?P<over>\d+)\s*/\s*(?P<under>\d+))"
)
_REPEATING = r"(?P<int>\d*)\.(?P<once>\d*)(?:\\(?:overline|bar|dot)\s*\{?\s*(?P<again>\d+)\s*\}?|\((?P<round>\d+)\))|"
_REPEATING += r"(?P<start>\d*)\.(?P<then>\d*?)(?P<dots>\d)(?P=dots)+\s*(?:\.{3}|\\[lc]?dots)"
_LITERAL = (
    rf"(?P<sign>[-+]?)\s*(?:(?P<digits>{_DIGITS})(?:{_POWER})?|"
    rf"(?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?:and\s+)?))?{_PART}|{_REPEATING})\s*(?P<percent>%?)"
)
_NUMBER = re.compile(_LITERAL)
_SQUARED = r"(?: ?\^\{-?\d\})?"
_MEASURE = rf"(?:[ckm]?[mgNJWVCLs]|mol|K|Pa|\\Omega){_SQUARED}"
_UNIT = re.compile(
    rf"(?<=[\d\s}}])(?:[mg]{_SQUARED}|(?<=\s)(?:[sLhNJVWCKT]|\\Omega|\\mu ?\w|{_MEASURE}(?= *\\cdot)))"
    rf"(?: */ *[a-zA-Z]+{_SQUARED}| *\\cdot *{_MEASURE})*$"
)
"""Units of one letter or symbol after a number, and products of units."""
LONGEST = 300
"""Characters of a number that is read digit by digit; a longer one is a formula."""
LONGEST_ANSWER = 1000
"""Characters of an answer that is read, if its reference is shorter: math-verify takes minutes for endless ones."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value, and how much of it was written down."""

    value: Fraction
    rounding: Fraction = Fraction(0)
    """Half a unit of the last place of a decimal that may have been rounded: six places or more."""
    percent: bool = False


def _number(text: str, question: str) -> Number | None:
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if match is None:
        return None
    part = {name: value for name, value in match.groupdict().items() if value}
    rounding = Fraction(0)
    if digits := part.get("digits"):
        digits, power = re.sub("[, _]", "", digits), int(part.get("e") or part.get("power") or 0)
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** power
        places, significant = len(digits.partition(".")[2]) - power, len(digits.replace(".", "").strip("0"))
        if places >= 6 and significant >= 4:
            rounding = max(Fraction(1, 2 * 10**places), abs(value) / 10**12 if significant >= 15 else Fraction(0))
    elif again := part.get("again") or part.get("round") or part.get("dots"):
        whole, once = part.get("int", part.get("start", "0")), part.get("once", part.get("then", ""))
        value = Fraction(int(whole + once + again) - int(whole + once), 10 ** len(once) * (10 ** len(again) - 1))
    else:
        over = int(part.get("a") or part.get("c") or part["over"])
        under = int(part.get("b") or part.get("d") or part["under"])
        if under == 0:
            return None
        value = int(part.get("whole", 0)) + Fraction(over, under)
    return Number(-value if part.get("sign") == "-" else value, rounding, "percent" in part)


_SCALES = {"half": 0.5, "quarter": 0.25, "dozen": 12, "hundred": 100, "thousand": 1000, "million": 1e6, "billion": 1e9}
_WORDS = re.compile(
    rf"\\[A-Za-z]+|(?![A-Za-z]{{1,2}}e\^){LETTER}(?:['’]?{LETTER})+['’]?|\b[ai](?=\s+{LETTER}{{2}})|"  # not Ce^x
    rf"(?={LETTER})[\u4e00-\u9fff]"
)
_PRODUCT = re.compile(
    r"(?!(?:[cdmk]m|[mk]g|[dm]l|ft|lbs?|[hy]rs?|wks?|yds?|[mk]ph|rpm|Hz|pcs|[ap]m|a[stn]|[bm]y|mi|st|[nr]d|th|sq|pts)\b)"
    r"(?!.*(.).*\1)"
    r"(?:[a-df-hj-np-tv-z]{2}|[b-df-hj-np-tv-z]{3,4}|[abcxyz]{3,4}|abcd|[A-Z][xz]|ie|ei|[a-z]i)"
)
"""Letters that are variables side by side: neither a word nor a unit."""
_SENTENCE = re.compile(r"((?:\0[\s:,.]*)*+)([^\0]+)((?:\0(?:\s*\^\{\d\})?(?:/[a-zA-Z]\b(?:\^\{\d\})?)?[\s(),.:/!-]*)*)")
_PER = ("per", "a", "an", "each", "every")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it is compared. `text` is its LaTeX without `words` around it; units after "per" begin with `/`."""

    kind: str
    value: Any
    text: str
    words: frozenset[str] = frozenset()
    whole: str = ""
    name: str = ""
    """All of an equation, and what it states the value of."""


_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}  # fmt: skip


def _base(text: str, question: str) -> tuple[str, int] | Fraction | None:
    match = re.fullmatch(r"\(?\s*(-?[0-9A-Za-z.]+)\s*\)?\s*_\s*\{\s*\(?(\w+)\)?\s*\}", text)
    if match is None or not re.search(r"\d|[A-F]{2}", match[1]):
        return None
    base = _BASES.get(match[2]) or int(match[2] if match[2].isdecimal() else 0)
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:base]
    written = match[1].upper().lstrip("0") or "0"
    if base == 10 and (number := _number(written, question)):
        return number.value
    return (written, base) if 2 <= base <= 36 and all(digit in digits + ".-" for digit in written) else None


def _time(text: str, question: str) -> tuple[int, ...] | None:
    if re.fullmatch(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}", text):
        return tuple(map(int, re.split("[-/]", text)))
    match = re.fullmatch(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?", text)
    return None if match is None or "ratio" in question.lower() else tuple(int(part or 0) for part in match.groups())


def _ratio(text: str, question: str) -> Any:
    """Return the one number that `1:2` is, or the terms of `1:2:3` as multiples of the first."""
    text = text.replace(" to ", ":") if "ratio" in question.lower() else text
    terms = [_number(term.strip(), question) for term in text.split(":")] if text.count(":") in range(1, 10) else []
    if not terms or any(term is None or term.percent or not term.value for term in terms):
        return None
    first, *others = [term.value for term in terms if term]
    if len(others) == 1:
        return first / others[0]
    return tuple(other / first for other in others)


_NO_OTHER_CHOICE = r"(?!.*\b(?:[A-H]|or|and|not|maybe|wrong|incorrect)\b)"


def _choice(text: str, question: str) -> str | None:
    """Return the letter of `B`, `(B)`, `Option B`, `(B) Paris`."""
    match = re.fullmatch(r"(?:[Oo]ption |[Cc]hoice |选项?)?[(\[]?\s*([A-H])\s*[.)\]]*", text)
    match = match or re.match(rf"\(([A-H])\) (?=\S){_NO_OTHER_CHOICE}", text)
    return None if match is None else match[1].lower()


def _split(text: str, separators: str) -> list[str]:
    """Split a text where a separator stands outside of brackets."""
    parts, start, depth = [], 0, 0
    for match in re.finditer(rf"[(\[{{}}\])]|{separators}", text):
        if match[0] in ("(", "[", "{", "}", "]", ")"):
            depth += 1 if match[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _items(text: str, question: str) -> tuple[str, list[str]] | Answer | None:
    """Split a list at commas, semicolons, "and" and "or"; `±` makes two items. Its shape is that of its brackets: `()`,
    `[)`, `{}` or none. `{5}` is the number."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    is_closed = opening in ("(", "[", "{", "\\{") and _closed(text, len(opening)) == len(text)
    shape = opening[-1] + text[-1] if is_closed else ""
    inner = text[len(opening) : -2 if text.endswith("\\}") else -1] if shape else text
    comma = "," if shape else r"(?:,(?!\d{3}(?!\d))|(?<!\d),)"  # not 1,234
    items = _split(inner, rf"(?:{comma}|;)(?:\s*(?:and|or)\b)?|(?<!\w)(?:and|or)(?!\w)")
    if all(item.count("\\pm") < 2 for item in items):
        items = [
            alternative for item in items for alternative in dict.fromkeys(item.replace("\\pm", sign) for sign in "+-")
        ]
    shape = "()" if shape == "[]" and len(items) > 2 else shape  # no interval
    if len(items) == 1 and items[0] not in ("", "\\emptyset") and shape in ("[]", "{}"):
        return read(items[0], question)
    return (shape, items) if all(items) and len(items) > 1 else None


def _closed(text: str, start: int) -> int:
    """Return where the bracket that is open at `start` is closed, or a length beyond the text."""
    depth = 1
    for match in re.compile(r"[(\[{}\])]").finditer(text, start):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.end()
    return len(text) + 1


def _restated(text: str, question: str) -> Number | None:
    """Return the number that is written in two ways: `1/2 or 0.5`, `1/2 (0.5)`."""
    match = re.fullmatch(r"(.*\S)(?: or (\S.*)| \((.*)\))", text)
    first, second = [_number(part, question) for part in (match[1], match[2] or match[3])] if match else (None, None)
    return first if first and second and _numbers_equal(second, first, question) else None


_NO_NAME = re.compile(r"\d|\\(?:ne|le|ge|pm|ln|log|sqrt)(?![a-z])|[<>!]|^-")
_APPROXIMATELY = re.compile(r"(.*\S) *\\approx *(-?\d+\.(\d+))")


def _equation(text: str, question: str) -> Answer | None:
    """Read the value of `x = 42`, `2 + 40 = 42`, `x ∈ [1, 2]`; None if the equation does not state a value.

    Sides without a variable must be equal. A side with numbers in it (`2x = 84`) is a name only if the question has it.
    """
    if match := _APPROXIMATELY.fullmatch(text):
        exact, half_a_unit = read(match[1], question), Fraction(1, 2 * 10 ** len(match[3]))
        if exact.kind in ("number", "formula") and _formulas_equal(exact, read(match[2]), half_a_unit):
            return exact
    name, *values = _split(text, r"(?<![<>!\\:])=(?!=)|\\(?:in|approx|equiv)(?![a-z])")
    if not values or not all(values) or len(values) > 4 or OTHER_NUMBER.search(name):
        return None
    bare = re.sub(r"_(?:\w|\{[^{}]*\})|\([^()]*\)", "", name)
    if name and not re.search(r"[^\W\d]", re.sub(rf"\\(?!(?:{GREEK})(?![a-z]))[a-z]+|\\pi", "", name)):
        values = [name, *values]
    elif _NO_NAME.search(bare) and closely(name) not in closely(plain(question)):
        return None
    answers = [read(value, question) for value in values]
    agree = answers[-1].kind not in ("text", "choice") and all(
        _equal(left, answers[-1], question) for left in answers[:-1]
    )
    return replace(answers[-1], whole=text, name=closely(name)) if agree else None


def _sentence(text: str, question: str) -> Answer | None:
    """Read words around one number or formula; None if a word changes its meaning ("18 and a half", "less than 18").

    A dozen, thousand… after a number multiplies it, unless the question asks "how many dozen" or "in thousands".
    """
    unit = _UNIT.search(text)
    if unit and not re.search(rf"(?<!\w)(?<!\d ){re.escape(unit[0][0])}(?!\w)", question):  # "in terms of m"
        number = _number(text[: unit.start()].strip(), question)
        units = frozenset(name.replace(" ", "") for name in re.findall(r"/? *\\?[a-zA-Z]+", unit[0]))
        return None if number is None else Answer("number", number, text[: unit.start()], units)
    words: list[str] = []

    def word(match: re.Match[str]) -> str:
        if match[0].startswith("\\") or _PRODUCT.fullmatch(match[0]):
            return match[0]
        words.append(match[0].lower())
        return "\0"

    match = _SENTENCE.fullmatch(_WORDS.sub(word, text))
    if match is None or not words:
        return None
    words_before, core, words_after = (
        match[1].count("\0"),
        match[2].lstrip(" :").rstrip(" (/-:"),
        words[match[1].count("\0") :],
    )
    scale = next((scale for scale in _SCALES if words_after and words_after[0].removesuffix("s") == scale), None)
    if OTHER_NUMBER.search(" ".join([*words[:words_before], "0", *words_after[scale is not None :]])):
        return None
    answer = read(core.rstrip(".,") if core.count("(") == core.count(")") else core, question)
    if scale and not re.search(rf"\b(how many ([\w'-]+ ){{0,3}}{scale}|in {scale}s\b)", question, re.IGNORECASE):
        if answer.kind != "number":
            return None
        answer = Answer("number", Number(answer.value.value * Fraction(_SCALES[scale])), core)
    slashes = re.findall(r"(/?)\0", match[3])
    units_after = [
        f"/{unit}" if slash or earlier in _PER else unit
        for slash, earlier, unit in zip(slashes, ["", *words_after], words_after, strict=False)
    ]
    units = frozenset([*words[:words_before], *units_after, *re.findall(r"/[a-zA-Z]\b", match[3])])
    return None if answer.kind == "text" else Answer(answer.kind, answer.value, answer.text, units)


def _text(text: str, question: str) -> str | None:
    """Return the letters of words, names, labels (`B2`) and orders (`ABC`; `A, B, C`) without their spacing."""
    letters = re.sub(r"[\s.,;()]+(?:and\s+)?", " ", text).strip()
    if re.fullmatch(r"[A-Z](?: [A-Z])+", letters):
        letters = letters.replace(" ", "")
    if not letters or (re.fullmatch(r"[A-Za-z]", letters) or _PRODUCT.fullmatch(letters)):
        return None
    is_text = re.fullmatch(rf"{LETTER}(?:{LETTER}|['’ -])*|[A-Za-z]+\d\w*", letters) and not re.search(
        r"(?<![^ ])\w -|- ?\w(?= |$)", letters
    )
    return letters.casefold() if is_text else None


_NOT_ONE_FORMULA = re.compile(
    r"\\(?:approx|equiv|(?<!_\{\w\\)(?<!_\{\w \\)to|implies|[lv]or|vee)(?![a-z])|\?|\d \d|"
    r"\\frac\{[^{}]*\}\{[^{}]*\} ?\d|^$"
)


def _formula(text: str, question: str) -> str | None:
    """Return what math-verify is to read: one formula or equation without words."""
    words = (match[0] for match in _WORDS.finditer(text) if match[0][0] != "\\" and not _PRODUCT.fullmatch(match[0]))
    if not text.isascii() or _NOT_ONE_FORMULA.search(text) or len(_split(text, "=")) > 2:
        return None
    return text if "\\begin" in text or all(word.isupper() for word in words) else None


KINDS: dict[str, Callable[[str, str], Any]] = {
    "choice": _choice,
    "number": _number,
    "base": _base,
    "time": _time,
    "ratio": _ratio,
    "restated": _restated,
    "text": _text,
    "list": _items,
    "equation": _equation,
    "sentence": _sentence,
    "formula": _formula,
}
"""What an answer may be, and who reads it, in the order in which they are asked; any other answer is text."""


def read(text: str, question: str = "") -> Answer:
    """Read an answer that `plain` has spelled."""
    for kind, reader in KINDS.items():
        match reader(text, question):
            case Answer() as answer:
                return answer
            case Fraction() | Number() as value:
                return Answer("number", Number(value) if isinstance(value, Fraction) else value, text)
            case value if value is not None:
                return Answer(kind, value, text)
    return Answer("text", re.sub(r"\s+", " ", text).casefold(), text)


@lru_cache(maxsize=256)  # the rollouts of a task often give the same answer
def same(answer: str, truth: str, question: str = "") -> bool:
    """True if two final answers are equal. Raises ValueError if the reference is empty or unreadable mathematics."""
    if len(answer) > max(LONGEST_ANSWER, 2 * len(truth)):
        return False
    plain_answer, plain_truth = plain(answer), plain(truth)
    if plain_truth and closely(plain_answer) == closely(plain_truth):
        return True
    gold = read(plain_truth, question)
    if _equal(read(plain_answer, question), gold, question):
        return True
    if not gold.text or (gold.kind == "formula" and _expression(gold, {}) is None):
        raise ValueError(f"math-verify cannot read the reference answer {truth!r:.80}")
    return False


def without_verifier(answer: str, truth: str) -> bool | None:
    """Return `same` if both are written as plain numbers, else None. Linear time: it runs in the explorer's process."""
    if len(answer) > LONGEST or len(truth) > LONGEST:
        return None
    number, gold = _number(answer, ""), _number(truth, "")
    return (
        None if number is None or gold is None or number.percent or gold.percent else _numbers_equal(number, gold, "")
    )


def _equal(answer: Answer, gold: Answer, question: str) -> bool:
    if answer.name != gold.name:
        equations = [_formula(side.whole or side.text, question) or "" for side in (answer, gold)]
        if all("=" in equation for equation in equations):
            answer, gold = (Answer("formula", equation, equation) for equation in equations)
            return _formulas_equal(answer, gold)
    if answer.kind == gold.kind and closely(answer.text) == closely(gold.text) and answer.words == gold.words:
        return True
    if differ(answer.words, gold.words):
        return False
    match answer.kind, gold.kind:
        case "number", "number":
            return _numbers_equal(answer.value, gold.value, question)
        case "list", "list":
            return _lists_equal(answer.value, gold.value, question)
        case ("number", "time") | ("time", "number") if answer.words & gold.words & {"am", "pm"}:
            hour, clock = (answer, gold) if gold.kind == "time" else (gold, answer)
            return bool(clock.value == (hour.value.value, 0, 0))
        case "number", "base" if re.search(rf"base[ -]?\$?({gold.value[1]}|\w+)\b", question):
            return re.sub(r"\s", "", answer.text) == gold.value[0]
        case ("formula", "formula" | "list" | "number") | ("list" | "number", "formula"):
            return _formulas_equal(answer, gold)
        case "choice", "choice" if all(re.match(r"\(\w\) \S", side.text) for side in (answer, gold)):
            left, right = (read(side.text[4:], question) for side in (answer, gold))
            return bool(answer.value == gold.value) and _equal(left, right, question)
        case "choice", "formula":
            return bool(answer.value == gold.text.lower())
        case _, "choice" if answer.kind != "choice":
            label = re.match(rf"[(\[]?([A-Ha-h])(?:[.)\]:]{_NO_OTHER_CHOICE}|$)", answer.text)
            return label is not None and label[1].lower() == gold.value
        case _:
            return answer.kind == gold.kind and bool(answer.value == gold.value)


def _numbers_equal(answer: Number, gold: Number, question: str) -> bool:
    """Compare exactly, up to the rounding of long decimals. `50 %` is 0.5, and 50 where percent are the unit."""
    readings = [(answer.value, gold.value)]
    if answer.percent != gold.percent:
        share, plain_value = (answer, gold.value) if answer.percent else (gold, answer.value)
        readings = [(share.value / 100, plain_value)]
        if plain_value.denominator == 1 or abs(plain_value) > 1 or re.search("percent|%", question):
            readings.append((share.value, plain_value))
    return any(abs(left - right) <= max(answer.rounding, gold.rounding) for left, right in readings)


def _lists_equal(answer: tuple[str, list[str]], gold: tuple[str, list[str]], question: str) -> bool:
    """Compare item by item: in order in pairs and intervals, in any order in sets and lists without brackets."""
    (shape, items), (form, gold_items) = answer, gold
    if len(items) != len(gold_items) or (shape != form and {shape, form} not in ({"", "()"}, {"", "{}"})):
        return False
    left, right = ([read(item, question) for item in side] for side in (items, gold_items))
    ordered = bool({shape, form} - {"", "{}"})
    for side, other in ((left, right), (right, left)):
        if "()" in (shape, form) and len({entry.name for entry in side}) == 1 and side[0].name and not other[0].name:
            return False  # x = 1 or x = 2
        names = {re.sub("_.*", "", entry.name) for entry in side} - {""}
        if len(names) == len(side) and not any(entry.name for entry in other):  # y = 2, x = 1 for (1, 2)
            side.sort(key=lambda entry: entry.name)
            ordered = True
    for want in right:
        index = next(
            (n for n, entry in enumerate(left[: 1 if ordered else None]) if _equal(entry, want, question)), None
        )
        if index is None:
            return False
        del left[index]
    return True


def _formulas_equal(reply: Answer, gold: Answer, rounding: Fraction = Fraction(0)) -> bool:
    """Compare numbers by their values, up to a rounding, and other formulas with math-verify."""
    letters = [set(re.sub(r"\\[A-Za-z]+", "", formula.text)) for formula in (reply, gold)]
    capitals = sorted({c for side in letters for c in side if c.isupper() and c.lower() in side})
    renamed = dict(zip(capitals, sorted(set("abchjklmnopqrstuvwxyz").difference(*letters)), strict=False))
    truth, answer = _expression(gold, renamed), _expression(reply, renamed)
    if truth is None or answer is None or len(_split(reply.text, "=")) != len(_split(gold.text, "=")):
        return False
    if _is_astronomic(truth) or _is_astronomic(answer):
        return bool(truth == answer)
    if all(getattr(formula, "is_number", False) for formula in (truth, answer)):
        rounding = max(rounding, *(getattr(formula.value, "rounding", Fraction(0)) for formula in (reply, gold)))
        return _values_equal(answer, truth, rounding)
    from math_verify import verify

    return bool(verify(truth, answer, numeric_precision=60, timeout_seconds=None, raise_on_error=True))


def _is_astronomic(expression: Any) -> bool:
    """True for a number such as 9^{9^{9}} or 10000000!, which SymPy would write out."""
    from sympy import Pow, binomial, factorial, postorder_traversal

    return any(
        size.is_number and abs(size.evalf(5)) > 10**5
        for node in postorder_traversal(expression)
        if isinstance(node, (Pow, binomial, factorial))
        for size in (node.args[isinstance(node, Pow)],)
    )


def _values_equal(left: Any, right: Any, rounding: Fraction) -> bool:
    """Compare two numbers of SymPy, up to a rounding: rational ones exactly, others to 40 digits."""
    from sympy import Rational, simplify

    left, right = left.doit(), right.doit()
    if left == right or not (left.is_finite and right.is_finite):
        return bool(left == right)
    if not (left.is_Rational and right.is_Rational):
        size = max(abs(left.evalf(60)), abs(right.evalf(60)))
        if size < Rational(1, 10**40):
            return bool(simplify(left - right) == 0)
        left, right, rounding = left.evalf(60), right.evalf(60), max(rounding, Fraction(str(size)) / 10**40)
    return bool(abs(left - right) <= Rational(rounding.numerator, rounding.denominator))


@lru_cache(maxsize=1)
def _reader() -> Callable[[str], list[Any]]:
    from functools import partial

    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    config = LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=spelling)
    # The pool's timeout replaces math-verify's own.
    return partial(
        parse, extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )


def _expression(answer: Answer, renamed: Mapping[str, str]) -> Any:
    """Parse a formula with math-verify, decimals as exact fractions; None if it is none.

    Capitals beside their small letters (GMm) are `renamed`: math-verify does not distinguish them.
    """
    from sympy import Float, Rational

    if answer.kind == "number":
        value = answer.value.value
        return Rational(value.numerator, value.denominator) * (Rational(1, 100) if answer.value.percent else 1)
    text = re.sub(r"\\[A-Za-z]+|[A-Z]", lambda match: renamed.get(match[0], match[0]), answer.text)
    parsed = _reader()(f"\\boxed{{{text}}}")
    if not parsed or isinstance(parsed[0], str):
        return None
    return parsed[0].xreplace({number: Rational(str(number)) for number in parsed[0].atoms(Float)})
