"""Sampled rollouts and their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt

from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.data.experience import Experience
from trinity_core.exchange.tracking.forwarder import Forwarder
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsFile
from trinity_core.exchange.tracking.rollouts import (
    SampledRollout,
    markdown_text,
    read_rollouts,
    rollout_files,
    rollouts_text,
    run_with_rollouts,
    save_rollouts,
)
from trinity_core.exchange.tracking.writers import Writer


def test_rollouts_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [SampledRollout("1 + 1?", "#### 2", 1.0, {"accuracy": 1.0}, "2", 7, 3)]
    path = save_rollouts(tmp_path, "eval", 4, rows)
    assert path == tmp_path / "monitor" / "rollouts" / "eval_step_4.jsonl"
    assert read_rollouts(path) == rows
    save_rollouts(tmp_path, "explorer", 12, rows)
    assert [(source, step) for source, step, _ in rollout_files(tmp_path)] == [("eval", 4), ("explorer", 12)]


def test_a_damaged_rollout_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_rollouts(tmp_path, "explorer", 3, [SampledRollout("a", "b"), SampledRollout("c", "d")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\xfe{" + b"\n" + lines[1])
    assert [rollout.prompt for rollout in read_rollouts(path)] == ["a", "c"]
    assert f"{path}:2" in caplog.text


def test_rollouts_of_a_pipeline_are_those_of_its_newest_stage_with_some(tmp_path: Path) -> None:
    """Its own are those of the model before training."""
    pipeline, sft, rft = (tmp_path / name for name in ("all", "all_sft", "all_rft"))
    save_rollouts(pipeline, "eval", 0, [SampledRollout("1 + 1?", "3")])
    assert run_with_rollouts(pipeline) == pipeline
    write_json(JobLayout(pipeline).stages, {"sft": sft.name, "rft": rft.name})
    assert run_with_rollouts(pipeline) == pipeline
    save_rollouts(sft, "eval", 9, [SampledRollout("1 + 1?", "2")])
    assert run_with_rollouts(pipeline) == sft
    save_rollouts(rft, "explorer", 1, [SampledRollout("1 + 1?", "2")])
    assert run_with_rollouts(pipeline) == rft == run_with_rollouts(rft)


def test_texts_may_hold_anything(tmp_path: Path) -> None:
    path = save_rollouts(tmp_path, "eval", 4, [SampledRollout("a\u2028b\x85c", "cut \ud83d", truth="😀")])
    (read,) = read_rollouts(path)
    assert (read.prompt, read.response, read.truth) == ("a\u2028b\x85c", "cut ?", "😀")
    rollouts_text([read]).encode()


def test_model_text_cannot_break_the_text() -> None:
    text = rollouts_text([SampledRollout("a|b\nc", "<script>alert(1)</script> `x`", None), SampledRollout("d", "# e")])
    prompt, response, reward, *_ = text.split("\n\n")
    assert r"a\|b<br>c" in prompt and "<script>" not in response and "\\`x\\`" in response
    assert reward.startswith("**no reward**")
    assert len(MarkdownIt("gfm-like", {"linkify": False}).render(text).split("<blockquote>")) == 3


def test_each_rollout_tells_its_numbers_once() -> None:
    parts = {"accuracy": 1.0, "response_length": 2.0, "verifier_errors": 0.0}
    exact = rollouts_text([SampledRollout("1 + 1?", "2", 1.0, parts, truth="2")])
    assert "**reward 1** · reference: 2" in exact
    assert "**reward 0.5, accuracy 1, truncated 1**" in rollouts_text(
        [SampledRollout("1 + 1?", "2", 0.5, parts | {"truncated": 1.0})]
    )


@pytest.mark.parametrize(
    "text", ["#### 9", "- 3", "+ 3", "1. 3", "2) 3", "---", "===", "~~3~~ 4", "~~~", "    3", "*3* _4_", "a ![b](c)"]
)
def test_text_alone_on_a_line_is_shown_as_it_is(text: str) -> None:
    """Neither a heading nor a list, by an independent renderer."""
    shown = MarkdownIt("gfm-like", {"linkify": False}).render(f"> {markdown_text(text, 40)}")
    assert shown == f"<blockquote>\n<p>{text.strip()}</p>\n</blockquote>\n"


@pytest.mark.parametrize("turns", [3, [4, "x"], [{"role": "user", "content": np.int64(7), "seen": {1}}], None])
def test_what_a_workflow_calls_turns_may_be_anything(tmp_path: Path, turns: object) -> None:
    tokens = np.arange(3)
    experience = Experience(tokens, 1, np.ones(2), info={"response": "r", "turns": turns})
    (read,) = read_rollouts(save_rollouts(tmp_path, "explorer", 1, [SampledRollout.of(experience)]))
    assert read.response == "r" and read.turns in ([], [{"role": "user", "content": 7, "seen": "{1}"}])


class Tables(Writer):
    """Keeps the names of the files that it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def log(self, lines: Sequence[MetricLine]) -> None:
        pass

    def artifact(self, path: Path, folder: str = "") -> None:
        self.names.append(path.name)


def test_a_new_tracking_system_gets_the_tables_of_earlier_steps(tmp_path: Path) -> None:
    def sent(target: str) -> list[str]:
        writer = Tables()
        forwarder = Forwarder(tmp_path, writer, target=target)
        forwarder.poll()
        forwarder.poll()
        return writer.names

    for step in (1, 11):
        save_rollouts(tmp_path, "explorer", step, [SampledRollout("1 + 1?", "2")])
        MetricsFile(tmp_path, "explorer").write(step, {"reward/mean": 1.0})
    both = ["explorer_step_1.md", "explorer_step_11.md"]
    assert sent("mlflow") == both and sent("mlflow") == []
    assert sent("wandb") == both and sent("wandb") == sent("mlflow") == []
