"""Runs at an endpoint, in one sandbox: starts both sides, and prints a verdict for each test as a line of JSON.

Standard input is `{"tests": [...], "seconds": ..., "wanted": ...}`: `seconds` a test, and all tests `wanted` or those
up to the first failure. This process and that of the tests, its fork, are closed to other processes of their user, and
import nothing from the folder that they share with the answer once its code has run.
"""

import ctypes
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_DUMPABLE = 4
END_SECONDS = 10.0
FOLDERS = {Path.cwd(), Path(__file__).resolve().parent}
"""Folders into which the answer may write modules."""


def main() -> None:
    """Print verdicts until none is missing or wanted."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.path.insert(0, ".")
    from sandbox_rpc import loaded  # type: ignore[import-not-found]

    loaded("tests_side")
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() not in FOLDERS]
    request = json.load(sys.stdin)
    tests = request["tests"]
    while tests:
        tests = tests[_run(tests, request["seconds"], request["wanted"]) :]


def _run(tests: list[object], seconds: float, wanted: bool) -> int:
    """Run tests until one ends the answer's process; return the number of those decided."""
    (ours, theirs), (judge, tested) = socket.socketpair(), socket.socketpair()
    tester = multiprocessing.get_context("fork").Process(target=_test, args=(ours, tested, theirs, judge))
    tester.start()
    answer = subprocess.Popen(
        [sys.executable, "-B", "sandbox_rpc.py", "answer_side", str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for end in (ours, theirs, tested):
            end.close()
        judge.settimeout(seconds)
        judge.sendall(json.dumps(tests).encode() + b"\n")
        verdicts = judge.makefile("rb")
        for done in range(len(tests)):
            try:
                line = verdicts.readline()
            except TimeoutError:
                line = b'{"passed": false, "exceeded": true}\n'
            if not line:
                tester.join(END_SECONDS)
                return done if done and tester.exitcode == 0 else sys.exit("the tests ended without a verdict")
            print(line.decode(), end="", flush=True)
            verdict = json.loads(line)
            if "unjudged" in verdict or not (verdict["passed"] or wanted):
                return len(tests)
            if verdict.get("exceeded"):
                return done + 1
        return len(tests)
    finally:
        answer.kill()
        answer.wait(END_SECONDS)
        tester.kill()
        tester.join(END_SECONDS)


def _test(ours: socket.socket, tested: socket.socket, *others: socket.socket) -> None:
    """Run the tests' side, in a process of its own."""
    from sandbox_rpc import Line
    from tests_side import main as test  # type: ignore[import-not-found]

    for end in others:
        end.close()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the output of this file is the verdicts
    test(Line(ours.detach()), Line(tested.detach()))


if __name__ == "__main__":
    main()
