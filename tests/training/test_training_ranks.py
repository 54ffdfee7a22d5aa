"""Two and four workers train like one under every ZeRO stage, and one resumes a checkpoint of two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batches import rows_of, trained_models
from ports import free_port
from raising import raising

from trinity_core.base.addresses import interface_of
from trinity_core.base.errors import TrinityError
from trinity_core.config import config_from_dict
from trinity_core.config.training import train_settings
from trinity_core.run.preflight import memory
from trinity_core.run.preflight.model_shape import shape_of
from trinity_core.training.checkpoint import load
from trinity_core.training.distributed import Ranks, SequenceGroup, join, meeting_point, uses_gpu
from trinity_core.training.learner import Learner
from trinity_core.training.packing import ATTENTION
from trinity_core.training.policy import load_causal_lm
from trinity_core.training.sequence_parallel import install, split_sequences
from trinity_core.training.state import weights

pytestmark = pytest.mark.slow

ADAPTER = [{"lora_rank": 4, "lora_alpha": 12}]
LARGE = 10_000
"""Token budget of a micro-batch that holds all rows."""


def _case(name, stage, tiny_model, max_tokens=LARGE, dtype=None, lora=(), sharing=1, world_sizes=(2,), at_once=10**6,
          saved=True, algorithm="grpo", teacher=None, **offload):  # fmt: skip
    config = {
        "name": name,
        "mode": "train",
        "algorithm": {"algorithm_type": algorithm, "repeat_times": 4, "optimizer": {"lr": 1e-4}},
        "model": {"model_path": str(tiny_model), "max_prompt_tokens": 32, "max_response_tokens": 32},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"batch_size": 4, "total_steps": 4, "trainer_input": {"experience_buffer": {"name": "buffer"}}},
        "trainer": {
            "zero_stage": stage,
            "dtype": dtype,
            "ulysses_sequence_parallel_size": sharing,
            "worker_num": sharing,
        },  # of a group; the ranks are counted by `world_sizes`
    }
    config["model"]["lora_configs"] = list(lora)
    if teacher is not None:
        config["algorithm"]["policy_loss_fn_args"] = {"teacher": teacher}
    if algorithm in ("sft", "dpo"):
        config["buffer"]["trainer_input"]["experience_buffer"]["path"] = "rows.jsonl"
    if offload:
        config["trainer"]["trainer_config"] = {"actor_rollout_ref": {"actor": {"fsdp_config": offload}}}
    return {
        "name": name, "config": config, "max_tokens": max_tokens, "exact": dtype is None, "at_once": at_once,
        "world_sizes": world_sizes, "saved": saved, "kind": [algorithm, dtype, bool(lora), teacher],
    }  # fmt: skip


def _grid(tiny_model):
    """ZeRO 0, 2 and 3 in float32, 0 and 2 in bfloat16: with 2 ranks, ZeRO 0 and 3 with 4 too; one with offload.

    4 ranks under ZeRO 0 resume from what 2 have saved.
    """
    for stage, dtype in ((3, None), (0, None), (2, None), (0, "bfloat16"), (2, "bfloat16")):
        name = f"{dtype or 'float32'}_{stage}"  # first the stage that asks for the ranks before DeepSpeed does
        by_two = _case(name, stage, tiny_model, 25 if name == "float32_3" else LARGE, dtype)
        by_two["at_once"] = 5_000 if dtype is None else by_two["at_once"]
        yield by_two
        if name == "float32_3":
            yield by_two | {"world_sizes": [1, 4], "saved": False}
        if stage == 0:
            yield by_two | {"world_sizes": [4], "saved": False, "resumes": True}
    yield _case("offloaded3", 3, tiny_model, LARGE, optimizer_offload=True, param_offload=True)


@pytest.fixture
def trained(tiny_model, tmp_path):
    """The results of each case by number of ranks, and the cases."""
    cases = [*_grid(tiny_model), _case("zero0_small", 0, tiny_model, 20, saved=False)]
    cases += [_case("two_micro_batches", 0, tiny_model, 80, world_sizes=(1,), saved=False)]
    cases += [_case(f"shared{stage}", stage, tiny_model, tokens, sharing=2) for stage, tokens in ((0, 60),)]
    cases += [_case("shared_half", 2, tiny_model, dtype="bfloat16", sharing=2, saved=False)]
    for algorithm, stage, lora in (("dpo", 0, ()), ("sft", 0, ()), ("ppo", 0, ()), ("grpo", 2, ADAPTER)):
        name = f"shared_{algorithm}{stage}"
        cases += [_case(name, stage, tiny_model, sharing=2, saved=False, algorithm=algorithm, lora=lora)]
    cases += [_case(f"adapter{stage}", stage, tiny_model, lora=ADAPTER) for stage in (0, 2, 3)]
    for stage, teacher in ((0, "reference"), (3, "reference"), (3, "policy")):
        name = f"taught_by_{teacher}{stage}"
        cases += [_case(name, stage, tiny_model, 60, saved=False, algorithm="opsd_full", teacher=teacher)]
    cases += [_case("critic3", 3, tiny_model, algorithm="ppo")]  # the bias of its head cannot be shared out evenly
    for case in cases:
        offloads = case["name"].startswith("offloaded")  # on a CPU no saving
        compared = [] if offloads or "ppo" in case["kind"] else case["world_sizes"]
        case["planned"] = {size: planned_bytes(case, size, tiny_model) for size in compared}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    ports = json.dumps([(world_size, free_port()) for world_size in (2, 4, 1)])
    script = Path(__file__).with_name("rank.py")
    subprocess.run([sys.executable, script, ports, str(tmp_path)], env=environment, timeout=400, check=True)
    return [(case, size, tmp_path / f"{case['name']}_{size}.pt") for case in cases for size in case["world_sizes"]]


def planned_bytes(case, world_size, tiny_model):
    """Bytes that the plan predicts for a rank between steps: weights, optimizer state, buffers, the reference's
    weights. ZeRO 3 keeps parameters of less than 100,000 elements whole, so all of this model's."""
    config, shape = config_from_dict(case["config"]), shape_of(str(tiny_model))
    width = 4 if case["exact"] else 2
    stage = train_settings(config).zero_stage_for(world_size, "float32" if case["exact"] else "bfloat16")
    micro = memory.MicroBatch(1, 0, 0, 0, 0, 0)
    policy = memory.TrainedModel("policy", shape, width, stage, world_size, micro, lora=config.model.lora)
    adapter = policy.trained if config.model.lora else 0
    copies = 1 if config.model.lora or not config.needs_reference else 2
    whole = width * (shape.parameters + adapter) if stage == 3 and world_size > 1 else 0
    gradients = 4 * policy.part + width * case["at_once"] if stage == 3 else 0  # ZeRO 3 never frees them
    return policy.optimizer().bytes + gradients + copies * (policy.weights().bytes + whole)


