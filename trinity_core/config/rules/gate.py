"""Rules about the gate."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding, conflict
from trinity_core.config.rules.tasks import INPUT
from trinity_core.config.schema import Config


def gate_rules(config: Config) -> Iterator[Finding]:
    gate, names = config.gate, [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
    for key, named in (("gate.no_loss", gate.no_loss), ("gate.floors", gate.floors)):
        for name in named:
            if name not in names:
                message = f"{name!r} is no eval set; there are {', '.join(map(str, names)) or 'none'}."
                yield conflict(config, key, message, f"{INPUT}.eval_tasksets", code="unknown-name")
    if not gate.enable:
        return
    if config.mode != "bench":
        yield conflict(config, "gate.enable", "makes its stage a gate, which trains nothing: set mode: bench.", "mode")
    if names and set(names) <= {*gate.no_loss}:
        message = "names every eval set, so that none is left on which a gain could be shown."
        yield conflict(config, "gate.no_loss", message, f"{INPUT}.eval_tasksets")
