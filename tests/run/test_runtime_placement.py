"""Which GPUs a run sees, and how a machine is shared out: GPUs, threads, the way weights go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, config_from_dict
from trinity_core.hosting import gpus as room
from trinity_core.hosting.gpus import Gpu, take_gpus, visible
from trinity_core.hosting.placement import (
    Machine,
    components_of,
    flow_of,
    place,
    runners,
    sync_method,
    threads,
    unfilled_engine,
    weakest,
)
from trinity_core.rollout.inference.settings import policy_engine

TASKS = {"path": "data", "format": {"prompt_key": "question", "response_key": "answer"}}


def configured(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": "model", "max_model_len": 64, "max_response_tokens": 16},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": TASKS}},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return config_from_dict(tree)


def test_without_a_gpu_the_run_uses_the_cpu_and_memory_sync() -> None:
    config = configured(synchronizer={"sync_method": "nccl"})
    placed = place(config, Machine(cpus=2, gpus=0))
    assert (placed.gpu_per_node, placed.engines, placed.trainers, placed.on_gpu) == (0, 1, 1, False)
    method, notice = sync_method(config, placed)
    assert method == "memory" and "No GPU" in notice
    assert components_of(config, placed) == {"explore", "train"}
    several = configured(synchronizer={"sync_method": "nccl"}, cluster={"node_num": 2, "ray_address": "auto"})
    assert sync_method(several, placed)[0] == "checkpoint", "memory is that of one node"


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (6, False), (8, True)])
def test_trainer_workers_form_whole_groups(gpus: int, fits: bool) -> None:
    """The number of GPUs is known only on the machine."""
    config = configured(explorer={"rollout_model": {"engine_num": 2}}, trainer={"ulysses_sequence_parallel_size": 3})
    machine = Machine(cpus=64, gpus=gpus)
    if fits:
        assert place(config, machine).trainers == 6
    else:
        with raising(TrinityError, key="trainer.ulysses_sequence_parallel_size"):
            place(config, machine)


def test_what_the_machine_has_is_taken_and_shared_out() -> None:
    config = configured(explorer={"rollout_model": {"engine_num": 2, "tensor_parallel_size": 2}})
    placed = place(config, Machine(cpus=64, gpus=8))
    assert (placed.engines, placed.engine_gpus, placed.trainers, placed.trainer_gpus) == (2, 2.0, 4, 1.0)
    assert sync_method(config, placed) == ("nccl", "")


def test_zero_gpus_means_the_cpu_also_where_there_are_some() -> None:
    assert not place(configured(cluster={"gpu_per_node": 0}), Machine(cpus=64, gpus=8)).on_gpu


def test_asking_for_too_many_gpus_says_how_many_there_are() -> None:
    with raising(TrinityError, key="cluster.gpu_per_node"):
        place(configured(cluster={"gpu_per_node": 4}), Machine(cpus=8, gpus=2))
    with raising(TrinityError, key="cluster.gpu_per_node"):
        place(configured(cluster={"gpu_per_node": 2}), Machine(cpus=8, gpus=0))


def test_every_engine_of_an_auxiliary_model_is_counted() -> None:
    judge = {"name": "judge", "model_path": "judge", "engine_num": 3, "tensor_parallel_size": 2}
    config = configured(explorer={"auxiliary_models": [judge]})
    placed = place(config, Machine(cpus=64, gpus=8))
    assert (placed.auxiliary_gpus, placed.trainers, placed.gpus) == ((2,), 1, 8)
    with raising(TrinityError, key="explorer.rollout_model.engine_num"):
        place(config, Machine(cpus=64, gpus=6))
    assert place(config, Machine(cpus=10, gpus=0)).engine_threads == 10 // 4


def test_of_several_nodes_each_counts_for_what_all_have() -> None:
    nodes = [Machine(cpus=8, gpus=0), Machine(cpus=64, gpus=8), Machine(cpus=32, gpus=4)]
    assert weakest(nodes, 1) == Machine(cpus=64, gpus=8)
    assert weakest(nodes, 2) == Machine(cpus=32, gpus=4)
    placed = place(configured(cluster={"node_num": 2, "ray_address": "auto"}), weakest(nodes, 2))
    assert (placed.gpu_per_node, placed.trainers, placed.gpus) == (4, 7, 8)
    with raising(TrinityError, key="cluster.node_num"):
        weakest(nodes, 4)


def test_an_engine_does_not_span_nodes() -> None:
    rollout = {"tensor_parallel_size": 4}
    config = configured(cluster={"node_num": 2, "ray_address": "auto"}, explorer={"rollout_model": rollout})
    with raising(TrinityError, key="explorer.rollout_model.tensor_parallel_size"):
        place(config, Machine(cpus=8, gpus=2))


@pytest.mark.parametrize("engine", [{"gpu_memory_utilization": 0.5}, {"kv_cache_gib": 8}])
def test_a_trainer_needs_a_gpu_or_a_share_of_the_only_one(engine: dict[str, float]) -> None:
    with raising(TrinityError, key="explorer.rollout_model.engine_num"):
        place(configured(cluster={"colocate": False}), Machine(cpus=8, gpus=1))
    config = configured(explorer={"rollout_model": engine}, cluster={"colocate": False})
    placed = place(config, Machine(cpus=8, gpus=1))
    assert (placed.engine_gpus, placed.trainer_gpus, placed.shares_gpu) == (0.5, 0.5, True)
    assert not place(config, Machine(8, 2)).shares_gpu and not place(config, Machine(8, 0)).shares_gpu
    assert sync_method(config, placed)[0] == "memory"


def test_on_a_single_gpu_engine_and_trainer_take_turns() -> None:
    """By default where the run is synchronous; on the CPU, where nothing is gained, only if it is asked for."""
    one, none = Machine(cpus=8, gpus=1), Machine(cpus=8, gpus=0)
    placed = place(configured(synchronizer={"sync_interval": 2}), one)
    assert (placed.engine_gpus, placed.trainer_gpus, placed.colocated, placed.in_turn) == (0.5, 0.5, True, True)
    assert sync_method(configured(), placed)[0] == "memory"
    style = {"sync_style": "trainer_driven"}
    with raising(TrinityError, key="explorer.rollout_model.engine_num"):
        place(configured(synchronizer=style), one)
    with raising(TrinityError, key="explorer.rollout_model.engine_num"):
        place(configured(trainer={"zero_stage": 3}), one)
    assert not place(configured(), Machine(8, 2)).colocated and not place(configured(), none).colocated
    asked = configured(cluster={"colocate": True})
    with raising(TrinityError, key="cluster.colocate"):
        place(asked, Machine(8, 2))
    assert place(asked, none).colocated and policy_engine(asked, on_gpu=True).sleeps
    assert not place(asked.with_values({"mode": "bench"}), one).colocated, "there is no trainer"


def test_a_gpu_engine_gets_as_many_workflows_as_fill_it() -> None:
    gpu, cpu = (place(configured(), Machine(8, gpus)) for gpus in (2, 0))
    assert runners(configured(), cpu) == 8
    assert (runners(configured(), gpu, 24 << 30), runners(configured(), gpu, 80 << 30)) == (256 // 4, 1024 // 4)
    assert runners(configured(explorer={"runner_per_model": 3}), gpu) == 3
    narrow = {"rollout_model": {"max_num_seqs": 4}}
    assert runners(configured(explorer=narrow), gpu) == 8
    assert runners(configured(explorer=narrow, buffer={"batch_size": 128}), gpu) == 8
    wide = configured(buffer={"batch_size": 100}, explorer={"rollout_model": {"max_num_seqs": 256}})
    assert runners(wide, gpu) == 100
    assert runners(wide.with_values({"buffer.batch_size": 1000}), gpu) == 2 * 256 // 4
    assert unfilled_engine(configured(explorer={"runner_per_model": 16}, buffer={"batch_size": 128}), gpu)
    assert not unfilled_engine(configured(explorer={"runner_per_model": 64}, buffer={"batch_size": 128}), gpu)
    assert not unfilled_engine(configured(explorer={"runner_per_model": 1}, buffer={"batch_size": 2}), gpu)
    assert not unfilled_engine(configured(explorer={"runner_per_model": 16}, buffer={"batch_size": 128}), cpu)


def test_supervised_runs_use_no_engine() -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": TASKS}}
    config = configured(mode="train", algorithm={"algorithm_type": "sft", "repeat_times": 1}, buffer=buffer)
    placed = place(config, Machine(cpus=2, gpus=0))
    assert (placed.engines, placed.trainers) == (0, 1)
    assert (flow_of(config), components_of(config, placed)) == ("sft", {"train"})


def test_in_turn_each_side_has_every_core() -> None:
    placed = place(configured(), Machine(cpus=2, gpus=0))
    assert placed.in_turn and (placed.engine_threads, placed.trainer_threads) == (2, 2)
    ahead = place(configured(synchronizer={"sync_offset": 1}), Machine(cpus=2, gpus=0))
    assert not ahead.in_turn and (ahead.engine_threads, ahead.trainer_threads) == (1, 1)


@given(cpus=st.integers(1, 256), engines=st.integers(0, 16), trainers=st.integers(0, 16), in_turn=st.booleans())
def test_concurrent_processes_share_the_cores(cpus: int, engines: int, trainers: int, in_turn: bool) -> None:
    engine, trainer = threads(cpus, engines, trainers, in_turn)
    assert engine >= 1 and trainer >= 1
    at_a_time = [engines * engine, trainers * trainer] if in_turn else [engines * engine + trainers * trainer]
    assert all(total <= max(cpus, engines + trainers) for total in at_a_time)


FOUR = [Gpu(str(index), f"GPU-{index}{index}") for index in range(4)]


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        (" 3 , 1", ["3", "1"]),
        ("0,7,1", ["0"]),
        ("GPU-22,0", ["GPU-22", "0"]),
        ("GPU-3", ["GPU-3"]),
        ("MIG-4f,MIG-5a", ["MIG-4f", "MIG-5a"]),
    ],
)
def test_visible_devices_are_read_as_cuda_does(allowed: str | None, names: list[str]) -> None:
    gpus = visible(FOUR, allowed)
    assert [gpu.name for gpu in gpus] == names
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)


@pytest.mark.parametrize(("count", "looks"), [(0, 0), (1, 1), (2, 3)])
def test_dying_processes_are_waited_for(
    count: int, looks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPUs beyond the run's are of no concern, and one that is broken would end a run without any."""
    states = [[Gpu("0", "GPU-0"), Gpu("1", "GPU-1", processes=pids)] for pids in ((7,), (7,), ())]
    left = iter(states)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(room, "survey", lambda: next(left))
    assert take_gpus(count, tmp_path).shown is None
    assert len(list(left)) == 3 - looks


