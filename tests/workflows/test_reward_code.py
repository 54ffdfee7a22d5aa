"""Code that a model may write, good and bad, with unit tests in the forms of the data sets."""

import base64
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from written_code import (
    ADDS,
    APART,
    AS_A_PLAIN_USER,
    ATTACKS,
    CALLS,
    CALLS_HOME,
    CHECKS_NOTHING,
    CROSSING,
    ENDS_ITS_TESTS,
    FILLS_THE_DISK,
    FORGERIES,
    HIDES_MEMORY,
    HUMANEVAL,
    HUNGRY,
    LEAVES_A_DAEMON,
    LIVE,
    LOOKS_AROUND,
    MBPP,
    NEVER_REACHED,
    OUTLIVES,
    PROGRAM_FORMS,
    REFUSES,
    SHARED_FORGERIES,
    SIMILAR,
    STACK,
    STACKED,
    STANDARD,
    STANDARD_TESTS,
    SUBTRACTS,
    SUM,
    SUMMED,
    TEST_FORMS,
    TOTAL,
    TWICE,
    TWICE_IN_A_THREAD,
    UNREADABLE,
)

from trinity_core.base.errors import DataError
from trinity_core.workflows import RewardItem, RewardPool
from trinity_core.workflows.rewards.code import code_reward, last_program, sandbox
from trinity_core.workflows.rewards.code.checks import NothingChecked
from trinity_core.workflows.rewards.code.judging import same_output
from trinity_core.workflows.rewards.code.sandbox import CodeLimits, SandboxFailed, best_isolation, python, run_program
from trinity_core.workflows.rewards.code.sandbox_rpc import Unjudged

bubblewrap = pytest.mark.skipif(best_isolation() == "none", reason="bubblewrap does not work here")


def run(code, limits=None):
    return run_program({"solution.py": code}, python("solution.py"), "", limits or CodeLimits())


def judged(code, tests, task=None, **args):
    args = {"time_limit": 5.0} | args
    return code_reward(
        prompt="", response=f"So:\n```python\n{dedent(code)}\n```\n", truth=tests, task=task or {}, **args
    )


@pytest.mark.parametrize(
    "code, tests, share",
    [
        (SUMMED, SUM, 1.0),
        ("print(3)", SUM, 0.5),
        ("print(3.0000001 if input() == '1 2' else 12)", {"inputs": ["1 2", "5 7"], "outputs": ["3.0", "12"]}, 1.0),
        ("print('3 12')", SUM, 0.0),
        (SIMILAR, MBPP, 1.0),
        ("def similar(a, b):\n    return ()", MBPP, 0.5),
        ("def similar(:", MBPP, 0.0),
        ("def near(xs):\n    return xs[1] - xs[0] < 0.3", HUMANEVAL, 1.0),
        ("def near(xs):\n    return True", HUMANEVAL, 0.0),
        (TWICE, CALLS, 1.0),
        ("def twice(xs):\n    return xs + xs", CALLS, 0.5),
        (STANDARD, STANDARD_TESTS, 1.0),
        (TOTAL, LIVE, 1.0),
        (STACKED, STACK, 1.0),
        (STACKED.replace("self.items.pop()", "3"), STACK, 0.0),
        ("def flip(xs):\n    xs.reverse()", ["a = [1, 2]\nflip(a)\nassert a == [2, 1]"], 1.0),
        ("def up(n):\n    yield from range(n)", ["from solution import up\nassert list(up(3)) == [0, 1, 2]"], 1.0),
        ("def big(n):\n    return 10 ** n", ["assert big(6000) == 10 ** 6000"], 1.0),
        ("async def f(x):\n    return x + 1", ["async def test_a():\n    assert await f(1) == 2"], 1.0),
        ("async def f(x):\n    return x", ["import asyncio\nassert asyncio.run(f(1)) == 2"], 0.0),
    ],
)
def test_known_verdicts(code, tests, share):
    scored = judged(code, tests, {"entry_point": "near"}, partial=True)
    assert scored.parts == {"accuracy": float(share == 1), "partial": share if share < 1 else 0.0}
    assert scored.counts["tests_passed"] == share


def form(tests):
    """Tests, and the row's other columns."""
    return tests if isinstance(tests, tuple) else (tests, {})


@pytest.mark.parametrize("tests", TEST_FORMS.values(), ids=TEST_FORMS)
def test_tests_in_any_form_tell_right_from_wrong(tests):
    assert [judged(code, *form(tests)).parts["accuracy"] for code in (ADDS, SUBTRACTS)] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["asserts", "unittest class", "swallows what failed", "check", "calls"])
