"""Rules of the experience pipeline's inputs, whose rows are joined to experiences."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.problems import Finding
from trinity_core.config.schema import Config

INPUTS = "data_processor.experience_pipeline.inputs"


def joined_rules(config: Config) -> Iterator[Finding]:
    """Inputs that cannot be joined: without a path or a key, and in a run without tasks."""
    pipeline = config.data_processor.experience_pipeline
    for name, given in pipeline.inputs.items() if pipeline else ():
        if not given.path:
            yield Finding(f"{INPUTS}.{name}.path", given.path, "must be given: a file, a folder, a hub name or a URL.")
        if not given.join_key:
            message = "must be given: the column by which rows of the input and tasks belong together."
            yield Finding(f"{INPUTS}.{name}.join_key", given.join_key, message)
        if given.join_key in given.columns:
            message = "must leave the join_key out, which tasks have anyway."
            yield Finding(f"{INPUTS}.{name}.columns", given.columns, message)
    if pipeline and pipeline.inputs and config.mode == "serve":
        message = "must be left out in mode serve, in which there are no tasks to join them to."
        yield Finding(INPUTS, None, message, ("mode",))
