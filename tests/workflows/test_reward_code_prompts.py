"""Tests of code that use what the row's prompt defines: HumanEval's helpers, the trees and lists of LeetCodeDataset."""

from textwrap import dedent

import pytest

from trinity_core.workflows.rewards.code import code_reward
from trinity_core.workflows.rewards.code.sandbox_rpc import Unjudged

TREES = dedent("""
    import math
    from typing import *

    class TreeNode:
        def __init__(self, val=0, left=None, right=None):
            self.val = val
            self.left = left
            self.right = right

    def tree_node(values):
        if not values:
            return None
        root = TreeNode(values[0])
        row, index = [root], 1
        for node in row:
            for side in ("left", "right"):
                if index < len(values) and values[index] is not None:
                    setattr(node, side, TreeNode(values[index]))
                    row.append(getattr(node, side))
                index += 1
        return root

    def is_same_tree(p, q):
        if not p and not q:
            return True
        if not p or not q or p.val != q.val:
            return False
        return is_same_tree(p.left, q.left) and is_same_tree(p.right, q.right)
""")
DEPTH = "def check(candidate):\n    assert candidate(root = tree_node([3, 9, 20, None, None, 15, 7])) == 3\n"
MIRRORED = "def check(candidate):\n    assert is_same_tree(candidate(tree_node([1, 2, 3])), tree_node([1, 3, 2]))\n"
MIRRORS = (
    "class Solution:\n    def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n"
    "        return root and TreeNode(root.val, self.f(root.right), self.f(root.left))"
)
MEASURES = (
    "class Solution:\n    def f(self, root: Optional[TreeNode]) -> int:\n"
    "        return 1 + max(self.f(root.left), self.f(root.right)) if root else 0"
)
SHIFTED = "def check(candidate):\n    for s in ('abc', 'xyz'):\n        assert candidate(shifted(s)) == s\n"
SHIFTS = '''
from typing import List

def shifted(s: str):
    """Returns a text moved by five letters."""
    return "".join(chr((ord(c) + 5 - ord("a")) % 26 + ord("a")) for c in s)

def unshifted(s: str):
    """Takes a text that `shifted` has moved. Returns the original."""
'''
UNSHIFTS = 'def unshifted(s):\n    return "".join(chr((ord(c) - 5 - ord("a")) % 26 + ord("a")) for c in s)'
OWN_NODE = "class TreeNode:\n    def __init__(self, x):\n        self.val, self.left, self.right = x, None, None\n"


def accuracy(code, tests, prompt, name="Solution().f"):
    task = {"prompt": prompt, "entry_point": name}
    response = f"```python\n{code}\n```"
    return code_reward(prompt="", response=response, truth=tests, task=task, time_limit=5.0).parts["accuracy"]


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (MEASURES, DEPTH),
        (TREES + MEASURES, DEPTH),
        (OWN_NODE + MEASURES.replace("Optional[TreeNode]", "'TreeNode'"), DEPTH),
        ("from __future__ import annotations\n" + MEASURES, DEPTH),
        (MIRRORS, MIRRORED),
    ],
)
def test_what_the_prompt_defines_is_there_for_answers_and_tests(code, tests):
    assert accuracy(code, tests, TREES) == 1.0


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (MEASURES.replace("1 +", "2 +"), DEPTH),
        ("def tree_node(values): return None\n" + MEASURES.replace("else 0", "else 3"), DEPTH.replace("3,", "3, 1,")),
        (MIRRORS.replace("root.right", "root.left"), MIRRORED),
        ("def is_same_tree(*_): return True\nclass Solution:\n    def f(self, root): return root", MIRRORED),
        ("class Solution:\n    def f(self, root): return None", MIRRORED),
        ("class Any:\n    val = left = right = property(lambda self: self)\n    __eq__ = lambda *_: True\n"
         "    __ne__ = __bool__ = lambda *_: False\nclass Solution:\n    def f(self, root): return Any()", MIRRORED),
        ("", DEPTH),
    ],
)  # fmt: skip
def test_wrong_answers_stay_wrong(code, tests):
    assert accuracy(code, tests, TREES) == 0.0


@pytest.mark.parametrize("prompt", [SHIFTS, SHIFTS[: SHIFTS.index('    """Takes')]], ids=["docstring", "nothing"])
def test_helpers_run_where_the_tests_are(prompt):
    forged = "def shifted(s): return s\ndef unshifted(s): return s"
    listed = "def unshifted(s: str, seen: List[str] = []):" + UNSHIFTS.partition(":")[2]
    answers = (UNSHIFTS, listed, forged, "def unshifted(s): return shifted(s)")
    assert [accuracy(code, SHIFTED, prompt, "unshifted") for code in answers] == [1.0, 1.0, 0.0, 0.0]


def test_functions_still_to_be_written_are_the_answers():
    prompt = 'def shifted(s):\n    """Moves a text."""\n    raise NotImplementedError\n\ndef unshifted(s):\n    ...\n'
    [_, helper, _] = SHIFTS.split("\ndef ")
    assert accuracy(f"def {helper}\n{UNSHIFTS}", SHIFTED, prompt, "unshifted") == 1.0


@pytest.mark.parametrize(
    ("tests", "prompt"),
    [
        (DEPTH, "Write a function."),
        (DEPTH, "add"),
        (DEPTH, [{"role": "user", "content": TREES}]),
        ("def check(candidate):\n    root = tree_node([1])\n    candidate(root)\n    assert root.val == 1", TREES),
        ("def check(candidate):\n    root = tree_node([1, 2])\n    assert candidate([root, root]) == 2", TREES),
        ("def check(candidate):\n    root = tree_node([1])\n    root.left = root\n    assert candidate(root)", TREES),
    ],
)
def test_without_what_the_tests_need_there_is_no_verdict(tests, prompt):
    """Missing helpers, and objects that are looked at after they were passed to the answer."""
    with pytest.raises(Unjudged):
        accuracy("class Solution:\n    def f(self, root): return None", tests, prompt)
