"""Hints on metrics that are not normal, and their agreement with docs/troubleshooting.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinity_core.results.normal import IS_LARGE, NORMAL, RECENT, TIMES, WAITS, hints

DOC = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
TRENDS = {"eval/<set>/accuracy", "reward/mean", "response_length/mean", "staleness/mean", "/max"}
"""Metrics of the doc without a bound: they rise, as the doctor checks, or depend on the configuration."""


def table(section: str) -> list[list[str]]:
    lines = [line for line in DOC.split(f"## {section}")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_doc_has_every_metric_with_its_bounds() -> None:
    rows = {metric: cells for cells in table("What is normal") for metric in re.findall(r"`([^`]+)`", cells[0])}
    assert {normal.metric for normal in NORMAL} == rows.keys() - TRENDS
    words = {10: "tenfold", 2: "twice"}
    for normal in NORMAL:
        bounds = [bound for bound in (normal.most, normal.least, normal.growth) if abs(bound) < 1e9]
        text = " ".join(rows[normal.metric][2:])
        assert bounds and all(words.get(bound, f"{bound:g}") in text for bound in bounds), normal.metric


def test_the_doc_says_where_the_time_goes_as_the_hints_do() -> None:
    assert [cells[0] for cells in table("Where does the time go?")] == list(TIMES)
    assert all(f"{share:.0%}".replace("%", " %") in DOC for share in (WAITS, IS_LARGE))


@pytest.mark.parametrize("normal", NORMAL, ids=lambda normal: normal.metric)
def test_each_metric_has_a_hint_beyond_its_bounds_alone(normal) -> None:
    usual = min(max(normal.least, 0.05), normal.most)
    beyond = min(normal.most, normal.growth * usual) + 0.01 if normal.least < 0 else 0.0
    name = normal.metric if "/" in normal.metric else f"explorer/{normal.metric}"
    assert hints({name: [usual] * 2 * RECENT}) == []
    [hint] = hints({name: [usual] * RECENT + [beyond] * RECENT})
    assert f"`{name}`" in hint and normal.otherwise in hint
    assert hints({name: [beyond] * (RECENT - 1)}) == [], "too few steps to judge"


def test_a_metric_that_begins_below_0_is_judged_by_its_bounds_alone() -> None:
    for metric in ("actor/ppo_kl", "actor/kl_mean"):
        assert hints({metric: [-0.001] * RECENT + [0.001] * RECENT}) == []


def test_a_clip_of_sequences_may_cut_often() -> None:
    often = {"actor/pg_clipfrac": [0.5] * RECENT}
    assert len(hints(often)) == 1 and hints(often | {"actor/ppo_kl_seq": [0.0] * RECENT}) == []


@pytest.mark.parametrize(
    ("seconds", "sign"),
    [
        ({"timing_s/wait": 8, "explorer/timing_s/wait": 5}, "both sides wait"),
        ({"timing_s/wait": 8, "explorer/timing_s/wait": 1}, "trainer waits, explorer generates"),
        ({"timing_s/wait": 1, "explorer/timing_s/wait": 5}, "explorer waits"),
        ({"explorer/timing_s/reward": 5}, "`timing_s/reward` is large"),
        ({"explorer/timing_s/weight_sync": 5}, "`timing_s/weight_sync` is large"),
        ({"timing_s/wait": 1, "explorer/timing_s/wait": 1, "explorer/timing_s/reward": 1}, None),
    ],
)
def test_a_hint_says_where_the_time_goes(seconds, sign) -> None:
    curves = {
        name: [value] * RECENT for name, value in {"timing_s/step": 10, "explorer/timing_s/step": 10, **seconds}.items()
    }
    found = hints(curves)
    assert len(found) == (sign is not None) and all(hint.endswith(f"{TIMES[sign]}.") for hint in found)