def test_an_answer_without_the_function_is_wrong(name):
    assert judged("", *form(TEST_FORMS[name])).parts["accuracy"] == 0.0


@pytest.mark.parametrize("name", ["prints what failed", "swallows what failed"])
def test_an_answer_that_raises_what_its_tests_swallow_is_wrong(name):
    raises = "def add(a, b): raise AssertionError"
    assert judged(raises, TEST_FORMS[name]).parts["accuracy"] == 0.0


@pytest.mark.parametrize("tests", PROGRAM_FORMS.values(), ids=PROGRAM_FORMS)
def test_programs_in_any_form_tell_right_from_wrong(tests):
    assert [judged(code, tests).parts["accuracy"] for code in (SUMMED, "print(2)")] == [1.0, 0.0]


@pytest.mark.parametrize(
    "tests",
    [
        "import pytest\nwith pytest.raises(ValueError):\n    add(None, 1)",
        "try:\n    add(None, 1)\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    add(None, 1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        with self.assertRaises(ValueError):\n"
        "            add(None, 1)",
        "def test_a():\n    try:\n        add(None, 1)\n        assert False, 'no error'\n"
        "    except Exception:\n        pass",
    ],
)
def test_an_expected_exception_is_a_check(tests):
    accepts = "def add(a, b):\n    return 0"
    assert [judged(code, tests).parts["accuracy"] for code in (REFUSES, accepts)] == [1.0, 0.0]


@pytest.mark.parametrize("tests", CHECKS_NOTHING.values(), ids=CHECKS_NOTHING)
def test_tests_that_check_nothing_are_an_error(tests):
    for code in (ADDS, SUBTRACTS):
        with pytest.raises(NothingChecked):
            judged(code, *form(tests))


@pytest.mark.parametrize("tests", [*NEVER_REACHED.values(), *APART.values()], ids=[*NEVER_REACHED, *APART])
def test_tests_that_assert_nothing_about_an_answer_or_want_it_in_their_process_give_no_verdict(tests):
    for code in (ADDS, SUBTRACTS):
        with pytest.raises(Unjudged):
            judged(code, *form(tests))


@pytest.mark.parametrize("right, wrong, tests", CROSSING.values(), ids=CROSSING)
def test_values_cross_as_they_are(right, wrong, tests):
    assert [judged(code, tests).parts["accuracy"] for code in (right, wrong)] == [1.0, 0.0]


def test_what_is_in_an_object_is_not_for_the_answer_to_say():
    says_yes = "class f:\n    def __contains__(self, x): return True"
    with pytest.raises(Unjudged):
        judged(says_yes, "assert 3 in f()")
    iterated = f"{says_yes}\n    def __iter__(self): return iter([1])"
    assert judged(iterated, "assert 3 in f()").parts["accuracy"] == 0.0


@pytest.mark.parametrize("compare", ["np.allclose(add(1, 2), 3)", "add(1, 2) == approx(3)"])
@pytest.mark.parametrize("code", ["def add(a, b): return []", "import numpy\ndef add(a, b): return numpy.array([])"])
def test_nothing_is_close_to_no_number(compare, code):
    tests = f"import numpy as np\nfrom pytest import approx\nassert {compare}"
    assert [judged(one, tests).parts["accuracy"] for one in (ADDS, code)] == [1.0, 0.0]