def eight(busy: Sequence[int]) -> list[Gpu]:
    return [Gpu(str(index), f"GPU-{index}", processes=(7,) * (index in busy)) for index in range(8)]


@pytest.mark.parametrize(
    ("busy", "count", "allowed", "shown"),
    [
        ((0, 1, 2, 3), 4, None, "4,5,6,7"),
        ((0, 2), 4, None, "1,3,4,5"),
        ((4,), 4, None, None),
        ((0, 1, 2, 3), 5, None, None),  # too few are free
        ((0, 1, 2, 3), 4, "0,1,2,3,4,5,6,7", None),  # chosen by the user
        ((), 9, None, None),
    ],
)
def test_free_gpus_are_taken(
    busy: Sequence[int], count: int, allowed: str | None, shown: str | None, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    monkeypatch.setattr(room, "RELEASE_SECONDS", 0.01)
    monkeypatch.setattr(room, "survey", lambda: eight(busy))
    assert take_gpus(count, tmp_path).shown == shown
    warns = any(record.levelname == "WARNING" for record in caplog.records)
    assert warns is (shown is None and 0 in busy), "a warning names GPUs that are in use"


def test_runs_that_start_at_once_take_different_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither computes on its GPUs yet."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(room, "RELEASE_SECONDS", 0.01)
    monkeypatch.setattr(room, "survey", lambda: eight(()))
    runs = [take_gpus(4, tmp_path) for _ in range(3)]
    assert [run.shown for run in runs] == [None, "4,5,6,7", None]
    runs[0].release()
    runs[0].release()
    assert take_gpus(3, tmp_path).shown is None and take_gpus(2, tmp_path).shown is None, "the first, then too few"
