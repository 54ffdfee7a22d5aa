"""`trinity mcp` as an agent's client uses it: over stdin and stdout, and over HTTP with the folder's key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.mcpserver.exceptions import ToolError
from ports import free_port

from flows.mcp_server import Tools, make_server
from studio.settings import studio_settings
from trinity_core.exchange.tracking.answers import TaskAnswers, save_answers
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts

COMMAND = ["-m", "flows.cli", "mcp"]
RUN_SECONDS = 300.0
TEXT = """
project: p
name: agents
checkpoint_root_dir: {folder}/checkpoints
model: {{model_path: {model}, max_prompt_tokens: 96, max_response_tokens: 16}}
algorithm: {{algorithm_type: grpo, repeat_times: 4}}
cluster: {{gpu_per_node: 0}}
buffer:
  batch_size: 4
  total_steps: 400
  explorer_input:
    taskset: {{path: {data}, split: train, format: {{prompt_key: question, response_key: answer}}}}
    eval_tasksets:
      - {{name: held-out, path: {data}, split: train, format: {{prompt_key: question, response_key: answer}}}}
explorer: {{eval_interval: 2}}
"""


async def called(session: ClientSession, tool: str, **arguments: Any) -> Any:
    answer = await session.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    content = answer.structured_content
    return content["result"] if content.keys() == {"result"} else content


async def refused(session: ClientSession, tool: str, **arguments: Any) -> str:
    answer = await session.call_tool(tool, arguments)
    assert answer.is_error
    return answer.content[0].text


def test_an_agent_runs_an_experiment_finds_its_fault_and_stops_it(tiny_folders, tmp_path):
    """With nothing but the tools: the eval set is the training set, until the agent has asked the doctor."""
    (tmp_path / "work").mkdir()
    environment = {**os.environ, "TRINITY_CHECKPOINT_ROOT_DIR": f"{tmp_path}/checkpoints"}
    server = StdioServerParameters(command=sys.executable, args=COMMAND, env=environment, cwd=tmp_path / "work")
    text = TEXT.format(folder=tmp_path, model=tiny_folders.model, data=tiny_folders.data)

    async def work() -> None:
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            assert (await called(session, "recipes"))[0]["file"].endswith("quickstart.yaml")
            assert "above" in await refused(session, "write_config", file="../above.yaml", text=text)
            await called(session, "write_config", file="mine.yaml", text=text.replace("grpo", "gprpo"))
            checked = await called(session, "validate", config="mine.yaml")
            assert (checked["problems"][0]["key"], checked["problems"][0]["suggestion"]) == (
                "algorithm.algorithm_type", "grpo",
            )  # fmt: skip
            assert "algorithm.algorithm_type" in await refused(session, "run", config="mine.yaml")
            await called(session, "write_config", file="mine.yaml", text=text)
            assert (await called(session, "plan", config="mine.yaml"))["stages"][0]["total_steps"] == 400
            begun = await called(session, "run", config="mine.yaml")
            assert (begun["run"], begun["state"]) == ("p/agents", "running")
            end = time.monotonic() + RUN_SECONDS
            findings: list[str] = []
            while "eval-leak" not in findings and time.monotonic() < end:
                await asyncio.sleep(1)
                if (await called(session, "status", run="p/agents"))["score"] is not None:
                    answer = await called(session, "doctor", run="p/agents")
                    findings = [finding["check"] for run in answer["runs"].values() for finding in run]
            assert "eval-leak" in findings
            assert (await called(session, "rollouts", run="p/agents", count=2))[0]["prompt"]
            metrics = await called(session, "metrics", run="p/agents", names=["explorer/reward/mean"], last=2)
            assert len(metrics["explorer/reward/mean"]) == 2
            await called(session, "stop", run="p/agents")
            while (state := (await called(session, "status", run="p/agents"))["state"]) == "running":
                assert time.monotonic() < end
                await asyncio.sleep(1)
            assert state == "cancelled"
            assert (await called(session, "status", run="p/agents"))["checkpoints"]
            assert "over" in await refused(session, "stop", run="p/agents")

    asyncio.run(work())


def test_over_http_the_server_asks_for_the_key(tmp_path):
    port = free_port()
    process = subprocess.Popen([sys.executable, *COMMAND, "--port", str(port)], cwd=tmp_path)
    hello = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }  # fmt: skip
    headers = {"Accept": "application/json, text/event-stream"}
    try:
        for _ in range(240):
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/mcp", json=hello, headers=headers)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        assert answer.status_code == 401
        user, _, password = (tmp_path / ".trinity/prefect.key").read_text().partition(":")
        answer = httpx.post(f"http://127.0.0.1:{port}/mcp", json=hello, headers=headers, auth=(user, password))
        assert answer.status_code == 200 and "trinity" in answer.text
        foreign = httpx.post(
            f"http://127.0.0.1:{port}/mcp", json=hello, headers={**headers, "Origin": "http://elsewhere"},
            auth=(user, password),
        )  # fmt: skip
        assert foreign.status_code == 403
    finally:
        process.terminate()
        process.wait(30)


def test_a_run_that_is_slow_to_begin_is_no_unknown_one(tmp_path, monkeypatch):
    """An agent that sees an error would start the run once more."""
    checked = {"accepted": True, "flow": "rft", "run": "p/slow", "job_dir": str(tmp_path / "p/slow")}
    monkeypatch.setattr(Tools, "validate", lambda *_: checked)
    monkeypatch.setattr("flows.mcp_server.start_run", lambda *_: False)
    begun = Tools(studio_settings([])).run("slow.yaml")
    assert (begun["run"], begun["state"]) == ("p/slow", "waiting")


def test_what_a_tool_would_ignore_is_refused(tmp_path, monkeypatch):
    """A misspelled argument, an option among the overrides, a count of nothing."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    MetricsFile(tmp_path / "p" / "a", "eval").write(1, {"eval/test/accuracy": 1.0})
    server = make_server(studio_settings([]))

    async def work() -> None:
        for tool, given in (
            ("validate", {"config": "mine.yaml", "override": ["name=b"]}),
            ("metrics", {"run": "p/a", "names": ["eval/test/accuracy"], "last": 0}),
        ):
            with pytest.raises(ToolError):
                await server.call_tool(tool, given)
        tools = await server.list_tools()
        assert all(tool.input_schema["additionalProperties"] is False for tool in tools)

    asyncio.run(work())
    (tmp_path / "mine.yaml").write_text("{}")
    checked = Tools(studio_settings([])).validate(str(tmp_path / "mine.yaml"), ["--offline"])
    assert [problem["code"] for problem in checked["problems"]] == ["bad-override"]


