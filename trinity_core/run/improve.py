"""From feedback to the next model: one round collects feedback, trains from the champion, and asks the gate.

The configuration is a pipeline whose stages read rollouts (`storage_type: rollouts`) and which ends in a gate. A round
sets the stages' data, the model to begin from, and the pipeline's name. Each step leaves a record, so a round that is
killed goes on where it was, with the same data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import remove_tree, write_json
from trinity_core.base.runlock import held
from trinity_core.config import Config, stages
from trinity_core.data.inspection import supervised_inputs
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.exchange.store.earlier_rollouts import read_answers
from trinity_core.exchange.tracking.champions import champion
from trinity_core.run.attempt import PLAIN, Frontend
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import run_pipeline
from trinity_core.run.feedback import MANIFEST, RESULT, UNDECIDED, Round, judged_rollouts, rounds, used, write_rollouts
from trinity_core.run.preflight.checks import load_ready
from trinity_core.run.promotion import PROMOTED
from trinity_core.run.stage import stage_names
from trinity_core.run.summary import read_summary

log = logging.getLogger(__name__)
BUFFER = "buffer.trainer_input.experience_buffer"


@dataclass(frozen=True)
class Recipe:
    """The configuration of all rounds, and where their feedback comes from."""

    config: Config
    file: str
    overrides: Sequence[str]
    feedback: Sequence[str]
    """Folders of runs, URLs of stores, or .jsonl files."""

    @property
    def folder(self) -> Path:
        return self.config.job_dir.parent / f"{self.config.name}_feedback"

    @property
    def trained(self) -> dict[str, Config]:
        """The stages that learn from feedback, by name."""
        return {
            name: stage
            for name, stage in zip(stage_names(self.config), stages(self.config), strict=True)
            if stage.mode == "train" and stage.buffer.trainer_input.experience_buffer.storage_type == "rollouts"
        }

    def of_round(self, current: Round) -> Config:
        """Return the pipeline of a round, ready to start. Raises ConfigError."""
        values = {
            **{f"stages.{name}.{BUFFER}.path": str(current.data) for name in self.trained},
            "model.model_path": current.manifest["champion"],
            "name": f"{self.config.name}_{current.folder.name}",
            "continue_from_checkpoint": True,
        }
        settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        return load_ready(self.file, [*self.overrides, *settings])


def read_recipe(file: str, overrides: Sequence[str], feedback: Sequence[str]) -> Recipe:
    """Raises ConfigError, and TrinityError if no stage reads rollouts or the last stage is no gate."""
    recipe = Recipe(load_checked(file, overrides), file, overrides, feedback)
    if not (recipe.config.stages and recipe.trained and stages(recipe.config)[-1].gate.enable):
        raise TrinityError(
            f"{file} needs a stage in mode train with {BUFFER}.storage_type: rollouts, which learns from feedback, and "
            "a last stage with gate.enable, which decides about the model",
            key="stages",
        )
    return recipe


def improve(
    file: str, overrides: Sequence[str], feedback: Sequence[str], at_least: int, frontend: Frontend = PLAIN
) -> dict[str, Any]:
    """Continue the round in progress, or begin one if there are `at_least` new judged rollouts; return its result.

    Without enough feedback the result has no `verdict`, and `lacking` says why.
    """
    recipe = frontend.call("resolve", partial(read_recipe, file, overrides, feedback), retries=True)
    with held(recipe.folder, "improve"):
        current = frontend.call("collect", partial(collect, recipe, at_least), retries=True)
        if isinstance(current, str):
            log.info("%s", current)
            return {"name": recipe.config.name, "lacking": current}
        pipeline = recipe.of_round(current)
        run_pipeline(pipeline, frontend, is_ready=True)
        return frontend.call("record", lambda: _ended(current, pipeline))


def collect(recipe: Recipe, at_least: int) -> Round | str:
    """Return the round to run: the one in progress, or a new one; a sentence if there is too little feedback."""
    past = rounds(recipe.folder)
    if past and past[-1].verdict is None:
        log.info("Continuing the round in %s (remove it to begin another one)", past[-1].folder)
        return past[-1]
    rollouts = [rollout for source in recipe.feedback for rollout in judged_rollouts(source)]
    seen = used(past)
    fresh = sum(rollout.id not in seen for rollout in rollouts)
    if fresh < at_least:
        return f"{fresh} new judged rollouts of at least {at_least} in {', '.join(recipe.feedback)}"
    decided = used(each for each in past if each.verdict != UNDECIDED)
    taken = [rollout for rollout in rollouts if rollout.id not in decided]
    present = champion(recipe.config.job_dir.parent)
    model, since = (present.model, present.time) if present else (recipe.config.model.model_path, None)
    current, manifest = write_rollouts(recipe.folder, taken, model, since)
    for stage in recipe.trained.values():
        if not _examples(stage, current):
            remove_tree(current.folder)
            return f"{len(taken)} judged rollouts hold no example for {stage.name}: none is preferred"
    write_json(current.folder / MANIFEST, manifest)
    return current


def _examples(stage: Config, current: Round) -> int:
    """Return the number of answers (DPO: pairs) that a stage would learn from."""
    [_, buffer, kind], *_ = supervised_inputs(stage.with_values({f"{BUFFER}.path": str(current.data)}))
    return len(read_answers(buffer, policy_encoder(stage.model), kind, stage.model.max_model_len).rows)


def _ended(current: Round, pipeline: Config) -> dict[str, Any]:
    """Record and return what the gate said. A round that was killed after the promotion finds its own champion."""
    gate = read_summary(stages(pipeline)[-1])["gate"]
    verdict = PROMOTED if gate["verdict"] == "is the champion" else gate["verdict"]
    result = {"verdict": verdict, "name": pipeline.name, "feedback": str(current.folder), "gate": gate}
    write_json(current.folder / RESULT, result)
    return result
