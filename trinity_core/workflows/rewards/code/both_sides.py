"""Runs at an endpoint, in one sandbox: starts both sides, and prints a verdict for each test as a line of JSON.

Standard input is `{"tests": [...], "seconds": ..., "wanted": ...}`: `seconds` a test, and all tests `wanted` or those
up to the first failure. This process and that of the tests are closed to other processes of their user.
"""

import ctypes
import json
import socket
import subprocess
import sys

PR_SET_DUMPABLE = 4
END_SECONDS = 10.0


def main() -> None:
    """Print verdicts until none is missing or wanted."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.load(sys.stdin)
    tests = request["tests"]
    while tests:
        tests = tests[_run(tests, request["seconds"], request["wanted"]) :]


def _run(tests: list[object], seconds: float, wanted: bool) -> int:
    """Run tests until one ends the answer's process; return the number of those decided."""
    (ours, theirs), (judge, tested) = socket.socketpair(), socket.socketpair()
    tester = _started("tests_side", ours, tested)
    answer = _started("answer_side", theirs)
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
                return done or sys.exit("the process of the tests ended without a verdict")
            print(line.decode(), end="", flush=True)
            verdict = json.loads(line)
            if "unjudged" in verdict or not (verdict["passed"] or wanted):
                return len(tests)
            if verdict.get("exceeded"):
                return done + 1
        return len(tests)
    finally:
        for process in (answer, tester):
            process.kill()
            process.wait(END_SECONDS)


def _started(side: str, *ends: socket.socket) -> subprocess.Popen[bytes]:
    descriptors = [end.fileno() for end in ends]
    return subprocess.Popen(
        [sys.executable, "-B", "sandbox_rpc.py", side, *map(str, descriptors)],
        pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    main()
