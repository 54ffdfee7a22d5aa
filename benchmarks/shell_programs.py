# ruff: noqa: E501 - a choice of texts on a line
"""How `trinity import-verl` reads shell scripts, compared with bash.

    python benchmarks/shell_programs.py [--programs 5000] [--seed 0] [DIR]

Random programs of what veRL's scripts are written in, and, if DIR is given, each script below it that starts a
training. Prints what is read otherwise than by bash, and counts; the exit code is 1 if
anything is. The scripts in DIR are run, up to their training command, by bash without other programs in the sandbox for
model-written code: without network and files of their own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))

from import_verl.shell_programs import misread  # noqa: E402

from trinity_core.import_verl.conditions import END, UNKNOWN, VARIABLE  # noqa: E402
from trinity_core.import_verl.shell import ShellScript, UnreadableShell  # noqa: E402
from trinity_core.import_verl.verl_settings import PROGRAM, programs  # noqa: E402
from trinity_core.workflows.rewards.code.sandbox import CodeLimits, run_program  # noqa: E402

PRELUDE = r"""
PATH=/nonexistent
command_not_found_handle() { local IFS=$'\037'; printf 'run\037%s\037\036' "$*"; } >&7
basename() { local p=${1%/}; echo "${p##*/}"; }
source() { :; }
eval() { :; }
exec 7>&1 >/dev/null 2>&1 </dev/null
set --
builtin source ./script.sh
"""


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


def random_programs(first: int, count: int) -> Counter[str]:
    """Outcomes of random programs; those that are misread are printed."""
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + count):
        text = Program(seed).text()
        try:
            difference = misread(text)
        except UnreadableShell:
            outcomes["refused"] += 1
            continue
        outcomes["assumed" if difference is None else "misread" if difference else "as bash"] += 1
        if difference:
            print(f"--- seed {seed}\n{difference}")
    return outcomes


def commands_of_bash(text: str) -> list[list[str]]:
    """The words of each program that bash would start for a script."""
    files = {"prelude.sh": PRELUDE, "script.sh": text}
    ran = run_program(files, ["/bin/bash", "--norc", "prelude.sh"], "", CodeLimits(seconds=10))
    return [words.split("\037")[1:-1] for words in ran.output.decode().split("\036")[:-1]]


def agrees(ours: list[str], theirs: list[str]) -> bool:
    """Whether two commands have the same words; what is not known here may be anything."""
    marks = re.compile(f"[{UNKNOWN}{VARIABLE}].*?{END}", re.DOTALL)
    pattern = "\037".join(".*".join(map(re.escape, marks.split(word))) for word in ours)
    return re.fullmatch(pattern, "\037".join(theirs), re.DOTALL) is not None


def scripts(folder: Path) -> Counter[str]:
    """Outcomes of the scripts in a folder."""
    outcomes: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.sh")):
        text = path.read_text()
        try:
            ours = [command.words for command, _ in programs(ShellScript(text))]
        except UnreadableShell as error:
            outcomes["refused"] += any(map(PROGRAM.search, text.split()))
            print(f"{path}: {error}")
            continue
        theirs = commands_of_bash(text) if ours else []
        missing = [words for words in ours if not any(agrees(words, other) for other in theirs)]
        reached = not missing or any(PROGRAM.search(word) for words in theirs for word in words)
        outcomes["as bash" if not missing else "misread" if reached else "not reached by bash"] += bool(ours)
        if missing and reached:
            near = max(theirs, key=lambda words: len({*words} & {*missing[0]}), default=[])
            print(f"{path}\n  here {[*filter(lambda word: word not in near, missing[0])]}")
            print(f"  bash {[*filter(lambda word: word not in missing[0], near)]}")
    return outcomes


def main() -> None:
    """Compare, and print counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made = random_programs(args.seed, args.programs)
    print(f"random programs: {dict(made)}")
    read = scripts(args.folder) if args.folder else Counter()
    print(f"scripts: {dict(read)}")
    sys.exit(bool(made["misread"] or read["misread"]))


if __name__ == "__main__":
    main()
