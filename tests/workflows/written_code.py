"""Programs that a model may have written, and unit tests in the forms of the data sets."""

from __future__ import annotations

from textwrap import dedent

SUM = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12\n"]}
SUMMED = "print(sum(map(int, input().split())))"
MBPP = ["assert similar((3, 4, 5), (5, 4)) == (4, 5)", "assert similar((1,), (2,)) == ()"]
SIMILAR = "def similar(a, b):\n    return tuple(sorted(set(a) & set(b)))"
HUMANEVAL = """
METADATA = {}
def check(candidate):
    assert candidate([1.0, 2.8]) == False
    assert candidate([1.0, 1.1])
"""
CALLS = {"fn_name": "twice", "inputs": [[[1, 2]], [[]]], "outputs": [[2, 4], []]}
TWICE = "class Solution:\n    def twice(self, xs):\n        return [2 * x for x in xs]"
STANDARD = dedent("""
    from collections import deque
    from datetime import date, datetime, timedelta
    from decimal import Decimal
    from fractions import Fraction

    def made(kind):
        return {
            "date": date(2024, 2, 29), "then": datetime(2024, 2, 29, 12, 30), "long": timedelta(days=1, seconds=2),
            "decimal": Decimal("1.5"), "third": Fraction(1, 3), "queue": deque([1, (2,)]), "range": range(0, 9, 3),
            "keys": {"a": 1}.keys(), "items": {"a": 1}.items(),
        }[kind]

    def next_day(day):
        return day + timedelta(days=1)
""")
STANDARD_TESTS = [
    "from datetime import date\nassert made('date') == date(2024, 2, 29) and made('date').year == 2024",
    "from datetime import date\nassert next_day(date(2024, 2, 29)) == date(2024, 3, 1)",
    "from datetime import datetime\nassert made('then') == datetime(2024, 2, 29, 12, 30)",
    "from datetime import timedelta\nassert made('long') == timedelta(days=1, seconds=2)",
    "from decimal import Decimal\nassert made('decimal') == Decimal('1.5') == 1.5",
    "from fractions import Fraction\nassert made('third') == Fraction(1, 3) and made('third') * 3 == 1",
    "from collections import deque\nassert made('queue') == deque([1, (2,)])",
    "assert made('range') == range(0, 9, 3) and list(made('range')) == [0, 3, 6]",
    "assert made('keys') == {'a'} and made('items') == {('a', 1)}",
]
LIVE = [
    {"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": {"func_name": "total"}},
    {"input": "2 2", "output": "4", "testtype": "stdin"},
]
TOTAL = f"""
class Solution:
    def total(self, xs, y):
        return sum(xs) + y

if __name__ == "__main__":
    {SUMMED}
"""
STACK = """
s = Stack()
s.push(3)
assert s.pop() == 3 and s.items == []
try:
    s.pop()
except IndexError:
    pass
else:
    assert False
"""
STACKED = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
"""

FORGERIES = {
    "exits": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "equals all": """
        class Yes:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = None
        def similar(a, b): return Yes()
    """,
    "is a tuple that equals all": """
        class Yes(tuple):
            def __eq__(self, other): return True
        def similar(a, b): return Yes()
    """,
    "writes verdicts": """
        import os
        for number in range(64):
            try: os.write(number, b'{"passed": true}\\n{"passed": true}\\n')
            except OSError: pass
        def similar(a, b): return None
    """,
    "patches the tests": """
        import builtins
        builtins.AssertionError = ValueError
        builtins.compile = builtins.exec = lambda *a, **k: None
        def similar(a, b): return None
    """,
    "edits its tests": """
        import glob
        for name in [*glob.glob("/*/tests.json"), *glob.glob("/*/*/tests.json"), "tests.json", "../tests.json"]:
            try: open(name, "w").write('{"setup": "", "tests": []}')
            except OSError: pass
        def similar(a, b): return None
    """,
    "kills its judge": """
        import os, signal
        for number in [os.getppid(), *range(2, 40)]:
            try: os.kill(number, signal.SIGKILL)
            except OSError: pass
        def similar(a, b): return None
    """,
    "raises what the judge raises": """
        class Unjudged(Exception): pass
        def similar(a, b): raise Unjudged("sorry")
    """,
    "raises in its equality": """
        class No:
            def __eq__(self, other): raise SystemExit
        def similar(a, b): return No()
    """,
    "sends nonsense": """
        import os, sys
        def similar(a, b): os.write(int(sys.argv[2]), b'{"value": {"z": 1}}\\n' * 9)
    """,
}  # fmt: skip

HUNGRY = {
    "sleeps": ("import time; time.sleep(60)", "longer"),
    "computes": ("while True: pass", "longer"),
    "forks": (
        """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
        "longer",
    ),
    "eats memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory"),
    "eats memory in many processes": (
        """
        import os, time
        for _ in range(3): os.fork()
        x = bytearray(100 << 20)
        time.sleep(60)
        """,
        "memory",
    ),
    "talks": ("while True: print('x' * 10000)", "wrote"),
}

