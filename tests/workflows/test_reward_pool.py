import asyncio
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from raising import raising

from trinity_core.base.errors import DataError, RewardError, TrinityError
from trinity_core.base.threads import DaemonThreads, InterruptibleThreads
from trinity_core.base.waits import poll
from trinity_core.workflows.rewards import RewardItem, RewardPool
from trinity_core.workflows.rewards.base import FAST_PATHS, Reward

PLUGIN = """
import functools, os, time
from fractions import Fraction
from pathlib import Path
import numpy
from trinity_core.workflows import REWARD_FNS

kept = []
RESULTS = {
    "none": None, "text": "5", "text of a power": "1e3", "empty": {}, "list": [1.0], "complex": 1j,
    "only text": {"pred": "12"}, "only None": {"accuracy": None}, "part is a list": {"accuracy": [1.0, 2.0]},
    "score is text": {"score": "1.0", "acc": 1.0}, "score is None": {"score": None, "acc": 1.0},
    "part is nan": {"accuracy": 1.0, "format": float("nan")}, "two elements": numpy.ones(2),
    "verl": {"score": 1.0, "acc": True, "pred": "12"}, "verl, wrong": {"score": -1, "acc": False, "pred": None},
    "text beside": {"accuracy": 1.0, "pred": "12"}, "does not apply": {"accuracy": 0.5, "format": None},
    "bool": True, "fraction": Fraction(1, 4), "scalar": numpy.float32(0.5), "element": numpy.array([0.5]),
    "scalars": {"accuracy": numpy.bool_(True), "length": numpy.int64(-2)},
}

@REWARD_FNS.register("awaited")
async def awaited(*, prompt, response, truth, task):
    return {"accuracy": float(response)}

def scaled(scale, *, prompt, response, truth, task, offset: float = 0.0):
    return scale * float(response) + offset

class Scaled:
    def __call__(self, *, prompt, response, truth, task, offset: float = 0.0):
        return scaled(2, prompt=prompt, response=response, truth=truth, task=task, offset=offset)

    async def later(self, *, prompt, response, truth, task):
        return 2 * float(response)

REWARD_FNS.register("partial")(functools.partial(scaled, 2))
REWARD_FNS.register("object")(Scaled())
REWARD_FNS.register("method")(Scaled().later)

def positional(response, truth):
    return 2 * float(response)

@REWARD_FNS.register("adapted")
@functools.wraps(positional)
def adapted(**inputs):
    return positional(inputs["response"], inputs["truth"])

@REWARD_FNS.register("by_order")
def by_order(*, prompt, response, truth, task, **args):
    if response == "hang":
        while True:
            pass
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise RuntimeError("no idea")
    if response == "nan":
        return float("nan")
    if response in RESULTS:
        return RESULTS[response]
    if response == "memory":
        return float(len(bytearray(8 << 30)))
    if response == "leaks":
        kept.append(bytearray(40 << 20))
        return 1
    if response.startswith("waits "):
        folder = Path(response.split()[1])
        (folder / "begun").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
        return 1
    if response.startswith("note "):
        with open(response.split()[1], "a") as notes:
            notes.write("x")
        time.sleep(0.1)
        return 1
    if response == "pid":
        return os.getpid()
    if response.startswith("accuracy"):
        return {"accuracy": float(response.split()[1])}
    if response.startswith("dies once "):
        try:
            open(response.split()[2], "x").close()
        except FileExistsError:
            return 7
        time.sleep(600)
    if response == "noisy":
        print("a reward function may print")
        return 1
    return {"number": float(response), "weight": args.get("weight", 0) + len(task)}
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "pool_test_rewards.py").write_text(PLUGIN)
    return str(folder)


@pytest.fixture(scope="module")
def pool(plugins):
    pool = RewardPool(workers=2, timeout=3.0, plugin_dir=plugins)
    yield pool
    pool.close()


def items(*responses, **fields):
    return [RewardItem(response, **fields) for response in responses]


def test_results_come_in_order(pool):
    rewards = pool.score_sync("by_order", items(*map(str, range(11)), task={"row": 1}, args={"weight": 2}))
    assert [reward.parts for reward in rewards] == [{"number": float(n), "weight": 3.0} for n in range(11)]
    assert rewards[3].value == 6.0 and rewards[3].metrics == {"number": 3.0, "weight": 3.0, "verifier_errors": 0.0}
    assert pool.score_sync("by_order", []) == []


def test_every_verifier_failure_is_reported_as_an_error(pool):
    before = pool.started
    rewards = pool.score_sync(
        "by_order", items("1", "hang", "raise", "die", "nan", "2", "none", "memory", "noisy", "0")
    )
    errors = [reward.error for reward in rewards]
    assert [reward.value for reward in rewards] == [1, None, None, None, None, 2, None, None, 1, 0]
    assert [error is not None for error in errors] == [False, True, True, True, True, False, True, True, False, False]
    line = PLUGIN[: PLUGIN.index("no idea")].count("\n") + 1
    assert re.fullmatch(rf"RuntimeError: no idea \(\S+\.py, line {line}\)", errors[2] or "")
    assert rewards[1].metrics == {"verifier_errors": 1.0}
    assert pool.started > before


@pytest.mark.parametrize(
    "result, parts, counts",
    [
        ("verl", {"score": 1.0}, {"acc": 1.0}),
        ("verl, wrong", {"score": -1.0}, {"acc": 0.0}),
        ("text beside", {"accuracy": 1.0}, {}),
        ("does not apply", {"accuracy": 0.5}, {}),
        ("bool", {"reward": 1.0}, {}),
        ("fraction", {"reward": 0.25}, {}),
        ("scalar", {"reward": 0.5}, {}),
        ("element", {"reward": 0.5}, {}),
        ("scalars", {"accuracy": 1.0, "length": -2.0}, {}),
    ],
)
def test_numbers_are_parts_and_text_is_not(pool, result, parts, counts):
    [reward] = pool.score_sync("by_order", items(result))
    assert (reward.error, reward.parts, reward.counts) == (None, parts, counts)


@pytest.mark.parametrize(
    "result",
    ["none", "text", "text of a power", "empty", "list", "complex", "only text", "only None", "part is a list",
     "score is text", "score is None", "part is nan", "two elements"],
)  # fmt: skip
def test_what_is_no_number_is_no_verdict(pool, result):
    [reward] = pool.score_sync("by_order", items(result))
    assert reward.parts is None and reward.error


def test_a_reward_may_be_async_a_partial_or_an_object(pool):
    for name, args, value in (
        ("awaited", {}, 0.5), ("partial", {"offset": 1.0}, 2.0), ("object", {}, 1.0), ("method", {}, 1.0),
        ("adapted", {}, 1.0),
    ):  # fmt: skip
        [reward] = pool.score_sync(name, items("0.5", args=args))
        assert (reward.error, reward.value) == (None, value)
    with pytest.raises(TrinityError):
        pool.score_sync("by_order", items("0.5", args={"truth": 1}))


def test_a_worker_that_a_reward_function_has_filled_is_replaced(plugins):
    pool = RewardPool(workers=1, timeout=30.0, plugin_dir=plugins, memory_gib=0.2)
    rewards = pool.score_sync("by_order", items(*["leaks"] * 12))
    assert [reward.error for reward in rewards] == [None] * 12 and pool.started > 1
    pool.close()


def test_an_accuracy_that_is_no_share_names_the_reward_function(pool, monkeypatch):
    rewards = pool.score_sync("by_order", items("accuracy 1.0000000002", "accuracy -1e-9", "accuracy nan", "2"))
    assert [reward.value for reward in rewards] == [1.0, 0.0, None, 2.0]
    assert rewards[2].error is not None and "nan" in rewards[2].error
    for accuracy in ("-1.0", "1.00001"):
        with pytest.raises(RewardError, match=rf"'by_order'.*{accuracy}"):
            pool.score_sync("by_order", items("1", f"accuracy {accuracy}", "2"))
    monkeypatch.setitem(FAST_PATHS, "by_order", lambda **_: {"accuracy": float("nan")})
    with pytest.raises(RewardError, match=r"'by_order'.*nan"):
        pool.score_sync("by_order", items("1"))


def test_an_accuracy_beside_the_reward_is_a_share_too():
    assert Reward({"score": -1.0}, counts={"accuracy": 1.0}).metrics["accuracy"] == 1.0
    with raising(TrinityError, key="accuracy"):
        Reward({"score": -1.0}, counts={"accuracy": 87.5})


def test_worker_that_died_idle_is_replaced(plugins):
    pool = RewardPool(workers=1, timeout=3.0, plugin_dir=plugins)
    worker = psutil.Process(int(pool.score_sync("by_order", items("pid"))[0].value))
    worker.kill()
    while running(worker.pid):
        time.sleep(0.01)
    assert [reward.value for reward in pool.score_sync("by_order", items("2", "3"))] == [2, 3]
    assert pool.started == 2
    pool.close()


def test_answer_of_killed_worker_is_scored_again(plugins, tmp_path):
    pool = RewardPool(workers=1, timeout=60.0, plugin_dir=plugins)
    worker = int(pool.score_sync("by_order", items("pid"))[0].value)

    def kill_at_work():
        assert any((tmp_path / "begun").exists() for _ in poll(60))
        os.kill(worker, signal.SIGKILL)

    killing = DaemonThreads("kills").submit(kill_at_work)
    rewards = pool.score_sync("by_order", items(f"dies once {tmp_path / 'begun'}", "2"))
    killing.result(60)
    assert [(reward.value, reward.error) for reward in rewards] == [(7, None), (2, None)]
    assert pool.started == 2
    pool.close()


def test_scoring_never_blocks_the_event_loop(plugins, tmp_path):
    """An answer is being scored until the loop signals that it is running."""
    pool = RewardPool(workers=2, timeout=60.0, plugin_dir=plugins)

    async def run():
        scoring = [asyncio.create_task(pool.score("by_order", items(f"waits {tmp_path}", str(n)))) for n in range(3)]
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "go on").touch()
        return await asyncio.gather(*scoring)

    assert [[reward.value for reward in rewards] for rewards in asyncio.run(run())] == [[1, 0], [1, 1], [1, 2]]
    pool.close()


@pytest.mark.parametrize("way", ["a coroutine", "a thread"])
def test_cancelled_call_scores_none_of_its_answers_later(plugins, tmp_path, way):
    pool = RewardPool(workers=2, timeout=30.0, plugin_dir=plugins)
    notes = tmp_path / "notes"
    answers = items(*[f"note {notes}"] * 60)

    async def run():
        if way == "a coroutine":
            scoring = asyncio.create_task(pool.score("by_order", answers))
        else:
            scoring = InterruptibleThreads("scores").submit(pool.score_sync, "by_order", answers)
        while not notes.exists():
            await asyncio.sleep(0.01)
        scoring.cancel()
        await asyncio.sleep(0)
        scored = notes.stat().st_size
        await asyncio.gather(*(pool.score("by_order", items("1")) for _ in range(4)))
        return notes.stat().st_size - scored

    later = asyncio.run(run())
    pool.close()
    assert later <= 2  # those that the workers had begun


IMPORTS = """
import mmap
from trinity_core.workflows import REWARD_FNS