def test_workers_train_as_one(trained, tiny_model, tmp_path):
    one_rank = join(0, 1, *meeting_point(), use_gpu=False)
    learners, truth = {}, {}
    for kind in {tuple(case["kind"]) for case, *_ in trained}:
        algorithm, dtype, adapted, teacher = kind
        case = _case(
            "one", 2 if dtype else 0, tiny_model, LARGE, dtype, ADAPTER if adapted else (), algorithm=algorithm,
            teacher=teacher,
        )  # fmt: skip
        torch.manual_seed(0)
        learners[kind] = Learner(config_from_dict(case["config"]), 4, one_rank)
        truth[kind] = [learners[kind].step(rows_of(algorithm, step), step) for step in (1, 2)]
    alone = learners["grpo", None, False, None]
    for case, world_size, file in trained:
        # Ranks add gradients in another order; in half precision sums are rounded once more.
        absolute, relative = (1e-5, 1e-4) if case["exact"] else (2e-3, 2e-2)
        kind = tuple(case["kind"])
        result = torch.load(file, weights_only=True)
        if case["planned"]:
            held = pytest.approx(case["planned"][world_size], rel=0.01)
            assert result["held"] == held, (case["name"], world_size)
        for one, several in zip(truth[kind], result["metrics"], strict=True):
            for name in one:
                if not name.startswith(("timing_s/", "experience/micro_batches")):
                    expected = pytest.approx(one[name], abs=absolute, rel=relative)
                    assert several[name] == expected, (case["name"], world_size, name)
        for model, engine in trained_models(learners[kind]).items():
            for name, weight in weights(engine):
                torch.testing.assert_close(result["weights"][model + name], weight.detach(), atol=absolute, rtol=0)
    # A sum of two gradients has one order.
    pair = [torch.load(tmp_path / file, weights_only=True) for file in ("float32_0_2.pt", "two_micro_batches_1.pt")]
    assert [[step["experience/micro_batches"] for step in rank["metrics"]] for rank in pair] == [[1, 1], [2, 2]]
    for name, weight in pair[0]["weights"].items():
        assert torch.equal(weight, pair[1]["weights"][name]), name

    def loss_and_norm(metrics):
        return pytest.approx([metrics["actor/final_loss"], metrics["actor/grad_norm"]], abs=1e-5, rel=1e-4)

    following = loss_and_norm(alone.step(rows_of("grpo", 3), 3))
    for saved in ("float32_0", "float32_3"):
        load(alone, tmp_path / saved)
        again = alone.step(rows_of("grpo", 3), 3)
        assert [again["actor/final_loss"], again["actor/grad_norm"]] == following
    resumed = torch.load(tmp_path / "float32_0_4.pt", weights_only=True)["following"]
    assert [resumed["actor/final_loss"], resumed["actor/grad_norm"]] == following


@pytest.mark.parametrize(("attention", "size"), [(ATTENTION, 3), ("sdpa", 2)])
def test_sequences_are_shared_where_heads_can_be(tiny_model, attention, size):
    """The model has two query heads and one key head."""
    lm = load_causal_lm(str(tiny_model), torch.float32)
    lm.set_attn_implementation(attention)
    with raising(TrinityError, key="trainer.ulysses_sequence_parallel_size"):
        install(lm, SequenceGroup(0, size, None))
    with raising(TrinityError, key="trainer.ulysses_sequence_parallel_size"):
        split_sequences(Ranks(0, 3, torch.device("cpu")), 2)


def test_a_rank_does_not_train_on_the_cpu_for_want_of_its_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not uses_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raising(TrinityError, key="cluster.gpu_per_node"):
        uses_gpu()


def test_the_interface_of_an_address_is_known():
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
