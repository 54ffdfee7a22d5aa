"""Without `total_steps` a run trains exactly on what its epochs explore."""

import pytest

from trinity_core.base.layout import JobLayout
from trinity_core.data.lengths import explore_steps
from trinity_core.data.schedule import TaskSchedule
from trinity_core.data.taskset import Taskset
from trinity_core.data.tiny import make_problems, write_jsonl
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.training.sources import open_source, total_steps

TASKS, EPOCHS, REPEATS = 24, 2, 4
BOTH = {"mode": "both", "synchronizer__sync_method": "checkpoint"}
DYNAMIC = BOTH | {"synchronizer__sync_style": "dynamic_by_explorer"}
DATA = "{path: PATH, format: {prompt_key: question, response_key: answer}}"
FILTER = {"data_processor__experience_pipeline__operators": "[{name: zero_variance_group_filter}]"}


@pytest.fixture
def lengths(make_config, tmp_path):
    """Explore steps and train steps of two passes over 24 tasks."""
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, make_problems(1, TASKS, 1, 1)["train"])

    def lengths(batch_size, train_batch_size, algorithm="grpo", **overrides):
        changes = {
            "buffer__total_steps": "null",
            "buffer__total_epochs": EPOCHS,
            "buffer__batch_size": batch_size,
            "buffer__train_batch_size": train_batch_size,
            "buffer__explorer_input__taskset": DATA,
        }
        changes = {key: str(value).replace("PATH", str(path)) for key, value in (changes | overrides).items()}
        config = make_config(algorithm, **changes)
        opened = [Taskset.open(taskset, config.seed) for taskset in config.buffer.explorer_input.tasksets]
        explored = explore_steps(config, TaskSchedule(opened, config.buffer.batch_size, config.seed))
        return explored, total_steps(config, open_source(config))

    return lengths


@pytest.fixture
def save(make_config, tmp_path):
    """Save as much of a checkpoint as a resume reads."""

    def save(step):
        taskset = DATA.replace("PATH", str(tmp_path / "tasks.jsonl"))
        layout = JobLayout(make_config("grpo", **BOTH, buffer__explorer_input__taskset=taskset).job_dir)
        folder = begin(layout, step)
        (folder / "state").write_text(str(step))
        return commit(layout, step, folder)

    return save


def _batches(explored, batch_size, rollouts):
    """Number of batches of at least `rollouts` rows in whole groups, until nothing is left."""
    groups, batches = explored * batch_size, 0
    while groups > 0:
        rows = 0
        while rows < rollouts and groups > 0:
            rows, groups = rows + REPEATS, groups - 1
        batches += 1
    return batches


@pytest.mark.parametrize("how", [{}, DYNAMIC])
@pytest.mark.parametrize("train_batch_size", [6, 16, 50, 400])
def test_all_that_is_explored_is_trained(lengths, how, train_batch_size):
    explored, trained = lengths(4, train_batch_size, **how)
    assert explored == EPOCHS * TASKS // 4
    assert trained == _batches(explored, 4, train_batch_size)


def test_each_explore_step_gets_a_train_step_when_synchronous(lengths):
    assert lengths(4, 16, **BOTH) == (12, 12)
    assert lengths(4, 8, **BOTH) == (12, 24)
    assert lengths(4, 32, **BOTH) == (12, 12)  # of half the size: explore step 2 waits for version 1
    assert lengths(6, 16, **BOTH, **FILTER) == (8, 8)


def test_expert_rows_were_not_explored(lengths):
    mix = {"algorithm__sample_strategy_args": "{expert_data_ratio: 0.5}"}
    mix |= {"buffer__trainer_input__auxiliary_buffers": f"{{expert: {DATA}}}", "model__max_model_len": 200}
    assert lengths(4, 32, "mix", **DYNAMIC, **mix) == (12, 12)
    assert lengths(4, 16, "mix", **DYNAMIC, **mix) == (12, 24)
    assert lengths(4, 16, "mix", **DYNAMIC, **mix, buffer__total_steps=10) == (5, 10)


def test_task_sets_may_have_groups_of_other_sizes(lengths):
    assert lengths(4, 16, **DYNAMIC, buffer__explorer_input__taskset__repeat_times=8) == (12, 24)


def test_weights_decide_how_many_tasks_fill_a_batch(make_config, tmp_path):
    """Groups of 2 and of 6: 4 rows a task at equal weights, 3 at the most uneven weights."""
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, make_problems(1, TASKS, 1, 1)["train"])
    weights = ("weight: 1", "weight_by_step: {1: 1, 9: 0.3333333333}")
    for weight, tasks in zip(weights, (8, 11), strict=True):
        sets = [DATA.replace("PATH", str(path))[1:-1] + f", repeat_times: {times}" for times in (2, 6)]
        tasksets = f"[{{{sets[0]}, weight: 1}}, {{{sets[1]}, {weight}}}]"
        changes = {"buffer__explorer_input__tasksets": tasksets, "buffer__total_steps": 10, **DYNAMIC}
        config = make_config("grpo", buffer__batch_size=1, buffer__train_batch_size=32, **changes)
        opened = [Taskset.open(taskset, config.seed) for taskset in config.buffer.explorer_input.tasksets]
        assert explore_steps(config, TaskSchedule(opened, 1, 0)) == 10 * tasks


@pytest.mark.parametrize(("train_batch_size", "steps"), [(16, 12), (32, 9), (8, 18)])
def test_other_batches_count_from_the_checkpoint(lengths, save, train_batch_size, steps):
    """48 tasks, of which 6 train steps have taken 24."""
    assert lengths(4, 16, **DYNAMIC) == (12, 12)
    save(6)
    for _ in range(2):
        assert lengths(4, train_batch_size, **DYNAMIC) == (12, steps), "also after a further start"


def test_change_after_a_damaged_checkpoint_is_forgotten(lengths, save):
    """48 tasks: 3 train steps take 12, then 3 take 6; then those are repeated."""
    assert lengths(4, 16, **DYNAMIC) == (12, 12)
    save(3)
    assert lengths(4, 8, **DYNAMIC) == (12, 3 + 18)
    newest = save(6)
    assert lengths(4, 32, **DYNAMIC) == (12, 6 + 4)
    (newest / "state").unlink()
    assert lengths(4, 32, **DYNAMIC) == (12, 3 + 5), "steps 4 to 6 are made again, with batches of 32"
    assert lengths(4, 16, **DYNAMIC) == (12, 12)


@pytest.mark.parametrize("train_batch_size", [4, 16, 100])
def test_synchronous_steps_count_from_the_checkpoint_too(lengths, save, train_batch_size):
    """A train step takes at most one explore step, however large its batch."""
    assert lengths(4, train_batch_size, **BOTH)[1] == max(12, 192 // train_batch_size)
    save(6)
    taken = 6 * min(train_batch_size // 4, 4)
    assert lengths(4, 8, **BOTH) == (12, 6 + (48 - taken) // 2)
