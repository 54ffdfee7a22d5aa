"""A run on two nodes of a Ray cluster: two raylets on this machine, with GPUs that are only counted."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, config_from_dict
from trinity_core.config.findings import ConfigError, Finding
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster
from trinity_core.hosting.gpus import Gpu
from trinity_core.hosting.placement import Machine, Placement, place
from trinity_core.rollout.inference import remote
from trinity_core.rollout.inference.engine import Engine
from trinity_core.rollout.inference.remote import RemoteEngine
from trinity_core.rollout.inference.settings import EngineSettings, policy_engine
from trinity_core.run import nodes
from trinity_core.run.configuration import load_checked
from trinity_core.run.preflight import checks, stage_plan
from trinity_core.run.preflight.room import KEY, Room

HERE = Path(__file__).parent
TWO = "RUNS_ON_NODE_TWO"
"""Set in the environment of the second node's processes."""


def configured(
    folder: Path, address: str = "10.0.0.1:6379", gpus: int | None = 4, node_num: int = 2, **rollout: int
) -> Config:
    return config_from_dict(
        {
            "checkpoint_root_dir": str(folder),
            "algorithm": {"repeat_times": 2},
            "model": {"model_path": "model", "max_model_len": 64, "max_response_tokens": 16},
            "cluster": {"node_num": node_num, "ray_address": address, "gpu_per_node": gpus},
            "explorer": {"rollout_model": {"gpu_memory_utilization": 0.5, **rollout}},
            "synchronizer": {"sync_method": "checkpoint"},
            "buffer": {
                "explorer_input": {"taskset": {"path": "tasks.jsonl"}},
                "trainer_input": {"experience_buffer": {"path": "postgresql://store/run"}},
            },
        }
    )


@pytest.mark.parametrize(
    ("node_num", "per_node", "engines", "size", "expected"),
    [
        (2, 4, 1, 2, ([4, 3], [0], [0, 0, 1, 1, 1])),
        (2, 4, 3, 2, ([4, 2], [0, 0, 1], [])),
        (2, 8, 1, 2, ([3], [0], [0])),
        (1, 1, 1, 1, ([1], [0], [0])),
        (2, 0, 3, 1, ([0, 0], [0, 1, 0], [1, 0])),
    ],
)
def test_processes_share_nodes(
    node_num: int, per_node: int, engines: int, size: int, expected: Any, tmp_path: Path
) -> None:
    """GPUs of each node, the node of each engine, the node of each trainer worker."""
    config = configured(tmp_path, node_num=node_num, gpus=per_node, engine_num=engines, tensor_parallel_size=size)
    workers = len(expected[2])
    share = 0.5 if per_node == 1 else 1.0
    placed = Placement(per_node, engines, share if per_node == 1 else size, (), workers, share, 1, 1, False)
    places = nodes.bundles(config, placed)
    assert (places.gpus, places.engines, places.trainers) == expected


def test_an_engine_that_fits_no_single_node_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, gpus=3, node_num=3, engine_num=4, tensor_parallel_size=2)
    with raising(TrinityError, key="explorer.rollout_model.tensor_parallel_size"):
        nodes.bundles(config, Placement(3, 4, 2.0, (), 1, 1.0, 1, 1, False))


