# ruff: noqa: E501 - a choice of texts on a line
"""Random shell programs out of what veRL's scripts are written in, and what bash makes of them.

`test_import_verl.py` and `benchmarks/shell_programs.py` share it. A program calls `run`, which prints its words. Bash
is the judge: it has no variables of the environment but HOME and PATH, and no commands but its own.
"""

from __future__ import annotations

import re
import subprocess
from random import Random
from tempfile import TemporaryDirectory

from trinity_core.config.import_verl.conditions import UNKNOWN, variable
from trinity_core.config.import_verl.shell import ShellScript

RUN = "run() { printf '%s\\037' run \"$@\"; printf '\\036'; }\n"
ARGUMENTS = ["8", "a b", "x=*"]
HOME = "/home/u"
NAMES = ["a", "b", "c"]
VALUES = ["", "1", "8", "two", "math_x.sh", "a b", " a  b ", "x*y", "[0-9]", "it's", "org/model-7B", "$a", "a\\b", "~"]
PATTERNS = [
    "*", '"*"', "?", "[0-9]", "[!0-9]*", "[^a]", "[a-c]*", "[]x]", "[x", "[[:digit:]]", "*_*", "m*h*", "'['", "\\*", "*.sh",
    "$a", '"$b"', "${c}*", "a\\ b", '""', "*/", "/*", "1|8", "two | 8", "[*]", "x\"*\"y", "-*", "@",
]  # fmt: skip


