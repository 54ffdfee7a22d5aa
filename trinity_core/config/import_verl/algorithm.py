"""Advantage, losses, KL terms and corrections of a veRL run."""

from __future__ import annotations

from trinity_core.config.foreign.run_keys import NOT_CORRECTED, bound
from trinity_core.config.import_verl.draft import NOT_HERE, Draft
from trinity_core.config.import_verl.keys import ACTOR, ROLLOUT

_ESTIMATORS = {
    "gae": ("ppo", "ppo"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforceplusplus", "reinforceplusplus"),
    "reinforce_plus_plus_baseline": ("reinforceplusplus_baseline", "reinforceplusplus_baseline"),
    "remax": ("remax", "remax"),
}
"""veRL's estimator → `algorithm_type`, `advantage_fn`."""
_NEAREST = {"opo": "rloo"}
"""Unsupported estimators → the nearest supported one; `grpo` for all others."""
_LOSSES = {
    "vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "gpg": "reinforce",
    "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
_MODE = f"{ACTOR}.policy_loss.loss_mode"
_CLIP_COV = {"clip_cov_ratio": "share", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"}
"""veRL's keys of the loss `clip_cov` → arguments of the advantage of this name."""
_BY_SEQUENCE = ("gspo", "gmpo", "sapo")
"""Losses that veRL averages over sequences, whatever `loss_agg_mode` is."""
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_CORRECTION = "algorithm.rollout_correction"


def write_algorithm(draft: Draft, rollouts: int, interval: int) -> bool:
    """Write the `algorithm` section except the optimizer; return True if a critic is trained.

    `interval` gradient steps learn from the rollouts of one policy.
    """
    key = "algorithm.adv_estimator"
    estimator = str(draft.get(key, "gae"))
    if estimator not in _ESTIMATORS:
        nearest = _NEAREST.get(estimator, "grpo")
        draft.leave(key, f"this advantage is not imported: {nearest} was written; choose another, or register your own")
        estimator = nearest
    kind, advantage = _ESTIMATORS[estimator]
    if rollouts < 2 and kind == "reinforceplusplus_baseline":
        kind = advantage = "reinforceplusplus"
    if rollouts < 2 and kind in ("grpo", "rloo"):
        kind, advantage = "reinforceplusplus", "reinforce"
        draft.remark(f"{estimator} with one rollout per task compares nothing: the advantage is the reward, as in veRL")
    if interval > 1 and advantage in ("ppo", "reinforceplusplus", "reinforceplusplus_baseline"):
        draft.remark(f"{estimator} whitens advantages over each mini-batch here, in veRL over all {interval} of a step")
    by_std = draft.get("algorithm.norm_adv_by_std_in_grpo", True)
    if draft.get(_MODE) == "clip_cov" and advantage == "grpo" and by_std:
        kind = advantage = "clip_cov"
    loss = "ppo" if advantage == "clip_cov" else _loss(draft)
    own = (*_BY_SEQUENCE, "cispo", "dppo")
    draft.put("algorithm.algorithm_type", loss if kind == "grpo" and loss in own else kind, "")
    draft.put("algorithm.repeat_times", rollouts, f"{ROLLOUT}.n")
    draft.put("algorithm.advantage_fn", advantage, _MODE if advantage == "clip_cov" else key)
    for name, argument in _CLIP_COV.items():
        if (value := draft.get(f"{ACTOR}.policy_loss.{name}")) is not None and advantage == "clip_cov":
            draft.put(f"algorithm.advantage_fn_args.{argument}", value, f"{ACTOR}.policy_loss.{name}")
    for name, takers in (("gamma", ("ppo", "reinforceplusplus")), ("lam", ("ppo",))):
        if (value := draft.get(f"algorithm.{name}")) is not None and advantage in takers:
            draft.put(f"algorithm.advantage_fn_args.{name}", value, f"algorithm.{name}")
    if not by_std and advantage == "grpo":
        draft.put("algorithm.advantage_fn_args.std_normalize", False, "algorithm.norm_adv_by_std_in_grpo")
    draft.put("algorithm.policy_loss_fn", loss, _MODE)
    _loss_args(draft, loss)
    _divergences(draft)
    entropy = draft.get(f"{ACTOR}.entropy_coeff", 0)
    draft.put("algorithm.entropy_loss_fn", "default" if entropy else "none", f"{ACTOR}.entropy_coeff")
    if entropy:
        draft.put("algorithm.entropy_loss_fn_args.entropy_coef", entropy, f"{ACTOR}.entropy_coeff")
    _correction(draft, loss, interval)
    return advantage == "ppo"


def _loss(draft: Draft) -> str:
    mode = "gpg" if draft.get(f"{ACTOR}.use_gpg_loss", False) else str(draft.get(_MODE, "vanilla"))
    if mode not in _LOSSES:
        draft.leave(_MODE, "this loss is not imported: ppo was written; choose another, or register your own")
    return _LOSSES.get(mode, "ppo")


def _loss_args(draft: Draft, loss: str) -> None:
    """Write clipping and aggregation. `clip_ratio` is veRL's default for both sides."""
    both, args = draft.get(f"{ACTOR}.clip_ratio", 0.2), "algorithm.policy_loss_fn_args"
    for side in ("low", "high"):
        key, value = draft.first((f"{ACTOR}.clip_ratio_{side}",))
        if loss in ("ppo", "gspo", "gmpo", "cispo", "dppo"):
            own, limit = value is not None, "delta" if loss == "dppo" else "clip_range"
            draft.put(f"{args}.{limit}_{side}", value if own else both, key if own else f"{ACTOR}.clip_ratio")
    if loss == "dppo":
        draft.put(f"{args}.divergence", str(draft.get(_MODE)).removeprefix("dppo_"), _MODE)
    for name, takers in (("clip_ratio_c", "ppo"), ("tau_pos", "sapo"), ("tau_neg", "sapo")):
        if (value := draft.get(f"{ACTOR}.{name}")) is not None and loss == takers:
            draft.put(f"{args}.{name}", value, f"{ACTOR}.{name}")
    key = f"{ACTOR}.loss_agg_mode"
    by_token = draft.get(f"{ACTOR}.use_token_level_loss", True)
    mode = draft.get(key, "token-mean" if by_token else "seq-mean-token-mean")
    if loss in _BY_SEQUENCE and mode != "seq-mean-token-mean":
        draft.remark(f"the loss {loss} is a mean over sequences, as veRL's is whatever loss_agg_mode says; entropy and "
                     f"KL losses are such means here, too, in veRL {mode}")  # fmt: skip
        mode = "seq-mean-token-mean"
    draft.put("algorithm.loss_agg_mode", mode, key)
    factor = draft.get(f"{ACTOR}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and factor is not None:
        draft.put("algorithm.loss_agg_mode_args.normalizer", factor, f"{ACTOR}.loss_scale_factor")


def _divergences(draft: Draft) -> None:
    in_reward, in_loss, control = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss", "algorithm.kl_ctrl"
    penalised, lost = draft.get(in_reward, False), draft.get(in_loss, False)
    coefficient, how = draft.get(f"{control}.kl_coef", 0.001), draft.get(f"{control}.type", "")
    target, horizon = draft.get(f"{control}.target_kl", 0.1), draft.get(f"{control}.horizon", 10000)
    for name, on, switch, key, usual in (
        ("kl_penalty_fn", penalised, in_reward, "algorithm.kl_penalty", "kl"),
        ("kl_loss_fn", lost, in_loss, f"{ACTOR}.kl_loss_type", "low_var_kl"),
    ):
        estimator = draft.get(key, usual)
        if on and str(estimator) not in _KL:
            nearest = _KL.get(str(estimator).removesuffix("+"), "k1")
            draft.leave(key, f"this estimator of KL is not here: {nearest} was written")
        written = _KL.get(str(estimator).removesuffix("+"), "k1") if on else "none"
        draft.put(f"algorithm.{name}", written, key if on else switch)
    if penalised:
        args = {"kl_coef": coefficient}
        if how == "adaptive":
            args |= {"adaptive": True, "target_kl": target or 0.1, "horizon": horizon or 10000}
        for name, value in args.items():
            origin = f"{control}.{'type' if name == 'adaptive' else name}"
            draft.put(f"algorithm.kl_penalty_fn_args.{name}", value, origin)
    weight = draft.get(f"{ACTOR}.kl_loss_coef", 0.001)
    if lost:
        draft.put("algorithm.kl_loss_fn_args.kl_coef", weight, f"{ACTOR}.kl_loss_coef")


def _correction(draft: Draft, loss: str, interval: int) -> None:
    """Write the rollout correction. veRL corrects nothing by default, but each mini-batch's ratio is to the sampling
    policy. The loss `reinforce` (veRL's gpg) has no ratio."""
    for name in NOT_CORRECTED:
        if draft.get(f"{_CORRECTION}.{name}"):
            draft.leave(f"{_CORRECTION}.{name}", NOT_HERE)
    bypass = _bypasses(draft)
    if bypass and draft.get(f"{_CORRECTION}.loss_type", "ppo_clip") != "ppo_clip":
        draft.leave(f"{_CORRECTION}.loss_type", "a loss without a clip is a policy_loss_fn of its own")
    key, level = draft.first((f"{_CORRECTION}.rollout_is", "algorithm.rollout_is_level"))
    threshold, cap = draft.first((f"{_CORRECTION}.rollout_is_threshold", "algorithm.rollout_is_threshold"))
    if level is None:
        threshold = key = f"{ACTOR}.tis_imp_ratio_cap"
        cap = draft.get(key, -1)
        level = "token" if isinstance(cap, int | float) and cap > 0 else None
    if bypass or level not in ("token", "sequence"):
        clipped = loss != "reinforce" and (bypass or interval > 1)
        origin = f"the policy that sampled each of {interval} mini-batches" if clipped else "veRL corrects nothing here"
        draft.put(_CORRECTION, "bypass" if clipped else "none", bypass or origin)
        return
    low, _, high = str(cap).partition("_")
    if high and level == "token":
        draft.put(_CORRECTION, "icepop", key)
        draft.put(f"{_CORRECTION}_args.low", bound(low), threshold)
        draft.put(f"{_CORRECTION}_args.high", bound(high), threshold)
        return
    draft.put(_CORRECTION, f"tis_{level}", key)
    if high:
        draft.leave(threshold, "two bounds are those of single tokens here")
    elif cap is not None:
        draft.put(f"{_CORRECTION}_args.cap", cap, threshold)


def _bypasses(draft: Draft) -> str:
    """Return the key that makes the rollouts' log-probs the old ones, or ""."""
    key, asked = draft.first((f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.bypass_old_logprob_for_rollout"))
    computed = draft.get("async_training.compute_prox_log_prob", False)
    own = draft.get("async_training.use_rollout_log_probs", True)
    if asked is True:
        return key
    return "async_training.use_rollout_log_probs" if draft.verl.is_fully_async and own and not computed else ""