def test_several_nodes_need_a_database_server(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{mode: both, algorithm: {repeat_times: 2}, cluster: {node_num: 2, ray_address: 'h:1', gpu_per_node: 4},"
        "model: {model_path: m, max_model_len: 64, max_response_tokens: 16},"
        "buffer: {batch_size: 2, total_steps: 2, explorer_input: {taskset: {path: t.jsonl}}}}"
    )
    with pytest.raises(ConfigError) as refused:
        load_checked(file, [f"checkpoint_root_dir={tmp_path}"])
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [
        ("buffer.trainer_input.experience_buffer.path", "conflict")
    ]


SELECTOR = """
from trinity_core.data.selectors import SELECTORS, TaskSelector

@SELECTORS.register("hardest")
class Hardest(TaskSelector):
    def draw(self, start, count, barred):
        return list(range(count))
"""


def test_a_node_counts_steps_by_a_plugins_task_selector(tmp_path: Path) -> None:
    """In a process that has loaded no plugins yet, as Ray starts one there."""
    from preflight_configs import config_of

    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "selector_of_a_node.py").write_text(SELECTOR)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "response": "2"}\n')
    taskset = "buffer.explorer_input.taskset"
    config = config_of(
        f"plugin_dir={tmp_path / 'plugins'}", f"{taskset}.path={tmp_path / 'tasks.jsonl'}",
        f"{taskset}.task_selector.selector_type=hardest", "buffer.total_steps=null", "buffer.total_epochs=1",
    )  # fmt: skip
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        findings = pool.submit(nodes.look_for_room, config, 0, nodes.Bundles([0.0], [0], [], [0]), 0).result(120)
    assert [finding for finding in findings if finding.severity == "error"] == []


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with 4 counted GPUs each."""
    from ray import cloudpickle
    from ray.cluster_utils import Cluster as Nodes

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares each actor what this module imports
    with mock.patch.dict(os.environ, PYTHONPATH=f"{HERE}:{HERE.parent.parent}"):
        cluster = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, "include_dashboard": False})
        cluster.add_node(num_cpus=2, num_gpus=4, env_vars={TWO: "1"})
    yield cluster.address
    cluster.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Process:
    """In place of an engine or a trainer's worker."""

    def where(self) -> tuple[str, list[str]]:
        """The node, and the GPUs."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class Stub:
    """In place of an engine, as far as `RemoteEngine` starts it and replaces it."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings

    describe = Engine.describe

    async def start(self) -> float:
        return 0.0

    async def stop(self) -> None:
        pass

    async def where(self) -> tuple[str, str, list[str], str]:
        """The actor's name, its node, the number of its GPUs, an environment variable."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"]
        return context.get_actor_name(), context.get_node_id(), gpus, os.environ["MARK"]


def started(cluster: Cluster, placement: Placement) -> tuple[list[Any], list[Any]]:
    """Where the engines and the workers are."""
    import ray

    engines = [
        cluster.actor(Process, f"engine_{index}", gpus=placement.engine_gpus, where=placement.nodes.engine(index))
        for index in range(placement.engines)
    ]
    workers = [
        cluster.actor(Process, f"worker_{rank}", gpus=placement.trainer_gpus, where=placement.nodes.trainer(rank))
        for rank in range(placement.trainers)
    ]
    nodes_of = [ray.get([actor.where.remote() for actor in group], timeout=120) for group in (engines, workers)]
    cluster.kill([*engines, *workers])
    return nodes_of[0], nodes_of[1]


@pytest.mark.slow
def test_a_run_keeps_to_its_nodes(two_nodes: str, tmp_path: Path) -> None:
    """Whatever others use: three engines of two GPUs on two nodes; then a run of one node beside another run."""
    import ray

    config = configured(tmp_path, two_nodes, engine_num=3, tensor_parallel_size=2)
    cluster = open_cluster(config, 4)
    try:
        placed = nodes.reserve(cluster, config, place(config, Machine(2, 4)))
        engines, workers = started(cluster, placed)
        assert [len(gpus) for _, gpus in engines] == [2, 2, 2] and len({node for node, _ in engines}) == 2
        assert len(workers) == 2 and {node for node, _ in workers} == {engines[2][0]}
        assert not [file for file in config.job_dir.iterdir() if "node_check" in file.name]
        placed.nodes.release()

        other = ray.remote(Process).options(num_gpus=3).remote()
        occupied, _ = ray.get(other.where.remote(), timeout=60)
        alone = configured(tmp_path, two_nodes, node_num=1, engine_num=1, tensor_parallel_size=2)
        placed = nodes.reserve(cluster, alone, place(alone, Machine(2, 4)))
        engines, workers = started(cluster, placed)
        assert len(workers) == 2 and len({node for node, _ in engines + workers} - {occupied}) == 1
        placed.nodes.release()
        ray.kill(other)
    finally:
        close_cluster(cluster)


def blind(note: str, plugins: str) -> tuple[str, dict[str, str]]:
    """A node whose disk is its own."""
    return "" if TWO in os.environ else Path(note).read_text(), nodes.software(plugins)


def old(note: str, plugins: str) -> tuple[str, dict[str, str]]:
    """A node with another vLLM."""
    return Path(note).read_text(), nodes.software(plugins) | ({"vllm": "0.1"} if TWO in os.environ else {})


def broken(note: str, plugins: str) -> tuple[str, dict[str, str]]:
    """A node without our packages."""
    raise ModuleNotFoundError("No module named 'trinity_core'")


def silent(note: str, plugins: str) -> tuple[str, dict[str, str]]:
    """A node that fails without a word."""
    raise MemoryError


@pytest.mark.slow
def test_a_node_that_cannot_take_part_is_named(two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any actor starts."""
    import ray

    config = configured(tmp_path, two_nodes, engine_num=3, tensor_parallel_size=2)
    cluster = open_cluster(config, 4)
    try:
        for look, said in (
            (blind, "checkpoint_root_dir"),
            (old, r"vllm 0\.1"),
            (broken, "No module named 'trinity_core'"),
            (silent, "MemoryError"),
        ):
            monkeypatch.setattr(nodes, "look_around", look)
            with pytest.raises(TrinityError, match=rf"Node \d+\.\d+\.\d+\.\d+ .*{said}"):
                nodes.reserve(cluster, config, place(config, Machine(2, 4)))
        groups = ray.util.placement_group_table().values()
        assert groups and all(group["state"] == "REMOVED" for group in groups)
    finally:
        close_cluster(cluster)


