"""The processes of a stage that compute, and what each gets of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_core.config import Config
from trinity_core.runtime.outlook.need import Need, total
from trinity_core.runtime.placement import Placement

ENGINE, TRAINER, AUXILIARY = "engine", "trainer worker", "auxiliary engine"


@dataclass(frozen=True, slots=True)
class ProcessOutlook:
    """Processes of one kind."""

    kind: str
    """`engine`, `trainer worker`, or `auxiliary engine` with its model."""
    number: int
    gpus: float
    """Of each; a fraction shares a GPU, 0 computes on the CPU."""
    threads: int
    """OpenMP threads of each."""
    memory: tuple[Need, ...] | None = None
    """The peak of each: of a GPU's memory, or on the CPU of the machine's. None where it cannot be estimated."""
    unknown: str = ""
    """Why it cannot be."""

    @property
    def bytes(self) -> int | None:
        """The peak of all of them together."""
        return None if self.memory is None else self.number * total(self.memory)


def processes_of(config: Config, placement: Placement) -> list[ProcessOutlook]:
    """The engines and trainer workers of a stage, without estimates. Explorer, rewards, Ray and flow are left out."""
    found = []
    if placement.engines:
        found.append(ProcessOutlook(ENGINE, placement.engines, placement.engine_gpus, placement.engine_threads))
    models = config.explorer.auxiliary_models if placement.auxiliary_gpus else ()
    for model, gpus in zip(models, placement.auxiliary_gpus, strict=True):
        kind = f"{AUXILIARY} {model.name or model.model_path}"
        found.append(ProcessOutlook(kind, model.engine_num, gpus, placement.engine_threads))
    if placement.trainers:
        found.append(ProcessOutlook(TRAINER, placement.trainers, placement.trainer_gpus, placement.trainer_threads))
    return found
