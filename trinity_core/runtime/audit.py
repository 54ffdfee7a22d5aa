"""`trinity audit`: finds a run's store and checkpoints, and checks that they account for every task drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from trinity_core.checkpoints.resume import whole_steps
from trinity_core.data.session_log import read_sessions
from trinity_core.errors import DataError
from trinity_core.layout import JobLayout
from trinity_core.runtime.find_stores import open_store, stores_of
from trinity_core.store.audit import Audit, archived, judge, read

COUNTS = (
    "tasks_drawn", "experiences_produced", "trained", "dropped", "failed", "pending", "lost", "duplicated",
    "sampled_tokens", "lineage",
)  # fmt: skip


def audit_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, Audit]:
    """Return folder name → audit for the run in `folder`, or for each stage of the pipeline in it.

    `stores_of` finds the stores. Nothing is changed. Raises DataError if there is none.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}", key=str(folder))
    folder = folder.resolve()
    runs = stores_of(folder, config, overrides, url)
    if not runs:
        raise DataError(
            f"{folder} has no experience store: give the folder of a run that explores, "
            "<checkpoint_root_dir>/<project>/<name>, and --config or --store if its store is elsewhere",
            key=str(folder),
        )
    return {name: _audit(folder.parent / name, url) for name, url in runs.items()}


def audit_text(name: str, audit: Audit) -> str:
    trained = f"  at steps {min(audit.trained_at)} to {max(audit.trained_at)}" if audit.trained_at else ""
    lines = [
        name,
        f"  tasks drawn {audit.tasks_drawn}, experiences produced {audit.experiences_produced}",
        f"  trained     {audit.trained}{trained}",
        f"  dropped     {audit.dropped}{_listed(audit.dropped_by)}",
        f"  failed      {audit.failed}{_listed(audit.failed_because)}",
        f"  pending     {audit.pending}",
        f"  lost        {audit.lost}",
        f"  duplicated  {audit.duplicated}",
        f"  lineage     {audit.lineage}, checkpoint {audit.checkpoint or 'none'}",
        *([f"  experiences dropped {lost.total()}{_listed(lost)}"] if (lost := audit.experiences_dropped_by) else []),
        *([f"  sessions    sampled {audit.sampled_tokens} tokens with a loss"] if audit.sampled_tokens else []),
        *(f"  problem: {problem}" for problem in audit.problems),
    ]
    verdict = (
        "Every task is accounted for." if audit.tasks_drawn else "No task has been drawn: nothing is accounted for."
    )
    return "\n".join([*lines, f"  {verdict if audit.clean else 'NOT every task is accounted for.'}"])


def accounts_for_all(audits: Mapping[str, Audit]) -> bool:
    """True if every task is accounted for and at least one was drawn."""
    return all(audit.clean for audit in audits.values()) and any(audit.tasks_drawn for audit in audits.values())


def audit_json(audits: dict[str, Audit]) -> dict[str, object]:
    """Return one run's audit, or a pipeline's stages by name with sums of their counts (lineage: the highest)."""
    clean = {"clean": accounts_for_all(audits)}
    if len(audits) == 1:
        [audit] = audits.values()
        return audit.to_dict() | clean
    sums: dict[str, object] = {name: sum(getattr(audit, name) for audit in audits.values()) for name in COUNTS[:-1]}
    sums["lineage"] = max(audit.lineage for audit in audits.values())
    each_stage = {name: audit.to_dict() | {"clean": audit.clean} for name, audit in audits.items()}
    return sums | clean | {"stages": each_stage}


def _listed(counts: Counter[str]) -> str:
    return "".join(f"\n    {number} × {name}" for name, number in counts.most_common())


def _audit(folder: Path, url: str) -> Audit:
    layout = JobLayout(folder)
    before = max(whole_steps(layout.root), default=0)
    database = open_store(folder, url)
    try:
        with database.read() as connection:
            seen = read(connection, database.tables)
    finally:
        database.close()
    after = max(whole_steps(layout.root), default=0)
    return judge(seen, archived(layout.archive), before, after, read_sessions(layout.buffer))
