"""Lines of the plan as HTML that is broken below its last column."""

from __future__ import annotations

import pytest

from studio.texts import hanging


@pytest.mark.parametrize(
    ("line", "indent"),
    [
        ("demo/mine: grpo, mode both", 0),
        ("  explore  4 tasks, 16 rollouts", 11),
        ("     820 MiB    process: Python, Ray", 16),
        ("           ?  disk: there is no folder m yet", 14),
    ],
)
def test_a_line_hangs_by_its_last_column(line: str, indent: int) -> None:
    assert f"padding-left: {indent}ch; text-indent: -{indent}ch" in hanging(line)


def test_text_is_shown_as_it_is() -> None:
    assert "&lt;b&gt; &amp;" in hanging("<b> &") and hanging("one\ntwo").count("<div style") == 2
