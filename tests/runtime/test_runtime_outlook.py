"""What a run will do and write, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from outlook_configs import SHAPE, config_of

from trinity_core.runtime.outlook.counts import evaluations, kept_checkpoints, saves, syncs
from trinity_core.runtime.outlook.disk import disk_of
from trinity_core.runtime.outlook.model_shape import ModelShape, shape_from
from trinity_core.runtime.outlook.need import size, total
from trinity_core.runtime.placement import Machine
from trinity_core.runtime.readiness.planned import planned


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1 + 2 + 1),  # version 0, versions 4 and 8, and the last checkpoint
        (["explorer.eval_on_startup=false"], 2 + 1),
        (["explorer.eval_interval=0"], 1 + 1),
        (["explorer.eval_interval=9"], 1 + 1 + 1),  # step 10 explores with version 9
        (["explorer.eval_interval=10"], 1 + 1),  # version 10 is scored at the end alone
        (["synchronizer.sync_interval=5"], 1 + 1 + 1),  # versions 0 and 5
        (["buffer.explorer_input.eval_tasksets=[]"], 0),
    ],
)
def test_evaluations_of_ten_steps(overrides, expected):
    assert evaluations(config_of(*overrides), 10) == expected


@pytest.mark.parametrize(
    ("interval", "keep", "expected"), [(4, None, (3, 3)), (5, 1, (2, 2)), (2, 2, (5, 3)), (0, 3, (1, 1))]
)
def test_saves_of_ten_steps(interval, keep, expected):
    given = [f"trainer.save_interval={interval}", *([f"trainer.max_checkpoints_to_keep={keep}"] if keep else [])]
    config = config_of(*given)
    assert (saves(config, 10), kept_checkpoints(config, 10)) == expected


def test_syncs_are_the_versions_published():
    assert syncs(config_of(), 10) == 10
    assert syncs(config_of("synchronizer.sync_interval=3"), 10) == 3


def test_disk_holds_checkpoints_model_and_experiences():
    needs = {need.what: need.bytes for need in disk_of(config_of(), 10, [SHAPE], 4)}
    assert needs["checkpoints"] == 3 * 1_000_000 * (4 + 8)
    assert needs["models"] == 4_000_000
    assert needs["experiences"] == 10 * 4 * 8 * (88 + 40) * 13
    half = disk_of(config_of("algorithm.algorithm_type=ppo"), 10, [SHAPE, SHAPE], 2)
    assert half[0].bytes == 3 * 2 * 1_000_000 * (2 + 8 + 4)
    assert total(half) == sum(need.bytes for need in half)


def test_shape_is_read_from_config_json():
    plain = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6,
             "intermediate_size": 1536, "vocab_size": 1000, "tie_word_embeddings": True}  # fmt: skip
    shape = shape_from(plain, 7)
    assert shape == ModelShape(7, 6, 512, 1536, 8, 2, 64, 1000, tied=True)
    assert (shape.queries, shape.keys, shape.embedding) == (512, 128, 512_000)
    assert shape_from({"text_config": {**plain, "head_dim": 32}}, 7).keys == 64
    experts = shape_from({**plain, "num_experts_per_tok": 4, "moe_intermediate_size": 256}, 7)
    assert experts.intermediate == 1024
    assert shape_from({"n_embd": 512}, 7) is None


def test_plan_places_processes_on_the_machine():
    (stage,) = planned(config_of("trainer.worker_num=2"), Machine(8, 0))
    assert [(each.kind, each.number, each.gpus, each.threads) for each in stage.processes] == [
        ("engine", 1, 0, 8),
        ("trainer worker", 2, 0, 4),
    ]
    (stage,) = planned(config_of("cluster.gpu_per_node=4"), Machine(8, 2))
    assert "cluster.gpu_per_node asks for 4 GPUs" in stage.unplaced
    (larger,) = planned(config_of("cluster.gpu_per_node=4"), Machine(8, 4))
    assert [(each.kind, each.number, each.gpus) for each in larger.processes] == [
        ("engine", 1, 1.0),
        ("trainer worker", 3, 1.0),
    ]
    assert larger.unplaced == "" and stage.processes == larger.processes, "planned as if the GPUs were there"


def test_sizes_are_told_in_three_digits():
    assert [size(count) for count in (0, 999, 1 << 20, 1_600_000_000, 123 << 30)] == [
        "0 B",
        "999 B",
        "1 MiB",
        "1.49 GiB",
        "123 GiB",
    ]
