"""Programs that a model may have written, and unit tests in the forms of the data sets."""

from __future__ import annotations

import json
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
    "exits like one who is done": """
        import sys
        def similar(a, b):
            sys.exit(0) if len(a) == 1 else None
            return (4, 5)
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
    import ctypes, mmap, os, subprocess, threading
    held = 0
    def write():
        return os.write(os.memfd_create("m"), b"x" * (16 << 20))
    def share():
        return len(mmap.mmap(-1, 16 << 20))
    def share_zeros():
        return len(mmap.mmap(os.open("/dev/zero", os.O_RDWR), 16 << 20))
    for take in (write, share, share_zeros):
        try:
            for _ in range(16): held += take()
        except OSError: pass
    libc = ctypes.CDLL(None, use_errno=True)
    print(held, libc.shmget(0, 16 << 20, 0o1600), libc.msgget(0, 0o1600))
    print(libc.unshare(1 << 28), libc.syscall(CLONE, (1 << 28) | 17, 0, 0, 0, 0))
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(), thread.join()
    print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout)
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
import ctypes, json, os, sys
from pathlib import Path

if os.getuid() == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    Path("/proc/self/uid_map").write_text("1000 0 1")
from trinity_core.workflows.rewards.code import forms, judging, sandbox

sandbox.best_isolation = lambda: "none"
codes, tests = json.loads(sys.argv[1])
tests = forms.tests_of(tests, {})
print(json.dumps([judging.Judging(code, sandbox.CodeLimits(), True, 30.0).run(tests).passed for code in codes]))
"""
"""Prints how many tests each code passes."""

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
        if "sandbox_rpc.py" in command and "tests_side" in command:
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
}
"""Attacks of a function on other processes of its user."""

OUTLIVES = """
import ctypes, os, sys

def twice(xs):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "MARK"])
    return 0
"""

