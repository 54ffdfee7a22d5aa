"""Algorithm types name parts that exist."""

import dataclasses
from pathlib import Path

import pytest

from trinity_core.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    CORRECTIONS,
    ENTROPY_LOSSES,
    KL_FNS,
    POLICY_LOSSES,
    Objective,
    register_algorithm,
)
from trinity_core.config.algorithm_types import effective_args, uses_reference

DOCUMENTS = (
    "sft", "grpo", "ppo", "opmd", "dpo", "mix", "rloo", "reinforceplusplus", "dr_grpo", "dapo", "gspo", "gmpo", "cispo",
    "sapo", "topr", "sppo", "asymre", "raft", "mix_chord", "rec", "on_policy_distill", "multi_step_grpo", "gigpo",
)  # fmt: skip


def test_documented_algorithms_exist():
    assert set(DOCUMENTS) <= set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_parts_exist_and_flags_agree(name):
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    assert algorithm.advantage_fn in {*ADVANTAGES, "none"}
    assert algorithm.policy_loss_fn in POLICY_LOSSES
    assert algorithm.kl_penalty_fn in KL_FNS
    assert algorithm.kl_loss_fn in KL_FNS
    assert algorithm.entropy_loss_fn in ENTROPY_LOSSES
    assert algorithm.loss_agg_mode in AGGREGATIONS
    assert algorithm.rollout_correction in CORRECTIONS
    objective = Objective(algorithm)
    assert objective.needs_reference == algorithm.needs_reference
    assert algorithm.needs_reference == uses_reference(
        algorithm.advantage_fn,
        algorithm.policy_loss_fn,
        algorithm.policy_loss_fn_args,
        algorithm.kl_penalty_fn,
        algorithm.kl_penalty_fn_args,
        algorithm.kl_loss_fn,
        algorithm.kl_loss_fn_args,
    )
    assert algorithm.default_repeat_times >= algorithm.min_repeat_times >= 1
    assert algorithm.uses_rollouts == (name not in ("sft", "cpt", "dpo"))


def test_arguments_extend_defaults_of_the_same_part_only():
    assert effective_args("ppo", {"a": 1, "b": 2}, None, {"b": 3}) == {"a": 1, "b": 3}
    assert effective_args("ppo", {"a": 1, "b": 2}, "ppo", None) == {"a": 1, "b": 2}
    assert effective_args("ppo", {"a": 1, "b": 2}, "gspo", {"b": 3}) == {"b": 3}


def test_zero_kl_coef_needs_no_reference_unless_adaptive():
    assert not uses_reference("grpo", "ppo", {}, "none", {}, "k2", {"kl_coef": 0.0})
    assert uses_reference("grpo", "ppo", {}, "none", {}, "k2", {"kl_coef": 0.0, "adaptive": True})
    assert uses_reference("grpo", "ppo", {}, "none", {}, "k2", {})
    assert uses_reference("none", "dpo", {}, "none", {}, "none", {})


def test_a_name_stands_for_one_type():
    register_algorithm(ALGORITHMS["grpo"])
    with pytest.raises(ValueError):
        register_algorithm(dataclasses.replace(ALGORITHMS["grpo"], kl_loss_fn="k1"))


def test_the_documentation_names_every_part():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    registries = (ALGORITHMS, ADVANTAGES, POLICY_LOSSES, KL_FNS, AGGREGATIONS, ENTROPY_LOSSES, CORRECTIONS)
    assert [name for registry in registries for name in registry if f"`{name}`" not in page] == []
