"""Rules of mode `serve`, in which users of the OpenAI API take the place of tasks."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.problems import Finding
from trinity_core.config.schema import BufferConfig, Config


def serve_rules(config: Config) -> Iterator[Finding]:
    """What contradicts mode `serve`, or would do nothing there."""
    if config.mode != "serve":
        return
    if not config.explorer.rollout_model.enable_openai_api:
        message = "must be true in mode serve, whose users come through that API."
        yield Finding("explorer.rollout_model.enable_openai_api", False, message, ("mode",))
    given = config.given.get("buffer")
    given = given if isinstance(given, dict) else {}
    inputs = given.get("explorer_input")
    for key in ("taskset", "tasksets"):
        if isinstance(inputs, dict) and inputs.get(key):
            message = "must be left out in mode serve: what users ask takes the place of tasks."
            yield Finding(f"buffer.explorer_input.{key}", None, message, ("mode",))
    for key, default in (("total_steps", None), ("total_epochs", BufferConfig().total_epochs)):
        if given.get(key) not in (None, default):
            message = "must be left out in mode serve, which ends when its trainer has finished; set it there."
            yield Finding(f"buffer.{key}", given[key], message, ("mode",))
    if config.synchronizer.max_staleness is not None:
        message = "must be left out in mode serve: nobody can tell when users will give feedback."
        yield Finding("synchronizer.max_staleness", config.synchronizer.max_staleness, message, ("mode",))
