"""Rollouts that have left the store, found in the archive without reading it all."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from sqlalchemy import update
from viewing import rollout

from trinity_core.base.layout import JobLayout
from trinity_core.data.experience import Experience
from trinity_core.exchange.store import archive
from trinity_core.exchange.store.archive import Archive
from trinity_core.exchange.store.schema import State
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.view.app import archived_rollouts


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
    assert archived_rollouts(path, 1, "g0", 5) == []
    Archive(path).extend(30, batch)
    for step in range(1, 31):
        for group in range(3):
            rollouts = archived_rollouts(path, step, f"g{group}", 5)
            runs = [] if step == 4 else [0, 1]
            assert [(line["step"], line["group"], line["run"]) for line in rollouts] == [
                (step, f"g{group}", i) for i in runs
            ]
    assert archived_rollouts(path, 31, "g0", 5) == []
    with path.open("a") as file:
        file.write('{"step": 31, "gro')
    assert len(archived_rollouts(path, 30, "g2", 5)) == 2, "a line that is being written is not read"


def test_the_page_shows_what_was_trained_on(run_folder, serving, tokenizer) -> None:
    with ExperienceStore.open(run_folder / "buffer" / "explorer_output.db", str(run_folder)) as store:
        t = store._tables
        Archive(JobLayout(run_folder).archive).extend(1, lambda step: store.lease(step, 4, 0))
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
        assert client.get("/groups/1/rollouts/0/tokens").status_code == 404
        rows = client.get("/rollouts", params={"step": 1}).json()["rollouts"]
        assert [row["response"] for row in rows if row["id"] == 1] == [one["response"] for one in group["rollouts"]]