RESERVED = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
LOADED = bytearray(300 << 20)

@REWARD_FNS.register("after_imports")
def after_imports(*, prompt, response, truth, task):
    return float(len(bytearray(int(response) << 20)) >> 20)
"""


def test_memory_of_imports_does_not_count(tmp_path):
    """For example of a CUDA build of torch, which maps far more than it uses."""
    (tmp_path / "pool_test_imports.py").write_text(IMPORTS)
    pool = RewardPool(workers=1, timeout=30.0, plugin_dir=str(tmp_path), memory_gib=0.25)
    small, large = pool.score_sync("after_imports", items("100", "400"))
    pool.close()
    assert small.value == 100 and large.error is not None and "0.25 GiB" in large.error


def test_unknown_reward_function_raises(pool):
    with pytest.raises(DataError):
        pool.score_sync("by_ordr", items("1"))
    assert pool.score_sync("by_order", items("1"))[0].value == 1


def test_dotted_paths(pool):
    assert pool.score_sync("pool_test_rewards.by_order", items("1"))[0].value == 1
    with pytest.raises(DataError):
        pool.score_sync("nowhere.at_all", items("1"))


def test_math_reward_through_workers_and_without(plugins):
    pytest.importorskip("math_verify")
    pool = RewardPool(workers=1, timeout=30)
    try:
        fast = pool.score_sync("math_reward", [RewardItem(f"#### {n}", "#### 3") for n in (3, 4)])
        assert [reward.value for reward in fast] == [1, 0] and pool.started == 0
        mixed = ["#### 3", "#### 3.0", "three", "\\boxed{\\sqrt{9}}", "#### 2.9"]
        rewards = pool.score_sync("math_reward", [RewardItem(text, "#### 3") for text in mixed])
        assert [reward.value for reward in rewards] == [1, 1, 0, 1, 0] and pool.started == 1
    finally:
        pool.close()


def test_missing_reference_answer_ends_the_run():
    with raising(DataError, key="format.response_key"):
        RewardPool().score_sync("math_reward", [RewardItem("#### 3", None)])


def running(pid):
    """True if a process runs; false if it has ended but was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
