"""Advantage, losses, KL terms and corrections of a veRL run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.foreign.run_keys import correction
from trinity_core.config.import_verl.draft import Draft
from trinity_core.config.import_verl.keys import ACTOR, CORRECTION, ROLLOUT

_SAME = ("grpo", "rloo", "remax")
_ESTIMATORS = {
    **{name: name for name in _SAME},
    **{f"{name}_vectorized": name for name in _SAME},
    "gae": "ppo",
    "reinforce_plus_plus": "reinforceplusplus",
    "reinforce_plus_plus_baseline": "reinforceplusplus_baseline",
    "opo": "rloo",
}
"""veRL's estimator → `algorithm_type` and `advantage_fn`."""
_LOSSES = {
    "vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "gpg": "reinforce",
    "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
_POLICY_LOSS = f"{ACTOR}.policy_loss"
_MODE = f"{_POLICY_LOSS}.loss_mode"
_BY_COVARIANCE = ("clip_cov", "kl_cov")
"""Losses that treat tokens of high covariance apart; here GRPO's advantages of the same name choose these tokens."""
_BY_SEQUENCE = ("gspo", "gmpo", "sapo")
"""Losses that veRL averages over sequences, whatever `loss_agg_mode` is."""
_ARGUMENTS = (
    ("algorithm.gamma", "advantage_fn_args.gamma", ("ppo", "reinforceplusplus")),
    ("algorithm.lam", "advantage_fn_args.lam", ("ppo",)),
    (f"{_POLICY_LOSS}.clip_cov_ratio", "advantage_fn_args.share", ("clip_cov",)),
    (f"{_POLICY_LOSS}.clip_cov_lb", "advantage_fn_args.cov_low", ("clip_cov",)),
    (f"{_POLICY_LOSS}.clip_cov_ub", "advantage_fn_args.cov_high", ("clip_cov",)),
    (f"{_POLICY_LOSS}.kl_cov_ratio", "advantage_fn_args.share", ("kl_cov",)),
    (f"{_POLICY_LOSS}.ppo_kl_coef", "policy_loss_fn_args.kl_coef", ("loss kl_cov",)),
    (f"{ACTOR}.clip_ratio_c", "policy_loss_fn_args.clip_ratio_c", ("loss ppo",)),
    (f"{ACTOR}.tau_pos", "policy_loss_fn_args.tau_pos", ("loss sapo",)),
    (f"{ACTOR}.tau_neg", "policy_loss_fn_args.tau_neg", ("loss sapo",)),
    (f"{ACTOR}.loss_scale_factor", "loss_agg_mode_args.normalizer", ("mean seq-mean-token-sum-norm",)),
)
"""veRL's key, the argument here, and the advantages (or losses, or means) that take it."""
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_CONTROL: Mapping[str, Any] = {"kl_coef": 0.001, "target_kl": 0.1, "horizon": 10000}
"""Arguments of the KL penalty, in veRL's section `algorithm.kl_ctrl`, and veRL's defaults."""


def write_algorithm(draft: Draft, rollouts: int, interval: int) -> bool:
    """Write the `algorithm` section except the optimizer; return True if a critic is trained.

    `interval` gradient steps learn from the rollouts of one policy.
    """
    key = "algorithm.adv_estimator"
    estimator = str(draft.get(key, "gae"))
    kind = advantage = _ESTIMATORS.get(estimator, "grpo")
    if estimator not in _ESTIMATORS or estimator == "opo":
        draft.leave(key, f"this advantage is not imported: {kind} was written; choose another, or register your own")
    if rollouts < 2 and kind == "reinforceplusplus_baseline":
        kind = advantage = "reinforceplusplus"
    if rollouts < 2 and kind in ("grpo", "rloo"):
        kind, advantage = "reinforceplusplus", "reinforce"
        draft.remark(f"{estimator} with one rollout per task compares nothing: the advantage is the reward, as in veRL")
    if interval > 1 and advantage in ("ppo", "reinforceplusplus", "reinforceplusplus_baseline"):
        draft.remark(f"{estimator} whitens advantages over each mini-batch here, in veRL over all {interval} of a step")
    by_std, mode = draft.get("algorithm.norm_adv_by_std_in_grpo", True), str(draft.get(_MODE, "vanilla"))
    by_covariance = mode in _BY_COVARIANCE and advantage == "grpo" and by_std
    if by_covariance:
        kind = advantage = mode
    elif draft.get(f"{ACTOR}.use_gpg_loss", False):
        mode = "gpg"
    if mode not in _LOSSES and not by_covariance:
        draft.leave(_MODE, "this loss is not imported: ppo was written; choose another, or register your own")
    loss = "kl_cov" if advantage == "kl_cov" else _LOSSES.get(mode, "ppo")
    has_type = kind == "grpo" and loss in (*_BY_SEQUENCE, "cispo", "dppo")
    draft.put("algorithm.algorithm_type", loss if has_type else kind, "")
    draft.put("algorithm.repeat_times", rollouts, f"{ROLLOUT}.n")
    draft.put("algorithm.advantage_fn", advantage, _MODE if by_covariance else key)
    if not by_std and advantage == "grpo":
        draft.put("algorithm.advantage_fn_args.std_normalize", False, "algorithm.norm_adv_by_std_in_grpo")
    draft.put("algorithm.policy_loss_fn", loss, _MODE)
    _clip(draft, loss)
    mean = _aggregation(draft, loss)
    for name, argument, takers in _ARGUMENTS:
        value = draft.get(name)
        if value is not None and {advantage, f"loss {loss}", f"mean {mean}"} & set(takers):
            draft.put(f"algorithm.{argument}", value, name)
    _divergences(draft)
    entropy = draft.get(f"{ACTOR}.entropy_coeff", 0)
    draft.put("algorithm.entropy_loss_fn", "default" if entropy else "none", f"{ACTOR}.entropy_coeff")
    if entropy:
        draft.put("algorithm.entropy_loss_fn_args.entropy_coef", entropy, f"{ACTOR}.entropy_coeff")
    _correction(draft, loss, interval)
    return advantage == "ppo"


def _clip(draft: Draft, loss: str) -> None:
    """Write the clip; `clip_ratio` is veRL's default for both sides."""
    args, limit = "algorithm.policy_loss_fn_args", "delta" if loss == "dppo" else "clip_range"
    draft.used.add(f"{ACTOR}.clip_ratio")
    for side in ("low", "high"):
        key, value = draft.first((f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio"))
        if loss in ("ppo", "gspo", "gmpo", "cispo", "dppo"):
            default = f"{ACTOR}.clip_ratio"
            draft.put(f"{args}.{limit}_{side}", 0.2 if value is None else value, default if value is None else key)
    if loss == "dppo":
        draft.put(f"{args}.divergence", str(draft.get(_MODE)).removeprefix("dppo_"), _MODE)


def _aggregation(draft: Draft, loss: str) -> str:
    key = f"{ACTOR}.loss_agg_mode"
    by_token = draft.get(f"{ACTOR}.use_token_level_loss", True)
    mode = str(draft.get(key, "token-mean" if by_token else "seq-mean-token-mean"))
    if loss in _BY_SEQUENCE and mode != "seq-mean-token-mean":
        draft.remark(f"the loss {loss} is a mean over sequences, as veRL's is whatever loss_agg_mode says; entropy and "
                     f"KL losses are such means here, too, in veRL {mode}")  # fmt: skip
        mode = "seq-mean-token-mean"
    draft.put("algorithm.loss_agg_mode", mode, key)
    return mode


def _divergences(draft: Draft) -> None:
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    penalised, lost = draft.get(in_reward, False), draft.get(in_loss, False)
    for name, on, switch, key, usual in (
        ("kl_penalty_fn", penalised, in_reward, "algorithm.kl_penalty", "kl"),
        ("kl_loss_fn", lost, in_loss, f"{ACTOR}.kl_loss_type", "low_var_kl"),
    ):
        estimator = str(draft.get(key, usual))
        nearest = _KL.get(estimator.removesuffix("+"), "k1")
        if on and estimator not in _KL:
            draft.leave(key, f"this estimator of KL is not here: {nearest} was written")
        draft.put(f"algorithm.{name}", nearest if on else "none", key if on else switch)
    kind, section = draft.get("algorithm.kl_ctrl.type"), "algorithm.kl_penalty_fn_args"
    if penalised and kind == "adaptive":
        draft.put(f"{section}.adaptive", True, "algorithm.kl_ctrl.type")
    for name, usual in _CONTROL.items():
        value = draft.get(f"algorithm.kl_ctrl.{name}", usual)
        if penalised and (name == "kl_coef" or kind == "adaptive"):
            draft.put(f"{section}.{name}", value, f"algorithm.kl_ctrl.{name}")
    weight = draft.get(f"{ACTOR}.kl_loss_coef", 0.001)
    if lost:
        draft.put("algorithm.kl_loss_fn_args.kl_coef", weight, f"{ACTOR}.kl_loss_coef")


def _correction(draft: Draft, loss: str, interval: int) -> None:
    """Write the rollout correction. veRL corrects nothing by default, but each mini-batch's ratio is to the sampling
    policy. The loss `reinforce` (veRL's gpg) has no ratio."""
    bypass = _bypasses(draft)
    if bypass and draft.get(f"{CORRECTION}.loss_type", "ppo_clip") != "ppo_clip":
        for name in ("loss_type", "rollout_is", "rollout_is_threshold"):
            if draft.get(f"{CORRECTION}.{name}") is not None:
                draft.leave(f"{CORRECTION}.{name}", "a loss without a clip is a policy_loss_fn of its own")
    key, threshold = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    level, cap = draft.get(key), draft.get(threshold)
    if level is None:
        threshold = key = f"{ACTOR}.tis_imp_ratio_cap"
        cap = draft.get(key, -1)
        level = "token" if isinstance(cap, int | float) and cap > 0 else None
    if bypass or level not in ("token", "sequence"):
        clipped = loss != "reinforce" and (bypass or interval > 1)
        origin = f"the policy that sampled each of {interval} mini-batches" if clipped else "veRL corrects nothing here"
        draft.put(CORRECTION, "bypass" if clipped else "none", bypass or origin)
        return
    settings = correction({"rollout_is": level, "rollout_is_threshold": cap})
    if not isinstance(settings, Mapping):
        draft.leave(threshold, "two bounds are those of single tokens here")
        settings = {CORRECTION: f"tis_{level}"}
    for native, value in settings.items():
        draft.put(native.removeprefix("/"), value, threshold if "_args" in native else key)


def _bypasses(draft: Draft) -> str:
    """Return the key that makes the rollouts' log-probs the old ones, or ""."""
    asked, key = f"{CORRECTION}.bypass_mode", "async_training.use_rollout_log_probs"
    computed = draft.get("async_training.compute_prox_log_prob", False)
    if draft.get(asked) is True:
        return asked
    return key if draft.get(key, True) and draft.verl.is_fully_async and not computed else ""
