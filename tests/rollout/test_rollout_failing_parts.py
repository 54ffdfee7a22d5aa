"""Tools and environments that fail in the middle of a run: contained, counted, and never a reward of zero."""

from __future__ import annotations

import json
import shutil
import time
from itertools import count

import numpy as np
import psutil
import pytest
from inference.conversations import every_answer_is_a_call
from rollout.exploring import config_of, explored, logprobs_of
from transformers import AutoTokenizer

from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.audit import audit_runs
from trinity_core.workflows import TOOLS
from trinity_core.workflows.environments.process import HOSTS

pytestmark = pytest.mark.slow


def configured(tiny_folders, tmp_path, values, **taskset):
    """A configuration with an untrained model half of whose tokens end its turn, so that it stops at all."""
    folder = shutil.copytree(tiny_folders.model, tmp_path / "model")
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": list(range(0, 470, 2))}))
    lengths = {"model.model_path": str(folder), "model.max_model_len": 256, "model.max_prompt_tokens": 240}
    config = config_of(tiny_folders, tmp_path, "failing").with_values({**lengths, **values})
    [usual] = config.buffer.explorer_input.tasksets
    return config.with_values({"buffer.explorer_input.tasksets": [usual.with_values(taskset)]})


def test_tool_errors_are_reported_to_the_model(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after, monkeypatch
):
    """Of three calls one hangs and one raises. Every answer of the model counts as a call."""
    calls = count()

    def add(said: str) -> str:
        match next(calls) % 3:
            case 0:
                time.sleep(30)
            case 1:
                raise ValueError("cannot add")
        return "added"

    monkeypatch.setitem(TOOLS, "add", add)
    args = {"tools": ("add",), "max_turns": 3, "time_limit": 2.0}
    values = {"explorer.rollout_model.tool_call_parser": every_answer_is_a_call()}
    tools = {"default_workflow_type": "toolcall_workflow", "workflow_args": args}
    config = configured(tiny_folders, tmp_path, values, **tools)
    rows = explored(config, tiny_engine, tiny_model)
    called = next(calls)
    assert len(rows) == 32 and called == sum(e.metrics["tool_calls"] for e in rows) > 32
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders.model)
    for e in rows:
        expected = logprobs_of(tiny_model, e.tokens)[e.prompt_length - 1 :]
        np.testing.assert_allclose(e.logprobs[e.action_mask], expected[e.action_mask], atol=1e-5)
        text = tokenizer.decode(e.tokens[e.prompt_length :][~e.action_mask])
        untold = e.metrics["tool_calls"] - text.count("<|im_start|>tool")
        assert untold in (0, e.metrics["truncated"])  # the last result, where it fills the context
    lines = [line.metrics for line in read_metrics(config.job_dir) if "tool_calls/mean" in line.metrics]
    assert len(lines) == 2 and {line["failed_tasks"] for line in lines} == {0.0}
    errors = {name: sum(line[f"tool_errors/{name}/mean"] * 16 for line in lines) for name in ("timeout", "raised")}
    assert errors == {"timeout": -(-called // 3), "raised": -(-(called - 1) // 3)}


FRAIL = """
import os, time
from pathlib import Path

class Frail:
    def __init__(self, kind, marks):
        self.kind, self.mark = kind, Path(marks, kind)

    def reset(self, seed):
        return "Go", 0.0, False, {}

    def step(self, action):
        if self.kind == "dies" or (self.kind == "dies_once" and not self.mark.exists()):
            self.mark.touch()
            os._exit(1)
        if self.kind == "hangs":
            time.sleep(600)
        return "on", 0.5, False, {}
"""


def test_environments_that_die_or_hang_cost_only_their_tasks(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after
):
    frail, data = tmp_path / "frail.py", tmp_path / "train.jsonl"
    frail.write_text(FRAIL)
    kinds = ("works", "dies_once", "dies", "hangs")
    data.write_text("".join(json.dumps({"question": "Play.", "kind": kind}) + "\n" for kind in kinds))
    values = {"buffer.total_steps": 1, "explorer.max_retry_times": 1}
    args = {
        "environment": f"{frail}:Frail", "environment_args": {"marks": str(tmp_path)}, "max_turns": 2, "time_limit": 5,
    }  # fmt: skip
    games = {"path": str(data), "default_workflow_type": "env_workflow", "workflow_args": args}
    config = configured(tiny_folders, tmp_path, values, **games)
    rows = explored(config, tiny_engine, tiny_model)
    assert {e.task_index: e.reward for e in rows} == {0: 1.0, 1: 1.0} and len(rows) == 8
    numbers = read_metrics(config.job_dir)[-1].metrics
    assert (numbers["retries"], numbers["failed_tasks"]) == (3, 2)
    [audit] = audit_runs(config.job_dir).values()
    assert (audit.tasks_drawn, audit.failed) == (4, 2)
    why = " ".join(audit.failed_because)
    assert "its process ended with" in why and "longer than 5 s" in why
    HOSTS.close()
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(frail) in " ".join(one.info["cmdline"] or [])]
