"""Two runs compared: intervals against simulation, and what is read from folders of runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from operator import gt, lt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import called
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from flows.cli import main
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.tracking.answers import TaskAnswers, save_answers
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.run_record import record_start
from trinity_core.results.compare import (
    comparable_settings,
    compare,
    comparison_text,
    differing,
    read_run,
    shown_setting,
)
from trinity_core.results.paired import paired, paired_by_blocks, paired_over_seeds

SCORES = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), max_size=3))


@given(SCORES, SCORES)
def test_a_difference_turns_its_sign_with_its_sides(before: dict[str, Any], after: dict[str, Any]) -> None:
    one, other = paired(before, after), paired(after, before)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.before, one.after) == pytest.approx((other.after, other.before))
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
        assert (one.won, one.lost) == (other.lost, other.won)
        assert one.low < one.high


@pytest.mark.parametrize(("tasks", "repeats", "gain"), [(100, 1, 0.05), (60, 4, 0.0), (400, 1, 0.01)])
def test_intervals_contain_the_true_difference(tasks: int, repeats: int, gain: float) -> None:
    """Tasks of differing difficulty, on which the second model is better by `gain` on average."""
    rng, hits = np.random.default_rng(7), 0
    for _ in range(200):
        ease = rng.beta(2, 2, tasks) * 0.8
        drawn = [
            {str(i): (rng.random(repeats) < p).astype(float).tolist() for i, p in enumerate(chances)}
            for chances in (ease, ease + gain)
        ]
        difference = paired(*drawn)
        assert difference is not None
        hits += difference.low <= gain <= difference.high
    assert 0.92 <= hits / 200 <= 0.995


def test_difference_between_seeds_widens_the_interval() -> None:
    """Of two configurations that are equally good, 95 % of the intervals contain 0, however much seeds differ."""
    rng, hits, alone = np.random.default_rng(3), 0, 0
    for _ in range(200):
        right = rng.random((6, 200)) < rng.normal(0.5, 0.06, (6, 1))
        runs = [{str(i): [float(is_right)] for i, is_right in enumerate(run)} for run in right]
        sides = runs[:3], runs[3:]
        difference, single = paired_over_seeds(*sides), paired(sides[0][0], sides[1][0])
        assert difference is not None and single is not None
        hits += difference.verdict == "not distinguishable"
        alone += single.verdict == "not distinguishable"
    assert hits / 200 >= 0.94
    assert alone / 200 < 0.8


def test_one_run_and_several_like_it_do_not_differ() -> None:
    run = {str(task): [1.0, 0.0, 0.0, float(task % 2)] for task in range(50)}
    for sides in ([run], [run, run]), ([run, run], [run]):
        difference = paired_over_seeds(*sides)
        assert difference is not None and difference.before == difference.after == 0.375
        assert difference.verdict == "not distinguishable"


def test_only_common_tasks_and_verdicts_are_paired() -> None:
    before = {"a": [1.0, None], "b": [0.0], "c": [1.0], "d": [0.0]}
    after = {"a": [1.0, 0.0], "b": [1.0], "c": [None], "e": [0.0]}
    difference = paired(before, after)
    assert difference is not None
    assert (difference.pairs, difference.won, difference.lost, difference.json()["difference"]) == (2, 1, 0, 0.5)
    assert paired({"a": [1.0]}, {"a": [0.0]}) is None


def test_curves_are_compared_at_common_steps() -> None:
    curve = {step: 0.5 + 0.01 * (step % 3) for step in range(100)}
    higher = paired_by_blocks(curve, {step: value + 0.1 + 0.01 * (step % 2) for step, value in curve.items()})
    assert higher is not None and higher.verdict == "better" and higher.pairs == 100
    assert paired_by_blocks(curve, {0: 1.0}) is None
    undefined = paired_by_blocks(curve, curve | {50: float("nan")})
    assert undefined is not None and undefined.verdict == "not distinguishable" and undefined.pairs == 99


def run_folder(
    root: Path, name: str, accuracy: float, seed: int, lr: float = 1e-5, answers: bool = True, step: int = 10
) -> Path:
    folder = root / "p" / name
    record_start(folder, {"name": name, "seed": seed, "algorithm": {"lr": lr}}, "rft", software={"torch": "2.0"})
    write_json(folder / "summary.json", {"made_from": {"inputs": {"/data/train.jsonl": f"digest {lr}"}}})
    rng = np.random.default_rng(seed)
    right = [float(rng.random() < accuracy) for _ in range(100)]
    if answers:
        tasks = [
            TaskAnswers(i, f"row {i}", f"test.jsonl:{i + 1}", [s], f"q{i}", [f"a{s}"]) for i, s in enumerate(right)
        ]
        save_answers(folder, "test", step, tasks)
    score, metrics = float(np.mean(right)), MetricsFile(folder, "eval")
    metrics.write(step, {
        "eval/test/accuracy": score, "eval/test/accuracy_low": score - 0.1, "eval/test/accuracy_high": score + 0.1,
        "eval/test/judged": 100.0,
    }, made_with="x")  # fmt: skip
    return folder


def test_runs_are_compared_by_what_they_stored(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path, f"low{seed}", 0.4, seed) for seed in (1, 2)]
    folders += [run_folder(tmp_path, f"high{seed}", 0.9, seed, lr=1e-4) for seed in (1, 2)]
    done = called(main, "compare", *map(str, folders), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == ["p/low1", "p/low2"]
    assert told["configuration"] == {"seed": [1, 2, 1, 2], "algorithm.lr": [1e-5, 1e-5, 1e-4, 1e-4]}
    assert list(told["data"]) == ["/data/train.jsonl"] and told["code"] == {}
    [group] = told["others"]
    compared = group["sets"]["test"]
    assert compared["difference"]["verdict"] == "better"
    assert [len(scores) for scores in compared["seeds"]] == [2, 2]
    assert compared["difference"]["pairs"] == 100
    assert compared["changed"][0]["location"].startswith("test.jsonl:")
    text = called(main, "compare", *map(str, folders)).stdout
    assert "better" in text and "algorithm.lr" in text


def test_a_stage_has_the_score_that_the_next_one_measured_before_its_first_step(tmp_path: Path) -> None:
    sft = tmp_path / "p/sft"
    record_start(sft, {"name": "sft"}, "sft")
    rft = run_folder(tmp_path, "rft", 0.2, 1, step=0)
    run_folder(tmp_path, "rft", 0.9, 2)
    update_meta(JobLayout(rft).trainer_meta, model=f"{sft}/global_step_9/actor/huggingface")
    assert compare([sft, rft]).others[0].sets == {}, "a run of its own may have other tasks"
    (tmp_path / "p/all").mkdir()
    write_json(tmp_path / "p/all/stages.json", {"sft": "sft", "rft": "rft"})
    difference = compare([sft, rft]).others[0].sets["test"].difference
    assert (difference.verdict, difference.pairs) == ("better", 100)
    assert [read_run(stage).step for stage in (sft, rft)] == [9, 10]


def test_models_are_named_by_run_and_step_and_scores_of_other_steps_are_noted(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path, name, 0.5, 1, step=step) for name, step in (("one", 30), ("two", 60))]
    models = [f"{tmp_path}/p/sft/global_step_{step}/actor/huggingface" for step in (9, 110)]
    for folder, model in zip(folders, models, strict=True):
        record_start(folder, {"model": {"model_path": model}}, "rft")
    compared = compare(folders)
    assert compared.configuration["model.model_path"] == models
    lines = comparison_text(compared).splitlines()
    assert "  model.model_path  sft step 9 | sft step 110" in lines
    assert "note: scores of different steps: p/one at step 30, p/two at step 60" in lines
    assert "configuration  A | B" in lines and "A  p/one" in lines
    alike = replace(compared, configuration={}, notes=[])
    assert not [line for line in comparison_text(alike).splitlines() if line.startswith("A")], "no column to name"
    elsewhere = [models[0], models[0].replace("/p/", "/q/")]
    assert shown_setting("model.model_path", elsewhere) == elsewhere, "by their short names they would be one"
    assert compare([folders[0], folders[0]]).notes == []


def test_seeds_of_one_configuration_and_runs_without_answers(tmp_path: Path) -> None:
    seeds = compare([run_folder(tmp_path, f"run{seed}", 0.5, seed) for seed in (1, 2, 3)])
    assert (seeds.baseline, [group.runs for group in seeds.others]) == (["p/run1"], [["p/run2", "p/run3"]])
    old = compare([run_folder(tmp_path, "old", 0.3, 1, lr=2e-5, answers=False), tmp_path / "p" / "run1"])
    assert old.others[0].sets == {} and any("p/old" in note for note in old.notes)


def test_pipelines_that_differ_in_their_seed_form_a_group(tmp_path: Path) -> None:
    folders = [tmp_path / "p" / name for name in ("low1", "low2", "high1", "high2")]
    for number, folder in enumerate(folders):
        seed, lr = 1 + number % 2, 1e-5 if number < 2 else 1e-4
        stage = run_folder(tmp_path, f"{folder.name}_rft", 0.4 + 0.5 * (number > 1), seed)
        began = {"model": {"model_path": f"{folder}_sft/global_step_9/actor/huggingface"}}
        record_start(stage, {"name": stage.name, "seed": seed, **began}, "rft")
        stages = [{"stage_name": "sft", "algorithm": {"lr": lr}}, {"stage_name": "rft"}]
        record_start(folder, {"name": folder.name, "seed": seed, "stages": stages}, "pipeline")
        write_json(folder / "stages.json", {"rft": stage.name})
    compared = compare(folders)
    assert compared.baseline == ["p/low1_rft", "p/low2_rft"]
    assert compared.configuration == {"seed": [1, 2, 1, 2], "stages.0.algorithm.lr": [1e-5, 1e-5, 1e-4, 1e-4]}
    assert compared.others[0].sets["test"].difference.verdict == "better"


def pipeline_folder(root: Path, name: str, accuracy: float, **settings: Any) -> Path:
    stage = run_folder(root, f"{name}_rft", accuracy, seed=1)
    record_start(stage.parent / name, {"name": name, **settings}, "pipeline")
    write_json(stage.parent / name / "stages.json", {"rft": stage.name})
    return stage.parent / name


def test_an_unset_key_equals_its_default(tmp_path: Path) -> None:
    stage = {"stage_name": "rft"}
    plain = pipeline_folder(tmp_path, "plain", 0.5, stages=[stage])
    written = pipeline_folder(tmp_path, "written", 0.5, seed=42, trainer={"save_interval": 100}, stages=[stage])
    assert compare([plain, written]).configuration == {}
    other = pipeline_folder(tmp_path, "other", 0.5, trainer={"save_interval": None}, seed=43, stages=[stage])
    assert compare([plain, other]).configuration == {"seed": [42, 43], "trainer.save_interval": [100, None]}


def test_an_unset_key_of_a_stage_equals_what_the_stage_inherits(tmp_path: Path) -> None:
    folders = [
        pipeline_folder(tmp_path, name, 0.5, algorithm={"algorithm_type": "grpo", "repeat_times": 4}, stages=[stage])
        for name, stage in (
            ("above", {"stage_name": "rft"}),
            ("same", {"stage_name": "rft", "algorithm": {"repeat_times": 4}, "trainer": {"save_interval": 100}}),
            ("higher", {"stage_name": "rft", "algorithm": {"repeat_times": 8}}),
        )
    ]
    assert compare(folders).configuration == {"stages.0.algorithm.repeat_times": [4, 4, 8]}
    assert compare(folders).baseline == ["p/above_rft", "p/same_rft"]


def test_a_critic_that_begins_as_the_policy_is_no_difference_of_its_own() -> None:
    usual = [{"model": {"model_path": path, "critic_model_path": path}} for path in ("a", "b")]
    own = {"model": {"model_path": "a", "critic_model_path": "c"}}
    assert set(differing(comparable_settings(usual))) == {"model.model_path"}
    critics = differing(comparable_settings([usual[0], own]))["model.critic_model_path"]
    assert critics[0] is None and critics[1].endswith("c")


def test_all_differences_are_listed_if_asked(tmp_path: Path) -> None:
    one, other = run_folder(tmp_path, "one", 0.4, 1), run_folder(tmp_path, "other", 0.6, 2, lr=1e-4)
    [group] = compare([one, other]).others
    gained, lost = (sum(side(*sample.scores) for sample in group.sets["test"].changed) for side in (lt, gt))
    for words, counts in (([], [3, 3]), (["--all"], [gained, lost])):
        lines = called(main, "compare", str(one), str(other), *words).stdout.splitlines()
        assert [sum(line.startswith(f"    {side} ") for line in lines) for side in ("gained", "lost")] == counts
        assert any("--all" in line for line in lines) != bool(words)


def test_runs_without_a_common_eval_set_say_how_to_score_them(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path, name, 0.5, 1, lr, answers=False) for name, lr in (("one", 1e-5), ("other", 1e-4))]
    assert "trinity evaluate" in called(main, "compare", *map(str, folders)).stdout


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        compare([run_folder(tmp_path, "alone", 0.5, 1)])
    with pytest.raises(DataError) as refused:
        compare([tmp_path, tmp_path])
    assert refused.value.key == str(tmp_path)
    absent = run_folder(tmp_path, "scored", 0.5, 1) / "global_step_7"
    with raising(DataError, key=str(absent)):
        compare([absent, absent.with_name("global_step_10")])


def test_a_mistyped_run_is_answered_with_those_that_are_there(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "alone", 0.5, 1)
    others = [run_folder(tmp_path, name, 0.5, 1) for name in ("alone_sft", "zebra")]
    for mistyped in (run.with_name("alnoe"), tmp_path / "alone", tmp_path):
        for command in ("doctor", "audit", "view"):
            done = called(main, command, "--checkpoint-dir", str(mistyped))
            assert done.returncode == 1 and str(run) in done.stderr
    done = called(main, "doctor", "--checkpoint-dir", str(run.with_name("alnoe")))
    named = re.findall(rf"{run.parent}/(\w+)", done.stderr)
    assert named[1:] == ["alone", *(other.name for other in others)], "the nearest name first"
    elsewhere = called(main, "doctor", "--checkpoint-dir", str(tmp_path / "no/where/run"))
    assert elsewhere.returncode == 1 and str(run) not in elsewhere.stderr