ADDS = "def add(a, b):\n    return a + b"
SUBTRACTS = "def add(a, b):\n    return a - b"
REFUSES = "def add(a, b):\n    if a is None: raise ValueError('no number')\n    return a + b"
CLASS = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n"
CALL_TEXTS = {"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"], "fn_name": "add"}
TEST_FORMS = {
    "asserts": "assert add(1, 2) == 3",
    "list of asserts": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
    "Python text of a list": "['assert add(1, 2) == 3', 'assert add(2, 2) == 4']",
    "JSON text of JSON text": json.dumps(json.dumps(["assert add(1, 2) == 3"])),
    "comparison": "add(1, 2) == 3",
    "test function": "def test_add():\n    assert add(1, 2) == 3",
    "test functions with an import": "from solution import add\nimport math\n\ndef test_a():\n"
    "    assert add(1, 2) == 3\n",
    "module of the answer": "import solution as s\ndef test_a():\n    assert s.add(1, 2) == 3\n",
    "async test function": "async def test_a():\n    assert add(1, 2) == 3",
    "parametrized": "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), pytest.param(2, 2, 4, id='x')])\n"
    "def test_a(a, b, c):\n    assert add(a, b) == c",
    "fixtures": "import pytest\n@pytest.fixture\ndef one():\n    yield 1\n@pytest.fixture()\ndef pair(one):\n"
    "    return one, 2\ndef test_a(pair):\n    assert add(*pair) == 3",
    "approx": "from pytest import approx\ndef test_a():\n    assert add(0.1, 0.2) == approx(0.3)",
    "test class": "class TestAdd:\n    def setup_method(self):\n        self.sum = 3\n    def test_a(self):\n"
    "        assert add(1, 2) == self.sum",
    "unittest class": CLASS,
    "unittest class and main": f"{CLASS}if __name__ == '__main__':\n    unittest.main()\n",
    "unittest with setUp": "from unittest import TestCase\nclass T(TestCase):\n    def setUp(self):\n"
    "        self.sum = 3\n"
    "    def test_a(self):\n        with self.subTest(n=1):\n            self.assertEqual(add(1, 2), self.sum)\n",
    "unittest, async": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n",
    "guarded by __main__": "if __name__ == '__main__':\n    assert add(1, 2) == 3\n",
    "pytest.main": "import pytest\ndef test_a():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n"
    "    raise SystemExit(pytest.main([__file__]))\n",
    "raises an error": "if add(1, 2) != 3:\n    raise ValueError('wrong')",
    "exits": "import sys\nfor a in (1, 2):\n    if add(a, 2) != a + 2:\n        print('FAIL')\n"
    "        sys.exit(1)",
    "prints what failed": "try:\n    assert add(1, 2) == 3\n    print('passed')\nexcept AssertionError:\n"
    "    print('failed')",
    "swallows what failed": "def test_a():\n    try:\n        assert add(1, 2) == 3\n"
    "    except Exception as e:\n        print(e)",
    "check": ("def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "add"}),
    "candidate": (["assert candidate(1, 2) == 3"], {"entry_point": "add"}),
    "evalplus": (
        "import numpy as np\ninputs = [[1, 2], [2, 2]]\nresults = [3, 4]\ndef assertion(out, exp, atol):\n"
        "    if atol == 0 and isinstance(exp, float):\n        atol = 1e-6\n    if out != exp and atol != 0:\n"
        "        assert np.allclose(out, exp, rtol=1e-7, atol=atol)\n    else:\n        assert out == exp\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(add(*inp), exp, 0)\n"
    ),
    "MBPP's imports": (["assert add(1, math.floor(2.5)) == 3"], {"test_imports": ["import math"]}),
    "MBPP's setup": (["assert add(*pair) == 3"], {"test_setup_code": "pair = 1, 2"}),
    "calls": {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "fn_name": "add"},
    "unittest with a failing sub-test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        for a, b in ((0, 0), (1, 2), (2, 0)):\n            with self.subTest(a=a):\n"
    "                self.assertEqual(add(a, b), a + b)\n",
    "unittest with setUpModule": "import unittest\ndef setUpModule():\n    global SUM\n    SUM = 3\n"
    "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), SUM)\n",
    "unittest that expects a failure": "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n"
    "    def test_a(self):\n        self.assertEqual(add(1, 2), 4)\n"
    "    def test_b(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "parametrized class": "import pytest\n@pytest.mark.parametrize(argnames='a, b', argvalues=[(0, 0), (1, 2)])\n"
    "class TestAdd:\n    def test_a(self, a, b):\n        assert add(a, b) == a + b",
    "pytest's setup": "def setup_module():\n    global one\n    one = 1\ndef setup_function(function):\n"
    "    global two\n    two = 2\ndef test_a():\n    assert add(one, two) == 3\n"
    "class TestAdd:\n    @classmethod\n    def setup_class(cls):\n        cls.one = 1\n"
    "    def setup_method(self, method):\n        self.two = 2\n"
    "    def test_b(self):\n        assert add(self.one, self.two) == 3\n",
    "skipif that does not hold": "import pytest\n@pytest.mark.skipif(False, reason='')\ndef test_a():\n"
    "    assert add(1, 2) == 3",
    "calls as text, of lists": CALL_TEXTS,
    "metadata as text": (
        '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
        {"metadata": '{"func_name": "add"}'},
    ),
    "metadata of a test as text": [
        {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": '{"func_name": "add"}'}
    ],
    "function_call": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    "test_cases": json.dumps(
        {"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}
    ),
    "calls by name": {"inputs": [{"a": 1, "b": 2}], "outputs": [3], "fn_name": "add"},
    "LeetCode's arguments": ([{"input": "a = 1, b = 2", "output": "3"}], {"entry_point": "add"}),
    "LeetCode's name": ([{"input": "a = [1], b = [2]", "output": "[1, 2]"}], {"entry_point": "Solution().add"}),
    "name beside test_cases": {"test_cases": '{"inputs": [[1, 2]], "outputs": [3]}', "fn_name": "add"},
    "Code-R1": {"functional": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"},
    "data as it is written": "é = 1; cases = [\r\n  ('é', (1, 2)),\n  '\\n']; pair = (1,\n  2)\n"
    "assert add(*cases[0][1]) == 3",
    "annotations from the future": (
        ["from __future__ import annotations\nassert add(1, 2) == 3"],
        {"test_imports": ["import math"]},
    ),
    "a builtin's name": "assert abs(add(1, 2) - 3) < 1e-6",
}  # fmt: skip
"""Tests of a function `add`, or those and the row's other columns."""

PROGRAM_FORMS = {
    "APPS": SUM,
    "CodeContests": {"input": SUM["inputs"], "output": SUM["outputs"]},
    "lists of lines": {"inputs": [["1 2"], ["5 7"]], "outputs": [["3"], ["12"]]},
    "one test": {"input": "1 2", "output": "3"},
    "LiveCodeBench as text": json.dumps([{"input": "1 2", "output": "3\n", "testtype": "stdin"}]),
    "stdin_stdout": {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1 2", "output": "3"}]},
    "DeepCoder": json.dumps([{"type": "stdin_stdout", "input": "1 2", "output": "3 ", "fn_name": None}]),
}
"""Tests of a program that prints the sum of two numbers."""

CHECKS_NOTHING = {
    "reference solution": ADDS,
    "reference solution with its own asserts": f"{ADDS}\nassert add(1, 2) == 3",
    "number": "#### 3",
    "prints": "print(add(1, 2))",
    "reference solution that asserts": "def add(a, b):\n    assert isinstance(a, int)\n    return sum([a, b])",
    "assert True": "add(1, 2)\nassert True",
    "true of anything": ["assert 1 + 1 == 2"],
    "prints what differs": "if add(1, 2) != 3:\n    print('wrong')",
    "empty test function": "def test_add():\n    add(1, 2)",
    "empty check": ("def check(candidate):\n    candidate(1, 2)", {"entry_point": "add"}),
    "no outputs": {"inputs": ["1 2", "2 2"], "outputs": ["", "\n"]},
    "test function that returns": "def test_a():\n    return add(1, 2) == 3",
    "reference as setup": (["assert add(1, 2) == 3"], {"test_setup_code": ADDS}),
}
CROSSING = {
    "changes and returns": (
        "def f(xs): return xs.pop()", "def f(xs): return xs[-1]", "x = [3, 1]\nassert f(x) == 1 and x == [3]",
    ),
    "infinite": (
        "import itertools\ndef f(): return itertools.count()", "def f():\n    while True: yield 0",
        "import itertools\ncounts = f()\nassert [*itertools.islice(counts, 2)] == [0, 1] and next(counts) == 2",
    ),
    "an error after items": (
        "def f():\n    yield from range(4)\n    raise ValueError", "def f(): return range(4)",
        "seen = []\ntry:\n    for one in f():\n        seen.append(one)\n    assert False\n"
        "except ValueError:\n    assert seen == [0, 1, 2, 3]",
    ),
    "truth": (
        "class f:\n    def __init__(self, x): self.x = x\n    def __bool__(self): return self.x > 0",
        "class f:\n    def __init__(self, x): 0", "assert f(1) and not f(0)",
    ),
    "derived from a dict": (
        "from collections import OrderedDict\nclass f(OrderedDict):\n    def put(self, x): self[x] = 1",
        "class f(dict):\n    def put(self, x): self[x] = 2",
        "one = f()\none.put(3)\nassert one == {3: 1} and isinstance(one, dict) and 3 in one and one[3] == 1",
    ),
    "named tuple": (
        "from typing import NamedTuple\nclass f(NamedTuple):\n    x: int\n    def twice(self): return 2 * self.x",
        "from collections import namedtuple\nf = namedtuple('f', 'y')",
        "assert f(2).x == 2 and f(2).twice() == 4 and f(1) == (1,) and f(1) < f(2) and {f(1)} == {(1,)}",
    ),
    "enumeration": (
        "from enum import IntEnum\nclass f(IntEnum):\n    RED = 1\n    BLUE = 2",
        "class f:\n    RED = 2\n    BLUE = 2", "assert f(1) is f.RED and f.RED == 1 and f.RED + 1 == f.BLUE",
    ),
    "shape": (
        "import numpy as np\ndef f(): return np.zeros((2, 3))", "def f(): return [[0.0] * 3] * 2",
        "assert f().shape == (2, 3)",
    ),
    "prints": (
        "def f(): print('hi')", "def f(): print('ho')",
        "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()) as out:\n    f()\n"
        "assert out.getvalue() == 'hi\\n'",
    ),
    "prints, captured": (
        "def f(): print('hi')", "def f(): print('ho')",
        "def test_a(capsys):\n    f()\n    assert capsys.readouterr().out == 'hi\\n'\n    f()\n"
        "    out, err = capsys.readouterr()\n    assert (out, err) == ('hi\\n', '')",
    ),
    "returns what it was given": (
        "def f(xs):\n    xs.sort()\n    return xs", "def f(xs): return sorted(xs)",
        "x = [3, 1]\nassert f(x) is x == [1, 3]",
    ),
    "exception of its own": (
        "class Bad(ValueError): 0\ndef f(): raise Bad('no', 3)", "class Bad(ValueError): 0\ndef f(): raise ValueError",
        "import pytest\nwith pytest.raises(Bad, match='no'):\n    f()\ntry:\n    f()\nexcept Bad as error:\n"
        "    assert isinstance(error, ValueError) and error.args == ('no', 3)",
    ),
    "text of an exception": (
        "class Bad(Exception):\n    def __init__(self, n): self.n = n\n    def __str__(self): return f'bad {self.n}'\n"
        "def f(): raise Bad(3)",
        "class Bad(Exception): 0\ndef f(): raise Bad(3)",
        "try:\n    f()\n    assert False\nexcept Bad as error:\n    assert str(error) == 'bad 3'",
    ),
}  # fmt: skip
"""What crosses between an answer and its tests: a right answer, a wrong one, and the tests."""
APART = {
    "patches": "from unittest.mock import patch\nwith patch('builtins.input', return_value='3'):\n"
    "    assert add(1, 2) == 3",
    "patches an object": "import math\nfrom unittest.mock import patch\nwith patch.object(math, 'pi', 3):\n"
    "    assert add(1, 2) == 3",
    "writes a file": "with open('a', 'w') as file:\n    file.write('3')\nassert add('a', '') == 'a'",
    "looks for names": "assert globals()['add'](1, 2) == 3",
    "docstring": "assert add.__doc__ and add(1, 2) == 3",
    "standard input": "import io, sys\nsys.stdin = io.StringIO('3')\nassert add(1, 2) == 3",
}  # fmt: skip
"""Tests that change the process in which they expect an answer."""
NEVER_REACHED = {
    "function that nobody calls": "def verify():\n    assert add(1, 2) == 3",
    "loop over nothing": "for a in []:\n    assert add(a, 1) == a + 1",
    "skipped": "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert add(1, 2) == 3",
    "unknown module": "import no_such_module\nassert add(1, 2) == 3",
    "fixture of pytest": "def test_a(tmp_path):\n    assert add(1, 2) == 3",
}
UNREADABLE = {
    "packed": "eJxrYJmqyAABPVqMU8oUlHIT8xKVdBSUEvNSgDSIlZGan6KUUqsEALHFDH0=",
    "other language": {"language": "cpp", "test_cases": [{"input": "1 2", "output": "3", "type": "stdin_stdout"}]},
    "unknown type": [{"input": "1 2", "output": "3", "testtype": "interactive"}],
    "null output": {"inputs": ["1 2"], "outputs": [None]},
    "call of no JSON": {"inputs": ["a is 1"], "outputs": ["3"], "fn_name": "add"},
}

SHARED_FORGERIES = {
    "puts a module in the tests' way": """
        forged = "import os, sys; os.write(int(sys.argv[3]), b'{\\"passed\\": true}\\\\n' * 2)"
        open("quopri.py", "w").write(forged)
        def similar(a, b): return None
    """,
    "replaces the script of the tests that are left": """
        import os
        forged = "def main(line, judge): [judge.send('{\\"passed\\": true}') for _ in judge.receive(-1)]"
        def similar(a, b):
            open("tests_side.py", "w").write(forged)
            os._exit(0)
    """,
}
"""Attacks of a function on tests that share its sandbox. The first test imports `quopri`."""
ENDS_ITS_TESTS = """
import os, signal

forged = "def main(line, judge): [judge.send('{\\"passed\\": true}') for _ in judge.receive(-1)]"
def similar(a, b):
    if len(a) == 3: return (4, 5)
    open("tests_side.py", "w").write(forged)
    for process in filter(str.isdigit, os.listdir("/proc")):
        parent = open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1]
        if int(parent) == os.getppid() and int(process) != os.getpid():
            os.kill(int(process), signal.SIGKILL)
    os._exit(0)
"""