@pytest.mark.parametrize(
    "code",
    [
        "def abs(x): return 0\ndef add(a, b): return 7",
        "def isinstance(a, b): return True\ndef add(a, b): return 7",
        "__checked__ = __caught__ = lambda *a: 1\ndef add(a, b): return 7",
        "def add(a, b): raise AssertionError",
        "class add:\n    def __new__(cls, a, b): return []",
    ],
)
@pytest.mark.parametrize("tests", ["assert abs(add(1, 2) - 3) < 1e-6", "for a in add(1, 2):\n    assert a == 3"])
def test_an_answer_cannot_pass_by_replacing_the_tests_functions(code, tests):
    try:
        assert judged(code, tests).parts["accuracy"] == 0.0
    except Unjudged:
        assert "for" in tests, "nothing was asserted"


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.00", "3.0", True),
        ("3.0000001", "3.0", True),
        ("3.0000001", "3", False),
        ("3.5", "3", False),
        ("03", "3", False),
        ("101.0", "0101", False),
        ("1e3", "1000", False),
        ("1_0.0", "10", False),
        ("nan", "nan.", False),
        (".", "0.", False),
        ("a.0", "a", False),
        ("3 \n\n", "3", True),
        ("3\n4", "3 4", False),
        ("12345678901234567891.0", "12345678901234567890", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(output, expected, same):
    assert same_output(output.encode(), expected) is same


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_a_verdict_cannot_be_forged(code):
    assert judged(code, MBPP).parts == {"accuracy": 0.0}


@pytest.mark.parametrize("code, exceeded", HUNGRY.values(), ids=HUNGRY)
def test_limits_hold(code, exceeded):
    limits = CodeLimits(seconds=1.0 if exceeded == "longer" else 5.0, memory_bytes=256 << 20, output_bytes=1 << 20)
    assert exceeded in run(dedent(code), limits).exceeded


def test_an_exceeded_limit_is_a_failed_test_and_counted():
    scored = judged("import time\ntime.sleep(60)", SUM, time_limit=0.5, partial=True)
    assert scored.parts == {"accuracy": 0.0, "partial": 0.0}
    assert scored.counts == {"tests_passed": 0.0, "limits_exceeded": 2.0}
    scored = judged("def similar(a, b):\n    while len(a) > 1: pass\n    return ()", MBPP, time_limit=1.5, partial=True)
    assert scored.parts == {"accuracy": 0.0, "partial": 0.5} and scored.counts["limits_exceeded"] == 1


@bubblewrap
def test_a_full_disk_is_the_sandboxs_own():
    ran = run(FILLS_THE_DISK, CodeLimits(disk_bytes=8 << 20))
    number, mib = map(int, ran.output.split())
    assert number in (errno.ENOSPC, errno.EFBIG) and mib <= 8


@bubblewrap
def test_no_memory_escapes_the_count():
    """Anonymous files, shared mappings, the system's message queues and what a user namespace mounts are in nobody's
    resident memory."""
    code = HIDES_MEMORY.replace("CLONE", str(sandbox.MACHINES[os.uname().machine][2]))
    assert run(code, CodeLimits(memory_bytes=128 << 20)).output.split() == b"0 -1 -1 -1 -1 thread child".split()


def test_programs_may_use_pools_of_multiprocessing():
    """Their locks are files in /dev/shm."""
    code = "from multiprocessing import Pool\nwith Pool(2) as pool: print(sum(pool.map(abs, [-1, 2])))"
    assert run(code).output == b"3\n"


def test_programs_may_use_the_null_device():
    code = "import subprocess\nsubprocess.run(['/bin/echo', '1'], stdout=subprocess.DEVNULL)\nprint(2)"
    assert run(code).output == b"2\n"


@bubblewrap
def test_a_virtual_environment_may_be_a_link(monkeypatch, tmp_path):
    (tmp_path / "venv").symlink_to(sys.prefix)
    for name in ("prefix", "exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert run("print(1)").output == b"1\n"


@bubblewrap
def test_daemons_end_with_the_program():
    mark = f"daemon-{os.getpid()}"
    assert run(LEAVES_A_DAEMON.replace("MARK", mark)).status == 0
    assert not [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]


@bubblewrap
def test_no_socket_leads_out():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        assert run(CALLS_HOME.replace("PORT", str(server.getsockname()[1]))).output == b"none\n"


@bubblewrap
def test_files_of_others_are_out_of_sight(tmp_path):
    words = run(LOOKS_AROUND.replace("PLACE", str(tmp_path))).output.split()
    assert words[0] == b"False" and words[-1] == b"1" and b"'USER'," not in words


def test_without_bubblewrap_limits_hold_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    monkeypatch.setattr(sandbox, "best_isolation", isolation := sandbox.cache(best_isolation.__wrapped__))
    mark = f"daemon-{os.getpid()}-none"
    try:
        assert isolation() == isolation() == "none"
    except DataError as failed:  # root's code runs as another user, who may not see this Python
        assert "Permission denied" in str(failed) and os.getuid() == 0
    else:
        assert "longer" in run("import time; time.sleep(60)", CodeLimits(seconds=0.5)).exceeded
        assert run(LEAVES_A_DAEMON.replace("MARK", mark)).status == 0
        fills = "for n in range(64):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\nimport time\ntime.sleep(60)"
        assert "wrote more than 8 MiB" in run(fills, CodeLimits(disk_bytes=8 << 20)).exceeded
        assert not [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]
    assert len(caplog.records) == 1


def in_another_process_of_this_user(*codes, tests=CALLS):
    """Without bubblewrap and not as root: the number of tests that each of these codes passes. If these tests run as
    root, a user namespace drops root's powers."""
    if os.getuid() == 0 and best_isolation() == "none":
        pytest.skip("this system permits no namespaces, not even of users")
    command = [sys.executable, "-c", AS_A_PLAIN_USER, json.dumps([list(map(dedent, codes)), tests])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_bubblewrap_a_plain_users_verdicts_are_not_forged():
    """Neither through descriptors of other processes nor through the tests' files."""
    assert in_another_process_of_this_user(TWICE, *ATTACKS.values()) == [2] + [0] * len(ATTACKS)


def test_without_bubblewrap_a_plain_user_may_start_threads():
    """The system counts the threads of all the user's processes."""
    assert in_another_process_of_this_user(TWICE_IN_A_THREAD) == [2]


def test_without_bubblewrap_a_plain_users_code_does_not_outlive_its_verdict():
    mark = f"outlives-{os.getpid()}"
    in_another_process_of_this_user(OUTLIVES.replace("MARK", mark))
    assert not [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]


def test_where_python_cannot_be_run_the_run_ends(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "executable", "/nowhere/python")
    with pytest.raises(DataError):
        sandbox.cache(best_isolation.__wrapped__)()


@pytest.mark.parametrize(
    "tests",
    [
        "",
        [],
        None,
        {"inputs": ["1"], "outputs": []},
        [{"in": 1}],
        "def check(f): pass",
        [{"input": "1", "output": "1", "testtype": "functional"}],
        *UNREADABLE.values(),
    ],
)
def test_unreadable_tests_end_the_run(tests):
    with pytest.raises(DataError):
        judged(SUMMED, tests)


@pytest.mark.parametrize(
    "code, tests",
    [
        ("class V: pass", ["assert V() == V()"]),
        ("def apply(f): return f()", ["assert apply(lambda: 1) == 1"]),
        (SIMILAR, ["assert similar("]),
        ("class A: pass", ["assert isinstance(A(), A)"]),
        ("class A: pass", ["import types\nassert A() != types.SimpleNamespace()"]),
    ],
)
def test_what_cannot_be_judged_is_an_error(code, tests):
    with pytest.raises(Unjudged):
        judged(code, tests)


def test_the_tests_have_a_time_together():
    with pytest.raises(TimeoutError, match="total_seconds"):
        judged("import time\ntime.sleep(0.4)\nprint(1)", {"inputs": [""] * 9, "outputs": ["1"] * 9}, total_seconds=0.5)


HANGS = "import time\nif input() != '1': time.sleep(100)\nprint(1)"
CALL_HANGS = "import time\ndef f(x):\n    if x != 1: time.sleep(100)\n    return 1"


@pytest.mark.parametrize("code, name, partial", [(HANGS, None, False), (CALL_HANGS, "f", True)])
def test_tests_not_reached_after_a_failure_count_as_failed(code, name, partial):
    inputs = [[n] if name else str(n) for n in range(1, 41)]
    tests = {"inputs": inputs, "outputs": [1 if name else "1"] * 40, "fn_name": name}
    scored = judged(code, tests, partial=partial, time_limit=2.0, total_seconds=4.5)
    assert scored.parts["accuracy"] == 0.0 and scored.counts["tests_passed"] == 1 / 40
    assert scored.parts.get("partial") == (1 / 40 if partial else None)


class RunCode(BaseHTTPRequestHandler):
    """SandboxFusion's `POST /run_code`, without a sandbox."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with tempfile.TemporaryDirectory() as folder:
            for name, content in request["files"].items():
                Path(folder, name).write_bytes(base64.b64decode(content))
            Path(folder, "program.py").write_text(request["code"])
            result = self.ran([sys.executable, "program.py"], folder, request["stdin"], request["run_timeout"])
        status = "Success" if result["return_code"] == 0 else "Failed"
        reply = {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}
        if "breaks the sandbox" in request["code"]:
            reply = {"status": "SandboxError", "message": "no space left", "run_result": None}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def ran(self, command, folder, stdin, seconds):
        try:
            done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as ended:
            output = (ended.stdout or b"").decode()
            return {"status": "TimeLimitExceeded", "return_code": None, "stdout": output, "stderr": ""}
        return {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture(scope="module")
def endpoint():
    with ThreadingHTTPServer(("127.0.0.1", 0), RunCode) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run_code"
        server.shutdown()


@pytest.mark.parametrize(
    "code, tests, passed, exceeded",
    [
        (SUMMED, SUM, 2, 0),
        ("print(3)", SUM, 1, 0),
        ("def similar(a, b):\n    return ()", MBPP, 1, 0),
        (TOTAL, LIVE, 2, 0),
        ("import time\ntime.sleep(60)", SUM, 0, 2),
        ("def similar(a, b):\n    while len(a) > 1: pass\n    return ()", MBPP, 1, 1),
        (FORGERIES["equals all"], MBPP, 0, 0),
        (FORGERIES["writes verdicts"], MBPP, 0, 0),
        (FORGERIES["exits at once"], MBPP, 0, 0),
    ],
)
def test_an_endpoint_gives_the_same_verdicts(endpoint, code, tests, passed, exceeded):
    counts = judged(code, tests, partial=True, time_limit=2.0, sandbox=endpoint).counts
    assert counts == {"tests_passed": passed / 2, "limits_exceeded": exceeded}


def test_an_endpoint_that_fails_gives_no_verdict(endpoint):
    with pytest.raises(SandboxFailed):
        judged("# breaks the sandbox", SUM, sandbox=endpoint)
    with pytest.raises(SandboxFailed):
        judged(SUMMED, SUM, sandbox=endpoint.replace("run_code", "other").replace("http:", "https:"))
    with pytest.raises(Unjudged):
        judged("def apply(f): return f()", ["assert apply(lambda: 1) == 1"], sandbox=endpoint)
    with pytest.raises(DataError):
        judged(SUMMED, SUM, sandbox="docker")


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\na\n```\nthen\n```py\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```\n3\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("a", None),
        ("```python\na", None),
        ("1. So:\n\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("- So:\n\t```python\n\tif a:\n\t\tb\n\t```\n", "if a:\n\tb\n"),
        ("   ```python\na\n   ```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\na\n````", "a\n"),
    ],
)
def test_the_last_fenced_program_is_the_answer(text, code):
    assert last_program(text) == code


def test_a_process_of_many_open_files_can_judge():
    """Descriptors from 256 and from 1,024 on work like others."""
    with ExitStack() as stack:
        while stack.enter_context(Path(os.devnull).open()).fileno() < 1100:
            pass
        assert judged(SIMILAR, MBPP).parts == judged(SUMMED, SUM).parts == {"accuracy": 1.0}


def test_code_is_scored_in_the_pool_and_leaves_nothing(monkeypatch):
    items = [RewardItem(f"```python\n{code}\n```", SUM, args={"time_limit": 5.0}) for code in (SUMMED, "print(1)")]
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o711)  # other users' code goes through it
        monkeypatch.setenv("TMPDIR", place)
        began = Path(place).stat().st_mtime_ns
        with closing(RewardPool(1)) as pool:
            right, wrong, unsaid = pool.score_sync("code_reward", [*items, RewardItem("3", SUM)])
        assert Path(place).stat().st_mtime_ns > began and not list(Path(place).iterdir()), "it came and went there"
    assert right.metrics == {"accuracy": 1.0, "tests_passed": 1.0, "limits_exceeded": 0.0, "verifier_errors": 0.0}
    assert wrong.value == unsaid.value == 0.0 and right.value == 1.0


@pytest.mark.parametrize("code", SHARED_FORGERIES.values(), ids=SHARED_FORGERIES)
def test_a_verdict_cannot_be_forged_at_an_endpoint(endpoint, code):
    tests = [f"import quopri\n{MBPP[0]}", MBPP[1]]
    assert judged(code, tests, partial=True, time_limit=2.0, sandbox=endpoint).counts["tests_passed"] == 0.0


def test_an_answer_that_ends_its_tests_at_an_endpoint_gets_no_verdict(endpoint):
    with pytest.raises(SandboxFailed):
        judged(ENDS_ITS_TESTS, MBPP, sandbox=endpoint)


def test_each_test_has_the_cpu_time_of_its_own_limit(monkeypatch):
    """One process serves all tests, which need more CPU together than a lone program would have."""
    monkeypatch.setattr("trinity_core.workflows.rewards.code.sandbox.BUSY", 4)
    busy = """
        import time
        def f(x):
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
            return x
    """
    tests = [f"assert f({number}) == {number}" for number in range(30)]
    assert judged(busy, tests, time_limit=1.0, total_seconds=120).parts["accuracy"] == 1.0