def test_rollouts_of_a_step_come_from_each_source(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    job = tmp_path / "p" / "a"
    MetricsFile(job, "eval").write(1, {"eval/test/accuracy": 1.0})
    for source, step in (("eval_test", 0), ("eval_test", 1), ("explorer", 1)):
        save_rollouts(job, source, step, [SampledRollout("2?", source)] * 3)
    found = Tools(studio_settings([])).rollouts("p/a", count=2)
    assert [(one["source"], one["step"]) for one in found] == [("eval_test", 1)] * 2 + [("explorer", 1)] * 2


def test_a_comparison_leaves_an_agent_room(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    for name, score in (("a", 0.0), ("b", 1.0)):
        job = tmp_path / "p" / name
        MetricsFile(job, "eval").write(1, {"eval/test/accuracy": score})
        save_answers(job, "test", 1, [TaskAnswers(i, str(i), f"test:{i}", [score]) for i in range(300)])
    [other] = Tools(studio_settings([])).compare(["p/a", "p/b"], samples=2)["others"]
    compared = other["sets"]["test"]
    assert (len(compared["changed"]), compared["difference"]["won"]) == (2, 300)


def test_runs_are_listed_without_the_prefect_that_has_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    MetricsFile(tmp_path / "p" / "a", "trainer").write(3, {"actor/final_loss": 1.0})
    assert Tools(studio_settings([])).status("p/a")["step"] == 3