def without_model(config: Config, gpu_per_node: int, places: nodes.Bundles, node: int) -> list[Finding]:
    """A node to which the model was not copied."""
    there = {"model.model_path": "/no/model"} if TWO in os.environ else {}
    return nodes.look_for_room(config.with_values(there), gpu_per_node, places, node)


def cramped(config: Config, gpu_per_node: int, places: nodes.Bundles, node: int) -> list[Finding]:
    """A node whose GPUs have a MiB each."""
    memory = 1 << 20 if TWO in os.environ else 1 << 40
    room, gpus = Room(1 << 60, gpu_memory=memory, disk=1 << 60), [Gpu("0", "GPU-0", memory=memory)]
    with mock.patch.object(checks, "room_for", lambda _: room), mock.patch.object(stage_plan, "survey", lambda: gpus):
        return nodes.look_for_room(config, gpu_per_node, places, node)


@pytest.mark.slow
def test_a_node_without_the_model_or_too_small_is_named(
    two_nodes: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any actor starts, unless `cluster.allow_oversized` is set."""
    config = configured(tmp_path, two_nodes, engine_num=3, tensor_parallel_size=2)
    config = config.with_values({"model.model_path": str(tiny_folder)})
    cluster = open_cluster(config, 4)
    try:
        for look, key in ((without_model, "model.model_path"), (cramped, KEY)):
            monkeypatch.setattr(nodes, "look_for_room", look)
            with pytest.raises(ConfigError, match=r"node \d+\.\d+\.\d+\.\d+: ") as refused:
                nodes.reserve(cluster, config, place(config, Machine(2, 4)))
            assert {problem.key for problem in refused.value.problems} == {key}
        monkeypatch.setattr(nodes, "look_for_room", cramped)
        allowed = config.with_values({"cluster.allow_oversized": True})
        nodes.reserve(cluster, allowed, place(allowed, Machine(2, 4))).nodes.release()
    finally:
        close_cluster(cluster)


@pytest.mark.slow
def test_a_lost_engine_is_replaced_in_its_place(
    two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, on its node, on GPUs of its own, where every GPU of the cluster is reserved; also twice."""
    monkeypatch.setattr(remote, "engine_class", lambda settings: Stub)
    config = configured(tmp_path, two_nodes, engine_num=3, tensor_parallel_size=2)
    cluster = open_cluster(config, 4)
    try:
        placed = nodes.reserve(cluster, config, place(config, Machine(2, 4)))
        assert placed.gpus == 8
        settings, env = policy_engine(config, on_gpu=True), {"MARK": "kept"}
        engines = [
            RemoteEngine(
                cluster.actor(Stub, f"engine_{index}", settings, gpus=2, env=env, where=placed.nodes.engine(index))
            )
            for index in range(3)
        ]

        async def replaced() -> tuple[list[Any], list[Any]]:
            for engine in engines:
                await engine.start()
            before = [await engine.where() for engine in engines]
            for model in ("other", "newest"):
                engines[-1] = await engines[-1].successor(model)
            after = [await asyncio.wait_for(engine.where(), 60) for engine in engines]
            assert (await engines[-1].describe())[0].model_path == "newest"
            for engine in engines:
                await engine.stop()
            return before, after

        before, after = asyncio.run(replaced())
        assert [name for name, *_ in before] == ["engine_0", "engine_1", "engine_2"]
        assert len({node for _, node, *_ in before}) == 2 and {mark for *_, mark in before} == {"kept"}
        assert [(name, node, mark) for name, node, _, mark in after] == [
            (name, node, mark) for name, node, _, mark in before
        ]
        taken = [(node, gpu) for _, node, gpus, _ in after for gpu in gpus]
        assert len(taken) == len(set(taken)) == 6
        placed.nodes.release()
    finally:
        close_cluster(cluster)
