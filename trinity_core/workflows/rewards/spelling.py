"""One spelling for final answers: LaTeX, also for Unicode and plain mathematics, without fonts and marks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|pi|rho|sigma|tau|omega"
_FUNCTIONS = r"arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|ln|log|sqrt|(?:sec|gcd|lcm|max|min)(?=\s*[({])"
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒", "-"), **dict.fromkeys("·⋅∙", "\\cdot "), **dict.fromkeys("\u200b\u200c\u2060\ufeff", ""),
    **{c: unicodedata.normalize("NFKC", c).replace("⁄", "}{").join(("\\frac{", "}")) for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"},
    **{c: f"\\{name} " for c, name in zip("αβγδεθλμφπρστω", GREEK.split("|"), strict=True)},
    **{c: f"\\mathbb{{{unicodedata.normalize('NFKC', c)}}}" for c in "ℝℤℕℚℂ"}, **dict.fromkeys("°º˚", "^\\circ "),
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "、": ", ", "。": ".", "⁄": "/",
    "×": "\\times ", "÷": "/", "∕": "/", "∶": ":", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
    "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "≈": "\\approx ",
    "√": "sqrt", "∛": "\\sqrt[3]", "∠": "\\angle ", "¢": " cents ",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
LETTER = "[^\\W\\d_半一二三四五六七八九十百千万亿萬億]"
_SCALES = {"C": "Celsius", "F": "Fahrenheit", "K": "Kelvin"}
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?|\\(?:display|text)style(?![a-zA-Z])|\\!\s*", ""),
        (r"(?<!\\)\\(?:[,;: ]|$)|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:text)?color ?\{[\w!]+\}|</?(?:b|i|em|strong)>", ""),
        (r"(?<=[\d\s])\{ ?\\(?:rm|bf|it|sf|tt)(?![a-zA-Z])([^{}]*)\}", r" \1 "),
        (r"(?<=\\\\)\[\d+(?:pt|ex|em)\]", ""),  # the height of a matrix's row
        (r"(?:\bUS)?\\?\$|[€£¥₹]|(?<!\\)\\[()\[\]]|[`\"“”]|(?<!\w)__|__(?!\w)", ""),
        (r"(?<![\w)}])\*\*|\*\*(?![\w(\\]|-\d)", ""),
        (r"\s+", " "),
        (r"(?<=[A-Za-z}]) ?/ ?(?=[A-Za-z])", "/"),  # \mathrm{km} / \mathrm{h}
        (r"\\([%#&_])", r"\1"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:angle|triangle)(?![a-zA-Z]) ?(\w{3}\b)?", lambda match: min(match[1] or "", (match[1] or "")[::-1])),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}", r"\\emptyset"),
        (r"\\(?:mathbb|Bbb) ?\{? ?([A-Z])(?![a-zA-Z]) ?\}?", r"\\mathbb{\1}"),
        (r"\{ ?: ?\}|\\colon(?![a-zA-Z])", ":"),
        (r"\\mid(?![a-zA-Z])", "|"),
        (r"\\c?dots(?![a-zA-Z])", r"\\ldots"),
        (r"(?<=\d) ?\\frac\{ ([A-Za-z]+) \}\{ ([A-Za-z]+) \}", r" \1/\2"),  # \frac{\text{m}}{\text{s}}
        (r"\+/-", r"\\pm "),
        (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
        (r"\\lg(?![a-zA-Z])", r"\\log"),
        (r"\{ ?(\w+) ?\\choose ?(\w+) ?\}", r"\\binom{\1}{\2}"),
        (r"(?i)_? ?\{? ?\(?\bbase ?=? ?\{? ?(\w+) ?\}? ?\)? ?\}?", r"_{\1}"),
        (r"(?<=\d)_(?=\d{3}(?!\d))", ""),  # 1_000, as Python writes it; no base has three digits
        (r"\*\*", "^"),
        (r"(?<![A-Za-z\\])(?:[Ii]nfinity|infty|inf|oo)(?![A-Za-z\d])", r"\\infty"),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS}|{GREEK})(?![A-Za-z])", r"\\\1"),
        (r"(?<=\d)i(?![A-Za-z])", " i"),  # math-verify takes only a separate i for the imaginary unit
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?) ?([({])?"
            r"(\d+(?:\.\d+)?) ?\^ ?(?:\\circ|\{\\circ\})(?(2) ?[)}])",
            r"\1(\\frac{\3\\pi}{180})",
        ),
        (r"(\\sqrt(?:\[\d\])?|\\pmod|[\^_]) ?([-+]?\d+(?:\.\d+)?)", r"\1{\2}"),
        (r"(?<=\d) ?\^? ?\{? ?(?:st|nd|rd|th)(?![A-Za-z]) ?\}?", ""),
        (r"\\[lr]angle(?![a-z])", lambda match: "(" if match[0][1] == "l" else ")"),
        (r"(?i) ?\b(?:percent(?:age)?|pct)(?!\w)", "%"),
        (r"(?<!\w)(\d+)C(\d+)(?!\w)", r"\\binom{\1}{\2}"),
        (
            r"(?<=[\d}]) ?(?:\^ ?\{? ?(?:\\circ|o) ?\}?|\\degree)(?: ?([CFK])(?!\w))?(?=[\s.]|$)",
            lambda match: f" degrees {_SCALES.get(match[1], '')} ",
        ),
        (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
    )
]  # fmt: skip
_FONT = re.compile(
    r"\\(?:(text(?:rm|bf|it|sf|tt|normal|up|md)?|[mh]box)|math(?:rm|bf|it|sf|tt)|underline|operatorname\*?|boldsymbol|bm|boxed|fbox)"
    r"\s*\{([^{}]*)\}"
)
_LABEL = re.compile(
    r"(?i)(?:(?:so|thus|hence|therefore|the|my|final|correct)[\s,]+)*answer\s*(?:is\b)?\s*[:=]?\s*(?=\S)"
)
_OPENERS = {"\\sqrt": ("\\sqrt{", "}"), "exp": ("e^{", "}"), "\\exp": ("e^{", "}"),
            "^": ("^{", "}"), "_": ("_{", "}"), "abs": ("|", "|")}  # fmt: skip
_OPENER = re.compile(r"(?:\\sqrt|\\?(?<![A-Za-z])exp|(?<![A-Za-z])abs|[\^_])\s*\(|[()]")


def plain(text: str) -> str:
    """Return an answer in one spelling: LaTeX without fonts, marks and spacing, a label before it or a full stop."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
        text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_RAISED)}}}", text)
        text = unicodedata.normalize("NFKC", "".join(_SYMBOLS.get(c, c) for c in text))
        text = "".join(str(unicodedata.decimal(c, c)) for c in text)
    text = text.replace("{,}", ",")
    for _ in range(4):
        text = _FONT.sub(lambda match: f" {match[2]} " if match[1] else match[2], text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _LABEL.sub("", _with_braces(text).strip(), count=1)
    return re.sub(r"(?<!\.)[.,;]$|(?<=[a-z]{3})!$", "", text.strip()).strip()


def closely(text: str) -> str:
    """Return a text without its spaces, except those between letters and digits."""
    return re.sub(r"(?<!\w)(?<!\d,)\s+|\s+(?!\w)", "", text)


def _with_braces(text: str) -> str:
    """Replace the brackets of `sqrt(2)`, `x^(1/2)`, `exp(16)` by LaTeX's braces."""
    closers: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match[0] == ")":
            return closers.pop() if closers else ")"
        opening, closing = _OPENERS.get(match[0][:-1].strip(), ("(", ")"))
        closers.append(closing)
        return opening

    return _OPENER.sub(one, text)


OTHER_NUMBER = re.compile(
    r"(?i)\b(not?|nor|never|\w+n['’]t|or|minus|negative|plus|mod|root|twice|double|triple|if|maybe|perhaps|otherwise|"
    r"else|unless|squared|cubed|factorial|reciprocal|inverse|cannot|zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    r"eleven|twelve|half|halves|thirds?|quarters?|"
    r"(twen|thir|four|for|fif|six|seven|eigh|nine)(teen|ty)|(four|fif|six|seven|eigh|nin|ten)ths?|dozens?|lakhs?|crores?|"
    r"(hundred|thousand|million|billion|trillion)(s|ths?)?|grand(?! total)|(?<=0 )point(?=\s+\w)|"
    r"wrong|incorrect|false|(times|than|over|under|below|above|least|most|up to)(?=\s+0))\b|"
    r"零下|不(?!同)|非(?![负負零])|[没沒无無或]|未(?!知)|(?<!非)[负負]|半(?!径|徑)|倍(?!数|數)|多(?!边|项|邊|項)|[少超]|"
    r"(?<=0 )(?:[打双雙对對兆折几幾错錯]|成(?!立)|的?(?:平方|立方)(?!毫|厘|分|千|米|公)|的?(?:次方|倒数|相反数))|"
    r"[大小高低][于於]|以[上下内外]"
)
"""Words that change the meaning of an adjacent number (0 here): numbers, operations, doubts and bounds."""
_TELLING = [
    set(group.split())
    for group in (
        "am pm", "bc ad", "nor sou eas wes", "lef rig", "jan feb mar apr may jun jul aug sep oct nov dec",
        "mon tue wed thu fri sat sun", "sec min hou day wee mon yea", "mm cm dm m km", "met kil cen mil", "mg g kg",
        "ml dl", "mph kph", "hz khz mhz rpm", "元 角 分", "米 厘 分 毫 公 里", "年 月 日 天 周 时 分 秒",
        "克 毫 公 斤 吨", "升 毫", "增 减 上 下 升 降", "盈 亏 赚 赔", "东 西 南 北 左 右", "大 小",
        "dol cen eur pou rup yen", "inc fee yar mil", "in ft yd mi", "pou oun kil gra", "lb oz kg g",
        "m s h N J W V L K C T g", "pro los", "inc dec", "up dow", "mor few les", "deg rad", "cel fah kel",
    )
]  # fmt: skip
"""How words begin that tell one number from another: "March 3" is not "April 3"."""
_SHORT = {"h": "hou", "hr": "hou", "hrs": "hou", "s": "sec", "wk": "wee", "wks": "wee", "yr": "yea", "yrs": "yea"}
"""Short words that begin otherwise than those in `_TELLING`."""
_HAN = re.compile("[\u4e00-\u9fff]")
"""A Chinese character, which alone may tell numbers apart, as words do by how they begin."""


def differ(words: Iterable[str], others: Iterable[str]) -> bool:
    """True if the words around two numbers tell them apart. Units after "per", which begin with `/`, are compared with
    each other."""
    pairs = zip(_beginnings(words), _beginnings(others), strict=True)
    return any(
        left & group and right & group and left & group != right & group for left, right in pairs for group in _TELLING
    )


def _beginnings(words: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return how words begin, and how units after "per" do."""
    beginnings: tuple[set[str], set[str]] = (set(), set())
    for word in words:
        name = word.removeprefix("/")
        beginnings[name != word].update((name[:3], _SHORT.get(name, "")))
        beginnings[0].update(_HAN.findall(name))
    return beginnings
