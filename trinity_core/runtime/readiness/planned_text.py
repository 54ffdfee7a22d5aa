"""What `trinity plan` prints, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from trinity_core.runtime.outlook.need import Need, size, total
from trinity_core.runtime.outlook.processes import ProcessOutlook
from trinity_core.runtime.readiness.planned import StageOutlook


def planned_text(given: list[StageOutlook]) -> str:
    """The lines for a terminal."""
    return "\n".join(line for each in given for line in _lines(each))


def planned_json(given: list[StageOutlook]) -> str:
    """It as JSON: an object with the list `stages`."""
    return json.dumps({"stages": [asdict(each) for each in given]}, indent=2, default=str)


def _lines(stage: StageOutlook) -> Iterator[str]:
    known = "" if stage.parameters is None else f" ({stage.parameters:,} parameters)"
    yield f"{stage.project}/{stage.name}: {stage.algorithm}, mode {stage.mode}, {stage.job_dir}"
    yield _line("model", f"{stage.model}{known}")
    if stage.tasks_a_step or stage.experiences_a_step:
        yield _line("steps", str(stage.total_steps or "until the data is used up"))
    if stage.tasks_a_step:
        sampled = f"at most {stage.sampled_tokens_a_step:,} sampled tokens a turn, each step"
        whole = f"; {stage.sampled_tokens:,} in all" if stage.sampled_tokens else ""
        yield _line("explore", f"{stage.tasks_a_step:,} tasks, {stage.rollouts_a_step:,} rollouts, {sampled}{whole}")
    if stage.experiences_a_step:
        yield _line("train", f"{stage.experiences_a_step:,} experiences each step")
    every = (
        ("eval", stage.eval_interval, stage.evals),
        ("save", stage.save_interval, stage.saves),
        ("sync", stage.sync_interval, stage.syncs),
    )
    for name, steps, count in every:
        if count != 0 and (steps or count):
            parts = [f"every {steps:,} steps"] if steps else []
            yield _line(name, ", ".join([*parts, *([f"{count:,} in all"] if count is not None else [])]))
    for process in stage.processes:
        yield from _process_lines(process)
    if stage.unplaced:
        yield _line("place", stage.unplaced)
    if stage.disk:
        yield from _needs("disk", "", stage.disk)
    yield _line("time", _time(stage))


def _time(stage: StageOutlook) -> str:
    pace = stage.pace
    if pace is None:
        return f"not known: {stage.immeasurable}" if stage.immeasurable else "`--measure` runs a few steps to tell it"
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in pace.parts.items())
    whole = f"; {duration(pace.whole(stage.total_steps))} in all" if stage.total_steps else ""
    told = f"{pace.step:.3g} s a step{f' ({parts})' if parts else ''} after {pace.start:.0f} s to start{whole}"
    return f"{told}, without evaluations and saves; measured {pace.measured}"


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 20 s`, `5 h 07 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _process_lines(process: ProcessOutlook) -> Iterator[str]:
    on = f"{process.gpus:g} GPU each" if process.gpus else f"{process.threads} CPU thread(s) each"
    head = f"{process.number} on {on}"
    if process.memory is None:
        yield _line(process.kind, head)
    else:
        yield from _needs(process.kind, f"{head}, peak of each ", process.memory)


def _needs(name: str, head: str, needs: tuple[Need, ...]) -> Iterator[str]:
    yield _line(name, f"{head}{size(total(needs))}")
    yield from (f"             {size(need.bytes):>9}  {need.what}: {need.why}" for need in needs)


def _line(name: str, text: str) -> str:
    return f"  {name:8} {text}"
