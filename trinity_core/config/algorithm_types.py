"""The values of `algorithm_type`: named sets of defaults for parts that YAML can replace individually.

Nothing here computes; the parts themselves (advantages, losses, KL, entropy, aggregation) are in
`trinity_core.algorithms`, registered under the names used here. A variant lists only its differences from its parent.
Arguments given in YAML are merged into the defaults. No torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trinity_core.base.registry import Registry, registry_of

Args = Mapping[str, Any]


@dataclass(frozen=True)
class AlgorithmType:
    """Defaults of one algorithm. Every name refers to a registry in `trinity_core.algorithms`."""

    name: str
    advantage_fn: str = "none"
    """Key of `ADVANTAGES`; `none` if the loss uses no advantage."""
    advantage_fn_args: Args = field(default_factory=dict)
    policy_loss_fn: str = "ppo"
    """Key of `POLICY_LOSSES`."""
    policy_loss_fn_args: Args = field(default_factory=dict)
    kl_penalty_fn: str = "none"
    """Key of `KL_FNS`: divergence from the reference, subtracted from the token rewards."""
    kl_penalty_fn_args: Args = field(default_factory=dict)
    kl_loss_fn: str = "none"
    """Key of `KL_FNS`: divergence from the reference, added to the loss."""
    kl_loss_fn_args: Args = field(default_factory=dict)
    entropy_loss_fn: str = "none"
    """Key of `ENTROPY_LOSSES`."""
    entropy_loss_fn_args: Args = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    """Key of `AGGREGATIONS`: how per-token losses become one number."""
    loss_agg_mode_args: Args = field(default_factory=dict)
    sample_strategy: str = "default"
    """How the trainer draws a batch from the experience store."""
    sample_strategy_args: Args = field(default_factory=dict)
    needs_reference: bool = False
    """True if the defaults use a reference model; `uses_reference` decides for a run."""
    min_repeat_times: int = 1
    """Minimum number of rollouts per task with which the algorithm can learn."""
    default_repeat_times: int = 1
    uses_rollouts: bool = True
    """False for algorithms that train on given data (SFT, DPO) without an explorer."""
    rollout_correction: str = "none"
    """Key of `CORRECTIONS`: how the gap between rollout and trainer log-probs is corrected."""
    rollout_correction_args: Args = field(default_factory=dict)


PARTS = tuple(part.name.removesuffix("_args") for part in fields(AlgorithmType) if part.name.endswith("_args"))
"""Keys of `algorithm` that name a part; its arguments are under `<key>_args`."""


def effective_args(default_name: str, default_args: Args, name: str | None, args: Args | None) -> dict[str, Any]:
    """Return the arguments of a part: the user's merged into the defaults, or only the user's if the part was
    replaced. A `clip_range` replaces the default ranges of both sides."""
    args, usual = args or {}, default_args if name in (None, default_name) else {}
    if args.get("clip_range") is not None:
        usual = {key: value for key, value in usual.items() if key not in ("clip_range_low", "clip_range_high")}
    return {**usual, **args}


def uses_reference(
    advantage_fn: str, policy_loss_fn: str, policy_loss_fn_args: Args, kl_penalty_fn: str, kl_penalty_fn_args: Args,
    kl_loss_fn: str, kl_loss_fn_args: Args,
) -> bool:  # fmt: skip
    """True if these parts need a reference model: it is the teacher, an advantage or a loss takes its log-probs, or a
    KL term has a coefficient other than a fixed 0."""
    if policy_loss_fn_args.get("teacher") == "reference":
        return True
    terms = ((kl_penalty_fn, kl_penalty_fn_args), (kl_loss_fn, kl_loss_fn_args))
    compared = {"algorithm.advantage_fn": advantage_fn, "algorithm.policy_loss_fn": policy_loss_fn}
    return any(registry_of(key).uses(name, "ref_logprobs") for key, name in compared.items()) or any(
        name != "none" and bool(args.get("adaptive") or args.get("kl_coef", DEFAULT_KL["kl_coef"]))
        for name, args in terms
    )


DEFAULT_KL: Args = {"kl_coef": 0.001, "adaptive": False}
NO_KL: dict[str, Any] = {"kl_loss_fn": "none", "kl_loss_fn_args": {}, "needs_reference": False}
NO_ENTROPY: dict[str, Any] = {"entropy_loss_fn": "none", "entropy_loss_fn_args": {}}
OFF_POLICY: dict[str, Any] = {"rollout_correction": "none"}
"""For losses that handle staleness themselves, or tolerate it by design: a correction would count the gap twice."""

GRPO = AlgorithmType(
    name="grpo",
    advantage_fn="grpo",
    advantage_fn_args={"epsilon": 1e-6},
    policy_loss_fn="ppo",
    policy_loss_fn_args={"clip_range": 0.2, "clip_ratio_c": 3.0},
    kl_loss_fn="k2",
    kl_loss_fn_args=DEFAULT_KL,
    entropy_loss_fn="default",
    entropy_loss_fn_args={"entropy_coef": 0.0},
    needs_reference=True,
    min_repeat_times=2,
    default_repeat_times=8,
    rollout_correction="tis_token",
)
MULTI_STEP_GRPO = replace(GRPO, name="multi_step_grpo", advantage_fn="step_wise_grpo")
GIGPO = replace(
    GRPO,
    name="gigpo",
    advantage_fn="gigpo",
    advantage_fn_args={"gamma": 0.95, "step_weight": 1.0, "epsilon": 1e-6},
)
PPO = replace(
    GRPO,
    name="ppo",
    advantage_fn="ppo",
    advantage_fn_args={"gamma": 1.0, "lam": 1.0},
    min_repeat_times=1,
    default_repeat_times=1,
)
SFT = AlgorithmType(name="sft", policy_loss_fn="sft", uses_rollouts=False)
CPT = replace(SFT, name="cpt")
DPO = replace(
    SFT,
    name="dpo",
    policy_loss_fn="dpo",
    policy_loss_fn_args={"beta": 0.1, "label_smoothing": 0.0},
    needs_reference=True,
    min_repeat_times=2,
    default_repeat_times=2,
)
OPMD = replace(
    GRPO,
    name="opmd",
    advantage_fn="opmd",
    advantage_fn_args={"opmd_baseline": "mean", "tau": 1.0},
    policy_loss_fn="opmd",
    policy_loss_fn_args={"tau": 1.0},
)
MIX = replace(
    GRPO,
    name="mix",
    policy_loss_fn="mix",
    policy_loss_fn_args={"mu": 0.1, "clip_range": 0.2, "clip_ratio_c": 3.0},
    entropy_loss_fn="mix",
    sample_strategy="mix",
    sample_strategy_args={"expert_data_ratio": 0.5},
    **NO_KL,
)
MIX_CHORD = replace(
    MIX,
    name="mix_chord",
    policy_loss_fn="mix_chord",
    policy_loss_fn_args={
        "mu_warmup_steps": 0,
        "mu_decay_steps": 0,
        "mu_peak": 0.1,
        "mu_valley": 0.1,
        "enable_phi_function": True,
        "clip_range": 0.2,
        "clip_ratio_c": 3.0,
    },
)
RLOO = replace(GRPO, name="rloo", advantage_fn="rloo", advantage_fn_args={})
REINFORCE_PLUS_PLUS = replace(
    GRPO,
    name="reinforceplusplus",
    advantage_fn="reinforceplusplus",
    advantage_fn_args={"gamma": 1.0},
    kl_penalty_fn="k1",
    kl_penalty_fn_args=DEFAULT_KL,
    kl_loss_fn="none",
    kl_loss_fn_args={},
    min_repeat_times=1,
    default_repeat_times=1,
)
DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    advantage_fn_args={"std_normalize": False},
    loss_agg_mode="seq-mean-token-sum-norm",
    **NO_KL,
)
DAPO = replace(
    GRPO,
    name="dapo",
    advantage_fn_args={"epsilon": 1e-6, "std_threshold": 0.0},
    policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 10.0},
    **NO_KL,
)
GSPO = replace(
    GRPO,
    name="gspo",
    policy_loss_fn="gspo",
    policy_loss_fn_args={"clip_range_low": 0.0003, "clip_range_high": 0.0004},
    loss_agg_mode="seq-mean-token-mean",
    **NO_KL,
)
GMPO = replace(
    GSPO,
    name="gmpo",
    policy_loss_fn="gmpo",
    policy_loss_fn_args={"clip_range": 0.4},
)
CISPO = replace(
    GRPO,
    name="cispo",
    policy_loss_fn="cispo",
    policy_loss_fn_args={"clip_range_low": 1.0, "clip_range_high": 0.28},
    **NO_KL,
)
SAPO = replace(
    GRPO,
    name="sapo",
    policy_loss_fn="sapo",
    policy_loss_fn_args={"tau_pos": 1.0, "tau_neg": 1.05},
    loss_agg_mode="seq-mean-token-mean",
    **NO_KL,
)
TOPR = replace(
    GRPO,
    name="topr",
    advantage_fn="reinforce",
    advantage_fn_args={"baseline": 0.0},
    policy_loss_fn="topr",
    policy_loss_fn_args={"advantage_threshold": 0.0},
    **NO_KL | NO_ENTROPY | OFF_POLICY,
)
SPPO = replace(
    GRPO,
    name="sppo",
    advantage_fn="opmd",
    advantage_fn_args=OPMD.advantage_fn_args,
    policy_loss_fn="sppo",
    policy_loss_fn_args={"epsilon": 0.3},
    **NO_KL | NO_ENTROPY | OFF_POLICY,
)
ASYMRE = replace(
    GRPO,
    name="asymre",
    advantage_fn="asymre",
    advantage_fn_args={"baseline_shift": -0.1},
    policy_loss_fn="opmd",
    policy_loss_fn_args={"tau": 0.0},
    **NO_KL | NO_ENTROPY | OFF_POLICY,
)
REC = replace(
    GRPO,
    name="rec",
    advantage_fn="rec",
    advantage_fn_args={"std_normalize": False},
    policy_loss_fn="rec",
    policy_loss_fn_args={"clip_mode": "none", "weight": "none", "epsilon_low": 0.2, "epsilon_high": 0.2},
    **NO_KL | NO_ENTROPY | OFF_POLICY,
)
RAFT = replace(
    GRPO,
    name="raft",
    advantage_fn="raft",
    advantage_fn_args={"selection": "best"},
    policy_loss_fn="sft_weighted",
    policy_loss_fn_args={},
    **NO_KL | NO_ENTROPY | OFF_POLICY,
)
ON_POLICY_DISTILL = replace(
    GRPO,
    name="on_policy_distill",
    advantage_fn="on_policy_distill",
    advantage_fn_args={"kl_coef": 1.0},
    min_repeat_times=1,
    **NO_KL | NO_ENTROPY,
)
JSD = replace(ON_POLICY_DISTILL, name="jsd", advantage_fn="jsd", advantage_fn_args={"kl_coef": 1.0, "lambda_coef": 0.5})
OPSD = replace(ON_POLICY_DISTILL, name="opsd")
SDPO = replace(OPSD, name="sdpo", min_repeat_times=2)
SCALE_RL = replace(
    CISPO,
    name="scale_rl",
    advantage_fn_args={"epsilon": 1e-6, "std_cal_level": "advantages"},
    policy_loss_fn_args={"clip_range_low": 1.0, "clip_range_high": 3.0},
    rollout_correction="bypass",
)
M2PO = replace(
    GRPO,
    name="m2po",
    advantage_fn="m2po",
    advantage_fn_args={"m2_threshold": 0.04},
    policy_loss_fn="importance_sampling",
    policy_loss_fn_args={},
    rollout_correction="bypass",
    **NO_KL,
)

ALGORITHMS: Registry[AlgorithmType] = Registry("algorithm type", functions=lambda _: ())
"""Every `algorithm_type` by name. Modules of `trinity_core.algorithms` and plugins add theirs with
`register_algorithm`; `registry_of("algorithm.algorithm_type")` includes all built-in ones."""


def register_algorithm(algorithm: AlgorithmType) -> AlgorithmType:
    """Add an algorithm type, usually `dataclasses.replace(ALGORITHMS["grpo"], name=..., ...)`.

    Raises ValueError if the name is taken by a different definition.
    """
    if ALGORITHMS.setdefault(algorithm.name, algorithm) != algorithm:
        raise ValueError(f"algorithm_type '{algorithm.name}' is registered twice with different definitions")
    return algorithm


for _algorithm in (
    SFT, CPT, PPO, GRPO, OPMD, DPO, MIX, RLOO, REINFORCE_PLUS_PLUS, DR_GRPO, DAPO, GSPO, GMPO, CISPO, SAPO, TOPR, SPPO,
    ASYMRE, RAFT, MIX_CHORD, REC, ON_POLICY_DISTILL, JSD, OPSD, SDPO, SCALE_RL, M2PO, MULTI_STEP_GRPO, GIGPO,
):  # fmt: skip
    register_algorithm(_algorithm)