class Program:
    """Grows one program."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._depth = 0

    def text(self) -> str:
        """A program of a few lines."""
        start = [
            "asks() { return 3; }\na=0 b=0 c=0 aarr=() barr=()",
            *(f"{name}={self.quoted_value()}" for name in NAMES),
        ]
        start += [
            f"{name}arr=({' '.join(self.word() for _ in range(self._random.randrange(4)))})" for name in NAMES[:2]
        ]
        flags = self.one("", "", "", "set -e", "set -eo pipefail", "set -x", "set -- 'q r' $a")
        lines = [*start, flags, *(self.statement() for _ in range(self._random.randrange(2, 7)))]
        return "\n".join(lines) + '\nrun end "$a" "$b" "$c" "${aarr[@]}" "${#barr[@]}" $# "$@"\n'

    def one(self, *choices: str) -> str:
        return self._random.choice(choices)

    def quoted_value(self) -> str:
        value = self.one(*VALUES)
        if "'" in value:
            return self.one('"it\'s"', "$'it\\'s'", "it\\'s", "'it'\\''s'", "$'a\\tb'")
        return self.one(f"'{value}'", f'"{value}"')

    def parameter(self) -> str:
        name = self.one(*NAMES)
        inner = self.one(
            name, name, f"{name}:-{self.default()}", f"U:-{self.default()}", f"U-{self.default()}", f"{name}:+y",
            "U:+y", f"V:={self.one(*NAMES)}", f"{name}##*/", f"{name}%%_*", f"{name}#{self.one('[0-9]', '?', '*a', chr(34) + '*' + chr(34))}",
            f"{name}%{self.one('.*', 'b', '[a-z]', '?')}", f"{name},,", f"{name}^^", f"{name}//{self.one('a', '/', '?')}/{self.one('z', '', '_')}",
            f"#{name}", "#aarr[@]", "aarr[@]", "aarr[*]", "barr[0]", "barr[1]", "barr", "1", "2", "@", "*", "#", "@:2", "1:-d", "7:-d",
        )  # fmt: skip
        return f"${{{inner}}}"

    def default(self) -> str:
        return self.one("d", "a b", "'q r'", '"$a"', "$b", "['x','y']", "", "*", "~/d", "${c:-e}")

    def word(self) -> str:
        part = [
            self.one("k=", "a.b=", "", "x", "~/x", "\\ ", "--n="),
            self.one(
                self.parameter(), f'"{self.parameter()}"', f'"a {self.parameter()} {self.parameter()}"', self.quoted_value(), "${a}", '"$b"',
                "'[\"c\"]'", "['c','d']", "$((2 * 3))", f"$(({self.sum()}))", "\"$(echo \"$a\")\"", "$(echo $a x)", "$(basename org/m.x)", "\\$a",
                "$@", '"$@"', '"$*"', "$#", "a\\\nb", "{}", "a#b", "''", '""', "=", "$1",
            ),
            self.one("", "", "", "y", '"z"', "$c", '"$1"'),
        ]  # fmt: skip
        text = "".join(part)
        return text if text and not text.startswith("#") else "w"

    def sum(self) -> str:
        return self.one("7 / 2", "-7 / 2", "-7 % 4", "(1 + 2) * 3", "n * 2", "${#a} + 1", "n - 1", "$# + 1")

    def words(self) -> str:
        return " ".join(self.word() for _ in range(self._random.randrange(1, 4)))

    def condition(self) -> str:
        one, other, name = f'"{self.parameter()}"', self.one("1", "8", "two", '"a b"', "''"), self.one(*NAMES)
        single = self.one(
            f"[ {one} = {other} ]", f"[ {one} != {other} ]", f"[ -n {one} ]", f"[ -z {one} ]", f"[ ! -z {one} ]", f"[ ${name} = 1 ]",
            f"test {one} = 8", f"[ {one} = 8 -o -n {one} ]", f"[ {one} = 8 -a -n {one} ]", "[ $# -gt 2 ]", f"[ {one} -eq 8 ]",
            f"[[ ${name} == {self.pattern()} ]]", f"[[ {one} != {self.pattern()} ]]", f"[[ -n {one} && ${name} == {self.pattern()} ]]",
            f"[[ -z ${name} || ! {one} == 8 ]]", "[[ $# -ge 3 ]]", f"[[ ${name} ]]", "true", "false", "asks", f"[ ${name} ]", "! false",
        )  # fmt: skip
        return self.one(
            single, single, f"{single} && {self.one('true', 'false', f'[ -n {one} ]')}", f"{single} || true"
        )

    def pattern(self) -> str:
        return self.one(*[pattern for pattern in PATTERNS if "|" not in pattern])

    def block(self) -> str:
        return "\n ".join(self.statement() for _ in range(self._random.randrange(1, 3)))

    def statement(self) -> str:
        self._depth += 1
        simple = [
            lambda: f"run {self.words()}",
            lambda: f"run {self.words()} # run no",
            lambda: f"run {self.words()} 2>&1",
            lambda: (
                f"{self.one(*NAMES)}{self.one('=', '+=')}{self.one(self.quoted_value(), self.parameter(), f'x{self.parameter()}', '~/x', '')}"
            ),
            lambda: f"export {self.one(*NAMES)}={self.word()} e=$a",
            lambda: f"{self.one('aarr', 'barr')}{self.one('=', '+=')}({self.words()} # c\n {self.words()})",
            lambda: f"{self.condition()} && {self.one('a', 'b')}={self.one('1', '8')}",
            lambda: f"{self.condition()} && run {self.word()} || run no",
            lambda: self.one("shift", "unset a; a=${a-gone}", "shift 9"),
            lambda: f"set -- {self.words()}",
            lambda: f"a=9 b=$a; n={self.one('3', '7')}",
            lambda: "run <<E\nrun ) no $a\nE",
            lambda: f"b=1 run {self.word()} $b",
            lambda: f"x={self.word()} | run {self.word()}",
        ]
        nested = [
            lambda: f"if {self.condition()}; then {self.block()}\nelif {self.condition()}; then {self.block()}\nelse {self.block()}\nfi",
            lambda: f"if {self.condition()}; then\n {self.block()}\nfi",
            lambda: f"for i in {self.one('1 2', chr(34) + '$@' + chr(34), chr(34) + '${aarr[@]}' + chr(34), self.one('two', 'a.b'))}; do run $i; {self.block()}\ndone",
            lambda: f"case {self.word()} in\n {self.one(*PATTERNS)}) {self.block()}\n ;;\n ({self.one(*PATTERNS)}) run {self.word()} ;;\n *) {self.block()}\nesac",
            lambda: f"f() {{\n local a={self.word()} b=$a\n local c; c=3\n {self.block()}\n {self.one('return', 'return 1', 'return $?', 'true')}\n}}\nf {self.words()} && run f || run no f",
            lambda: f"g() {{ local -a aarr=({self.words()}); run \"${{aarr[@]}}\" $#; }}\nb=t g {self.words()}; run \"$b\"",
            lambda: f"( {self.block()}\n a=sub )\nrun \"$a\"",
            lambda: f"{{ {self.block()}\n}}",
        ]  # fmt: skip
        text = self._random.choice(nested if self._depth < 3 and self._random.random() < 0.45 else simple)()
        self._depth -= 1
        return text


def bash_words(text: str) -> list[list[str]] | None:
    """The words of each `run` of a program as bash has them; None if it calls the program wrong."""
    environment = {"HOME": HOME, "PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}
    script = f'basename() {{ local p=${{1%/}}; echo "${{p##*/}}"; }}\n{RUN}{text}'
    command = ["/bin/bash", "-c", script, "script", *ARGUMENTS]
    with TemporaryDirectory() as empty:  # no file fits a pattern
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=60)
    if "syntax error" in done.stderr or "unexpected EOF" in done.stderr:
        return None
    return [words.split("\037")[1:-1] for words in done.stdout.split("\036")[:-1]]


def misread(text: str) -> str | None:
    """What of a program is read otherwise than by bash; empty if nothing is.

    None if the reader assumes something that bash, which has no machine around it here, cannot confirm. A variable that
    is not set counts as empty. Raises UnreadableShell for a program that is refused.
    """
    script = ShellScript(text, ARGUMENTS)
    calls = [command.words[1:] for command in script.commands() if command.words[0] == "run"]
    assumed = [assumption for assumption in script.assumptions if "taken as not set" not in assumption]
    if assumed or any(UNKNOWN in word for words in calls for word in words):
        return None
    ours = [[re.sub("\ue000.*?\ue002", "", word.replace(variable("HOME"), HOME)) for word in words] for words in calls]
    theirs = bash_words(text)
    return "" if theirs in (ours, None) else f"{text}\nbash: {theirs}\nhere: {ours}"