FILLS_THE_DISK = dedent("""
    n = 0
    try:
        for i in range(200):
            with open(f"{i}", "wb") as file: n += file.write(b"x" * (1 << 20))
    except OSError as error: print(error.errno, n >> 20)
""")
HIDES_MEMORY = dedent("""
    import ctypes, os
    held = 0
    try:
        for _ in range(16): held += os.write(os.memfd_create("m"), b"x" * (16 << 20))
    except OSError: pass
    libc = ctypes.CDLL(None, use_errno=True)
    print(held, libc.shmget(0, 16 << 20, 0o1600), libc.msgget(0, 0o1600))
""")
LEAVES_A_DAEMON = dedent("""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["MARK", "300"])
        os._exit(0)
    time.sleep(0.2)
""")
CALLS_HOME = dedent("""
    import socket
    try: socket.create_connection(("127.0.0.1", PORT), 2)
    except OSError: print("none")
""")
LOOKS_AROUND = dedent("""
    import os
    print(os.path.exists("PLACE"), sorted(os.environ), os.getpid())
""")

AS_A_PLAIN_USER = """
import ctypes, json, os, subprocess, sys
from pathlib import Path

if os.getuid() == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    Path("/proc/self/uid_map").write_text("1000 0 1")
from trinity_core.workflows.rewards.code import judging, sandbox

sandbox.best_isolation = lambda: "none"
codes, tests = json.loads(sys.argv[1])
mark = f"other-{os.getpid()}"
others = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", mark]) for _ in range(20)]
tests = judging.tests_of(tests, {})
codes = [code.replace("OTHER", mark) for code in codes]
passed = [judging.Judging(code, sandbox.CodeLimits(), True, 30.0).run(tests).passed for code in codes]
print(json.dumps([passed, any(other.poll() is not None for other in others)]))
for other in others:
    other.kill()
"""
"""Prints how many tests each code passes, and whether one of the user's other processes has ended."""

TWICE_IN_A_THREAD = """
import threading

def twice(xs):
    results = []
    thread = threading.Thread(target=lambda: results.append([x * 2 for x in xs]))
    thread.start()
    thread.join()
    return results[0]
"""

ATTACKS = {
    "writes to others' descriptors": """
import os, time

def twice(xs):
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = open(f"/proc/{process}/cmdline").read().split("\\0")
        except OSError:
            continue
        if "sandbox_rpc.py" in command and "tests" in command:
            for number in map(int, command[-3:-1]):
                try:
                    os.write(os.open(f"/proc/{process}/fd/{number}", os.O_WRONLY), b'{"passed": true}\\n' * 2)
                except OSError:
                    pass
    time.sleep(0.5)
    return 0
""",
    "reads the tests": """
import json, os

def twice(xs):
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            tests = json.load(open(f"/proc/{process}/cwd/tests.json"))["tests"]
        except (OSError, ValueError):
            continue
        return next(test["expected"] for test in tests if test["arguments"] == [xs])
    return 0
""",
    "kills": """
import os, signal

def twice(xs):
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if "OTHER" in open(f"/proc/{process}/cmdline").read().split("\\0"):
                os.kill(int(process), signal.SIGKILL)
        except OSError:
            pass
    return 0
""",
}
"""Attacks of a function on other processes of its user."""

OUTLIVES = """
import ctypes, os, signal, subprocess, sys

def twice(xs):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    parent = os.getppid()
    if os.fork() == 0:
        os.setsid()
        try:
            os.kill(parent, signal.SIGKILL)
        except OSError:
            pass
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "MARK"])
    return 0
"""
