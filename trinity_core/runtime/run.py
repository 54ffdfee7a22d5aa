"""A whole run on one page: generate, score, store, train, sync weights, evaluate, save.

    python -m trinity_core.runtime.run --config FILE [key=value …]

Two loops work beside each other, each in processes of its own, and meet in two places: rollouts go from the explorer to
the trainer through the store, weights come back by weight sync. Version n is the weights after train step n. The verbs
are those of `rollout/explorer.py`, `training/trainer.py` and `runtime/session.py`; their order stands here. The Prefect
flows (`flows/`) run these same functions as tasks, with retries and a UI.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.evaluation import unscored_result
from trinity_core.runtime.pipeline import run_stages
from trinity_core.runtime.session import Session, open_session
from trinity_core.runtime.signals import ending_on_sigterm
from trinity_core.runtime.stage import Stage, resolve_stage
from trinity_core.runtime.summary import summarise, summary_text
from trinity_core.runtime.together import run_together

if TYPE_CHECKING:
    from trinity_core.rollout.explorer import Explorer
    from trinity_core.training.trainer import Trainer


async def explore(explorer: Explorer) -> None:
    """Each explore step: load the weights, generate answers to a batch of tasks, score them, store the rollouts.

    A synchronous explorer (`sync_style: fixed`) waits for exactly the version that is due: with `sync_interval: 1` and
    `sync_offset: 0` the training is on-policy. An asynchronous one takes the newest version; it waits for
    the first one, and with `max_staleness` until the rows of the step will be fresh enough when they are trained.
    """
    for step in explorer.steps():
        if explorer.is_synchronous:
            version = await explorer.version_due(step)
        else:
            version = await explorer.newest_version(step)
        if version is None:
            return  # asked to stop, or there is nothing to explore any more
        await explorer.load(version)
        await explorer.evaluate_if_due()
        rollouts = await explorer.generate_and_score(step)
        await explorer.store(rollouts)


def train(trainer: Trainer) -> None:
    """Each train step: lease a batch from the store, take a gradient step on it, publish the weights, save.

    Every rank runs this loop in step with the others. A checkpoint makes the batches up to it final.
    """
    while (batch := trainer.next_batch()) is not None:
        trainer.update(batch)
        trainer.publish_if_due()
        trainer.save_if_due()
        trainer.write_metrics()
    trainer.finish()


def evaluate(session: Session) -> dict[int, dict[str, float]]:
    """Score the run's last checkpoint (`mode: bench`: or the model itself) if it has no score yet: step -> metrics."""
    return {target.step: session.score(target.step, target.folder) for target in unscored_result(session)}


def run(stage: Stage) -> dict[str, Any]:
    """Run one stage, resuming from its latest checkpoint: explore and train, evaluate the result, sum up."""
    with open_session(stage) as session:
        loops = {"explore": partial(session.explore, explore), "train": partial(session.train, train)}
        results = run_together(session, loops)
        evaluate(session)
        return summarise(session, results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a configuration with all its stages without Prefect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("trinity_core").setLevel(logging.INFO)
    loaded = load_checked(given.config, given.overrides)
    for summary in run_stages(loaded, lambda name, model_path: run(resolve_stage(loaded, name, model_path))):
        print(summary_text(summary))


if __name__ == "__main__":
    from trinity_core.cli import run_app
    from trinity_core.runtime import run as page  # Ray's workers import the loops by name, not from __main__

    with ending_on_sigterm():
        run_app(page.main)
