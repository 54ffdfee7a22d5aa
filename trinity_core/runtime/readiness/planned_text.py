"""What `trinity plan` prints, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from trinity_core.runtime.outlook.need import Need, size, total
from trinity_core.runtime.outlook.processes import ProcessOutlook
from trinity_core.runtime.readiness.planned import StageOutlook

Row = tuple[str, str]
"""Of the table of estimates: bytes, and what takes them."""


def planned_text(given: list[StageOutlook]) -> str:
    """The lines for a terminal."""
    return "\n".join(line for each in given for line in _lines(each))


def planned_json(given: list[StageOutlook]) -> str:
    """It as JSON: an object with the list `stages`."""
    return json.dumps({"stages": [asdict(each) for each in given]}, indent=2, default=str)


def _lines(stage: StageOutlook) -> Iterator[str]:
    yield ", ".join(filter(None, [f"{stage.project}/{stage.name}: {stage.algorithm or stage.mode}", *_mode(stage)]))
    yield from _facts(stage)
    needs = [*map(_process_rows, stage.processes), *_disk_rows(stage)]
    if needs:
        yield _line("takes", "by estimate: peak memory of each process, disk at the end")
        yield from _table([row for rows in needs for row in rows])


def _mode(stage: StageOutlook) -> list[str]:
    return [f"mode {stage.mode}" if stage.algorithm else "", stage.job_dir]


def _facts(stage: StageOutlook) -> Iterator[str]:
    """What the stage does, a line each."""
    known = "" if stage.parameters is None else f" ({stage.parameters:,} parameters)"
    yield _line("model", f"{stage.model}{known}")
    if stage.tasks_a_step or stage.experiences_a_step:
        if stage.total_steps is None:
            yield _line("steps", f"not known before the run: {stage.steps_why}")
        else:
            yield _line("steps", f"{stage.total_steps:,}" + (f": {stage.steps_why}" if stage.steps_why else ""))
    if stage.tasks_a_step:
        sampled = f"at most {stage.sampled_tokens_a_step:,} sampled tokens a turn, each step"
        whole = f"; {stage.sampled_tokens:,} in all" if stage.sampled_tokens else ""
        yield _line("explore", f"{stage.tasks_a_step:,} tasks, {stage.rollouts_a_step:,} rollouts, {sampled}{whole}")
    if stage.experiences_a_step:
        yield _line("train", f"{stage.experiences_a_step:,} experiences each step")
    sets = f"on {', '.join(stage.eval_sets)}" if stage.eval_sets else ""
    every = (
        ("eval", stage.eval_interval if stage.eval_sets else None, stage.evals, sets),
        ("save", stage.save_interval, stage.saves, ""),
        ("sync", stage.sync_interval, stage.syncs, ""),
    )
    for name, steps, count, on in every:
        if count != 0 and (steps or count):
            parts = [f"every {_count(steps, 'step')}" if steps else "", f"{count:,} in all" if count else "", on]
            yield _line(name, ", ".join(filter(None, parts)))
    if stage.unplaced:
        yield _line("place", f"not on this machine: {stage.unplaced}")
    yield _line("time", _time(stage))


def _time(stage: StageOutlook) -> str:
    pace = stage.pace
    if pace is None:
        why = stage.immeasurable or ("this machine lacks what the stage asks for" if stage.unplaced else "")
        return f"not known: {why}" if why else "`trinity plan --measure` runs a few steps to tell it"
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in pace.parts.items())
    whole = f"; {duration(pace.whole(stage.total_steps))} in all" if stage.total_steps else ""
    told = f"{pace.step:.3g} s a step{f' ({parts})' if parts else ''} after {pace.start:.0f} s to start{whole}"
    return f"{told}, without evaluations and saves; measured {pace.measured}"


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 20 s`, `5 h 07 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _process_rows(process: ProcessOutlook) -> list[Row]:
    on = f"{process.gpus:g} GPU" if process.gpus else _count(process.threads, "CPU thread")
    title = f"{process.kind}, {process.number} on {on}{' each' if process.number > 1 else ''}"
    return _rows(title, process.memory, process.unknown)


def _disk_rows(stage: StageOutlook) -> list[list[Row]]:
    return [_rows("disk", stage.disk, stage.disk_unknown)] if stage.disk or stage.disk_unknown else []


def _rows(title: str, needs: tuple[Need, ...] | None, unknown: str) -> list[Row]:
    if needs is None:
        return [("?", f"{title}: {unknown}")]
    return [(size(total(needs)), title), *((size(need.bytes), f"  {need.what}: {need.why}") for need in needs)]


def _table(rows: list[Row]) -> Iterator[str]:
    """Amounts to the right of their column, which is the narrow one: Studio shows these lines in half a page."""
    amounts = max(len(amount) for amount, _ in rows)
    yield from (f"    {amount:>{amounts}}  {what}" for amount, what in rows)


def _count(number: int, what: str) -> str:
    return what if number == 1 and what == "step" else f"{number:,} {what}{'s' * (number > 1)}"


def _line(name: str, text: str) -> str:
    return f"  {name:8} {text}"
