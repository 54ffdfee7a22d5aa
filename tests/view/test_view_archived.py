"""Rollouts that have left the store, found in the archive without reading it all."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from sqlalchemy import update
from viewing import rollout

from trinity_core.data.experience import Experience
from trinity_core.exchange.store import archive
from trinity_core.exchange.store.archive import Archive, lines_of
from trinity_core.exchange.store.schema import State
from trinity_core.exchange.store.store import ExperienceStore


def batch(step: int) -> list[Experience]:
    """Three groups of two, with texts of very different lengths; step 4 is empty."""
    if step == 4:
        return []
    return [
        Experience(
            np.arange(3), 1, np.ones(2, bool), group=f"g{group}", run=run, info={"response": "x" * 97 * step * group}
        )
        for group in range(3)
        for run in range(2)
    ]


@pytest.mark.parametrize("short", [1, 4096])
def test_a_batch_is_found_wherever_it_is(tmp_path, monkeypatch, short) -> None:
    monkeypatch.setattr(archive, "SHORT", short)
    path = tmp_path / "experience_buffer.jsonl"
    assert lines_of(path, 1) == []
    Archive(path).extend(30, batch, {3: [0.5, None]})
    for step in range(1, 31):
        rows = [] if step == 4 else [(step, f"g{group}", run) for group in range(3) for run in range(2)]
        assert [(line["step"], line["group"], line["run"]) for line in lines_of(path, step)] == rows
    assert lines_of(path, 31) == []
    assert [line.get("advantage") for line in lines_of(path, 3)] == [0.5, *[None] * 5]
    with path.open("a") as file:
        file.write('{"step": 31, "gro')
    assert len(lines_of(path, 30)) == 6, "a line that is being written is not read"


def test_the_page_shows_what_was_trained_on(run_folder, serving, tokenizer) -> None:
    with ExperienceStore.open(run_folder / "buffer" / "explorer_output.db", str(run_folder)) as store:
        t = store._tables
        with store._database.write() as connection:
            connection.execute(update(t.groups).where(t.groups.c.id == 1).values(state=State.PRUNED))
            connection.execute(t.experiences.delete().where(t.experiences.c.group_id == 1))
        store.put("explorer", 4, {}, [rollout(tokenizer, "2?", "4", 1.0, "new", 0)], newest_version=3)
    with serving(run_folder) as address, httpx.Client(base_url=f"{address}/api/runs/run") as client:
        group = client.get("/groups/1").json()
        assert (group["state"], group["train_steps"]) == ("pruned", [1])
        assert [(rollout["run"], rollout["response"], rollout["archived"]) for rollout in group["rollouts"]] == [
            (run, f"It is {run}.\n#### {run}", True) for run in (0, 1)
        ]
        assert [rollout["advantage"] for rollout in group["rollouts"]] == [None, 0.0]
        assert client.get("/groups/1/rollouts/0/tokens").status_code == 404
        rows = client.get("/rollouts", params={"step": 1}).json()["rollouts"]
        assert [row["response"] for row in rows if row["id"] == 1] == [one["response"] for one in group["rollouts"]]
