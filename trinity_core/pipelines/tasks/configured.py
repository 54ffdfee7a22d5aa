"""The task pipeline of a configuration, and the task sets that read its output."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.config.paths import output_root, reads_output, uses_pipeline
from trinity_core.config.schema.buffer import TasksetConfig
from trinity_core.pipelines.data_juicer.local import closing_data_juicer
from trinity_core.pipelines.tasks.curation import CuratedDataset, TaskPipeline, curate, made_operator
from trinity_core.pipelines.tasks.models import TaskModels, own_model

log = logging.getLogger(__name__)


def configured_pipeline(config: Config) -> TaskPipeline:
    """The pipeline of `data_processor.task_pipeline`, which must be there."""
    pipeline = config.data_processor.task_pipeline
    assert pipeline is not None, "only a configuration with a task pipeline has one"
    return TaskPipeline(
        inputs=pipeline.inputs,
        operators=pipeline.operators,
        split=pipeline.split,
        columns=pipeline.target_fields,
        priority_weights=pipeline.priority_weights,
        target_size=None if pipeline.top_k < 0 else pipeline.top_k,
        max_rejected_share=config.buffer.max_rejected_share,
        test_share=pipeline.test_share,
        seed=config.seed,
        models={name: model.model_path for name, model in asked_models(config).items()},
    )


def asked_models(config: Config) -> dict[str, AuxiliaryModelConfig]:
    """The configuration's models that operators of its task pipeline ask, by the names that these use."""
    pipeline = config.data_processor.task_pipeline
    asked = (model for operator in (pipeline.operators if pipeline else ()) for model in made_operator(operator).asks)
    models = {model.name: own_model(config, model) for model in asked}
    return {name: model for name, model in models.items() if model is not None}


def curated_tasks(config: Config, models: TaskModels | None = None) -> CuratedDataset:
    """The output of the configuration's pipeline: made, continued, or found. Raises TrinityError as `curate` does."""
    with closing_data_juicer(config) as data_juicer:
        dataset = curate(configured_pipeline(config), output_root(config), models, data_juicer)
    lost = "".join(f", {number} dropped by {operator}" for operator, number in dataset.dropped.items())
    aside = f", {dataset.rejected} rejected ({dataset.folder / 'rejected.jsonl'})" if dataset.rejected else ""
    test = f" and {dataset.test_rows} for tests" if dataset.test_rows else ""
    log.info("Curated tasks: %d of %d rows%s in %s%s%s", dataset.rows, dataset.read, test, dataset.folder, lost, aside)
    return dataset


def with_curated_tasks(config: Config, models: TaskModels | None = None) -> Config:
    """The configuration whose task sets read the pipeline's output, where a task set of this run does.

    The folder's name is the output's fingerprint, so that a run's own configuration records what it has read.
    """
    if not uses_pipeline(config):
        return config
    folder = str(curated_tasks(config, models).folder)
    explorer_input = config.buffer.explorer_input

    def reading(tasksets: Sequence[TasksetConfig]) -> list[TasksetConfig]:
        return [
            taskset.with_values({"path": folder}) if reads_output(config, taskset) else taskset for taskset in tasksets
        ]

    return config.with_values(
        {
            "buffer.explorer_input.tasksets": reading(explorer_input.tasksets),
            "buffer.explorer_input.eval_tasksets": reading(explorer_input.eval_tasksets),
        }
    )
