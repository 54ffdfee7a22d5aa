"""A whole run on one page: generate, score, store, train, sync weights, evaluate, save.

python -m trinity_core.run --config FILE [key=value …]

Two loops run concurrently, each in its own processes, and share two things: rollouts go from the explorer to the
trainer through the store, weights come back by weight sync. Version n is the weights after train step n. The methods
are in `rollout/explorer.py`, `training/trainer.py` and `run/attempt.py`; this file fixes their order. Every way
to start a run leads here (`run/driver.py`); a frontend calls the steps directly, or as Prefect tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trinity_core.run.attempt import PLAIN, Frontend, RunAttempt, open_attempt
from trinity_core.run.evaluation_beside import BESIDE, evaluate_beside
from trinity_core.run.examination import examined
from trinity_core.run.stage import Stage
from trinity_core.run.summary import publish, score_steps, unscored_result

if TYPE_CHECKING:
    from trinity_core.rollout.explorer import Explorer
    from trinity_core.training.trainer import Trainer


async def explore(explorer: Explorer) -> None:
    """Each explore step: load the weights, generate answers to a batch of tasks, score them, store the rollouts.

    A synchronous explorer (`sync_style: fixed`) waits for exactly the version that is due: with `sync_interval: 1` and
    `sync_offset: 0` the training is on-policy. An asynchronous explorer takes the newest version. It waits only for the
    first one and, with `max_staleness`, until the step's rows will be fresh enough when they are trained on.

    If trainer and engines share a GPU (`cluster.colocate`), a side releases it before it waits for the other, the
    explorer in `version_due`, the trainer in `next_batch`, and acquires it before it continues.
    """
    async for step in explorer.steps():
        if explorer.is_synchronous:
            version = await explorer.version_due(step)
        else:
            version = await explorer.newest_version(step)
        if version is None:
            return  # asked to stop, or nothing is left to explore
        await explorer.load(version)
        await explorer.evaluate_if_due()
        rollouts = await explorer.generate_and_score(step)
        await explorer.store(rollouts)


def train(trainer: Trainer) -> None:
    """Each train step: lease a batch from the store, take a gradient step on it, publish the weights, save.

    All ranks run this loop in step. A checkpoint makes the batches up to it final.
    """
    while (batch := trainer.next_batch()) is not None:
        trainer.update(batch)
        trainer.measure_if_due()
        trainer.publish_if_due()
        trainer.write_metrics()
        trainer.save_if_due()
    trainer.finish()


def evaluate(attempt: RunAttempt) -> dict[int, dict[str, float]]:
    """Score the run's last checkpoint (`mode: bench`: or the model itself) if it has no score yet; return step →
    metrics."""
    return score_steps(attempt, unscored_result(attempt))


def run(stage: Stage, frontend: Frontend = PLAIN) -> dict[str, Any] | None:
    """Run one stage, resuming from its latest checkpoint: explore and train, evaluate the result, summarise.

    None if it has saved and waits for a person (`monitor.pause`).
    """
    with frontend.call("cluster", lambda: open_attempt(stage)) as attempt:
        loops: dict[str, Callable[[], Any]] = {
            "explore": lambda: attempt.explore(explore, frontend.report),
            "train": lambda: attempt.train(train, frontend.report),
        }
        to_run = () if attempt.stop_rules.reason else attempt.components
        components = {name: loop for name, loop in loops.items() if name in to_run}
        if "train" in components and attempt.config.evaluates_beside:
            components[BESIDE] = lambda: evaluate_beside(attempt)
        with examined(attempt.config, frontend, attempt.pauses.note_findings):
            results = frontend.run_components(attempt, components)
        results.pop(BESIDE, None)
        attempt.raise_if_cancelled()
        if attempt.begins_pause(results.get("train")):
            return None
        if stage.placement.engines:
            frontend.call("evaluate", lambda: evaluate(attempt))
        return frontend.call("publish", lambda: publish(attempt, results, frontend))
