"""How `trinity import-verl` reads shell scripts, compared with bash.

    python benchmarks/shell_programs.py [--programs 5000] [--seed 0] [DIR]

Random programs of what veRL's scripts are written in (`tests/config/shell_programs.py`), and, if DIR is given, each
script below it that starts a training. Prints what is read otherwise than by bash, and counts; the exit code is 1 if
anything is. The scripts in DIR are run, up to their training command, by bash without other programs in the sandbox for
model-written code: without network and files of their own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))

from config.shell_programs import Program, misread  # noqa: E402

from trinity_core.config.import_verl.conditions import END, UNKNOWN, VARIABLE  # noqa: E402
from trinity_core.config.import_verl.shell import ShellScript, UnreadableShell  # noqa: E402
from trinity_core.config.import_verl.verl_settings import PROGRAM, programs  # noqa: E402
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
