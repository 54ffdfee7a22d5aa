"""Advantage, losses, KL terms and corrections of a veRL run."""

from __future__ import annotations

from typing import Any

from trinity_core.config.foreign.run_keys import NOT_CLIPPED, NOT_CORRECTED, bound
from trinity_core.import_verl.draft import Draft

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATORS = {
    "gae": ("ppo", "ppo"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforceplusplus", "reinforceplusplus"),
}
"""veRL's estimator → `algorithm_type`, `advantage_fn`."""
_NEAREST = {"remax": "rloo", "opo": "rloo"}
"""Unsupported estimators → the nearest supported one; `grpo` for all others."""
_LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "reinforce",
}
_BY_SEQUENCE = ("gspo", "gmpo", "sapo")
"""Losses that veRL averages over sequences, whatever `loss_agg_mode` is."""
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}


def write_algorithm(draft: Draft, rollouts: int, interval: int) -> bool:
    """Write the `algorithm` section except the optimizer; return True if a critic is trained.

    `interval` gradient steps learn from the rollouts of one policy.
    """
    key = "algorithm.adv_estimator"
    estimator = str(draft.get(key, "gae"))
    if estimator not in _ESTIMATORS:
        nearest = _NEAREST.get(estimator, "grpo")
        draft.leave(key, f"this advantage is not here: {nearest} was written; choose another, or register your own")
        estimator = nearest
    kind, advantage = _ESTIMATORS[estimator]
    if rollouts < 2 and kind in ("grpo", "rloo"):
        kind, advantage = "reinforceplusplus", "reinforce"
        draft.remark(
            f"{estimator} with one rollout per task has nothing to compare: the advantage is the reward, as in veRL"
        )
    if interval > 1 and advantage in ("ppo", "reinforceplusplus"):
        draft.remark(f"{estimator} whitens advantages over each mini-batch here, in veRL over all {interval} of a step")
    loss = _loss(draft)
    if kind == "grpo" and loss in ("gspo", "gmpo", "cispo", "sapo"):
        kind = loss
    draft.put("algorithm.algorithm_type", kind, "")
    draft.put("algorithm.repeat_times", rollouts, draft.origin("actor_rollout_ref.rollout.n"))
    draft.put("algorithm.advantage_fn", advantage, draft.origin(key))
    _advantage_args(draft, advantage)
    draft.put("algorithm.policy_loss_fn", loss, draft.origin(f"{_ACTOR}.policy_loss.loss_mode"))
    _loss_args(draft, loss)
    _aggregation(draft, loss)
    _divergences(draft)
    entropy = draft.get(f"{_ACTOR}.entropy_coeff", 0)
    draft.put("algorithm.entropy_loss_fn", "default" if entropy else "none", draft.origin(f"{_ACTOR}.entropy_coeff"))
    if entropy:
        draft.put("algorithm.entropy_loss_fn_args.entropy_coef", entropy, f"{_ACTOR}.entropy_coeff")
    _correction(draft, loss, interval)
    return advantage == "ppo"


def _advantage_args(draft: Draft, advantage: str) -> None:
    takes = {"ppo": ("gamma", "lam"), "reinforceplusplus": ("gamma",)}.get(advantage, ())
    for name in ("gamma", "lam"):
        value = draft.get(f"algorithm.{name}")
        if name in takes and value is not None:
            draft.put(f"algorithm.advantage_fn_args.{name}", value, f"algorithm.{name}")
    normalised = draft.get("algorithm.norm_adv_by_std_in_grpo", True)
    if advantage == "grpo" and not normalised:
        draft.put("algorithm.advantage_fn_args.std_normalize", False, "algorithm.norm_adv_by_std_in_grpo")


def _loss(draft: Draft) -> str:
    key = f"{_ACTOR}.policy_loss.loss_mode"
    mode = str(draft.get(key, "vanilla"))
    if draft.get(f"{_ACTOR}.use_gpg_loss", False):
        mode = "gpg"
    if mode not in _LOSSES:
        draft.leave(key, "this loss is not here: ppo was written; choose another, or register your own")
    return _LOSSES.get(mode, "ppo")


def _loss_args(draft: Draft, loss: str) -> None:
    """Write clipping. `clip_ratio` is veRL's default for both sides."""
    both = draft.get(f"{_ACTOR}.clip_ratio", 0.2)
    dual = draft.get(f"{_ACTOR}.clip_ratio_c")
    taus = {name: draft.get(f"{_ACTOR}.{name}") for name in ("tau_pos", "tau_neg")}
    sides = {side: draft.get(f"{_ACTOR}.clip_ratio_{side}") for side in ("low", "high")}
    if loss in ("ppo", "gspo", "gmpo", "cispo"):
        for side, value in sides.items():
            key = f"{_ACTOR}.clip_ratio_{side}" if value is not None else f"{_ACTOR}.clip_ratio"
            draft.put(
                f"algorithm.policy_loss_fn_args.clip_range_{side}", both if value is None else value, draft.origin(key)
            )
    if loss == "ppo" and dual is not None:
        draft.put("algorithm.policy_loss_fn_args.clip_ratio_c", dual, f"{_ACTOR}.clip_ratio_c")
    for name, value in taus.items():
        if loss == "sapo" and value is not None:
            draft.put(f"algorithm.policy_loss_fn_args.{name}", value, f"{_ACTOR}.{name}")


def _aggregation(draft: Draft, loss: str) -> None:
    key = f"{_ACTOR}.loss_agg_mode"
    by_token = draft.get(f"{_ACTOR}.use_token_level_loss", True)
    mode = draft.get(key, "token-mean" if by_token else "seq-mean-token-mean")
    if loss in _BY_SEQUENCE and mode != "seq-mean-token-mean":
        draft.remark(
            f"the loss {loss} is a mean over sequences, as veRL's is whatever loss_agg_mode says; entropy and KL "
            f"losses are such means here, too, in veRL {mode}"
        )
        mode, key = "seq-mean-token-mean", f"{_ACTOR}.policy_loss.loss_mode"
    draft.put("algorithm.loss_agg_mode", mode, draft.origin(key))
    factor = draft.get(f"{_ACTOR}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and factor is not None:
        draft.put("algorithm.loss_agg_mode_args.normalizer", factor, f"{_ACTOR}.loss_scale_factor")


def _divergences(draft: Draft) -> None:
    penalised, kind = draft.get("algorithm.use_kl_in_reward", False), draft.get("algorithm.kl_penalty", "kl")
    control = {name: draft.get(f"algorithm.kl_ctrl.{name}") for name in ("type", "kl_coef", "horizon", "target_kl")}
    on = "algorithm.kl_penalty" if penalised else "algorithm.use_kl_in_reward"
    draft.put(
        "algorithm.kl_penalty_fn",
        _estimator(draft, "algorithm.kl_penalty", kind) if penalised else "none",
        draft.origin(on),
    )
    if penalised:
        args = {"kl_coef": 0.001 if control["kl_coef"] is None else control["kl_coef"]}
        if control["type"] == "adaptive":
            args |= {"adaptive": True, "target_kl": control["target_kl"] or 0.1, "horizon": control["horizon"] or 10000}
        for name, value in args.items():
            draft.put(
                f"algorithm.kl_penalty_fn_args.{name}",
                value,
                f"algorithm.kl_ctrl.{'type' if name == 'adaptive' else name}",
            )
    loss, key = draft.get(f"{_ACTOR}.use_kl_loss", False), f"{_ACTOR}.kl_loss_type"
    kind, coefficient = draft.get(key, "low_var_kl"), draft.get(f"{_ACTOR}.kl_loss_coef", 0.001)
    on = key if loss else f"{_ACTOR}.use_kl_loss"
    draft.put("algorithm.kl_loss_fn", _estimator(draft, key, kind) if loss else "none", draft.origin(on))
    if loss:
        draft.put("algorithm.kl_loss_fn_args.kl_coef", coefficient, draft.origin(f"{_ACTOR}.kl_loss_coef"))


def _estimator(draft: Draft, key: str, name: Any) -> str:
    plain = str(name).removesuffix("+")
    if plain not in _KL or plain != name:
        draft.leave(key, f"this estimator of KL is not here: {_KL.get(plain, 'k1')} was written")
    return _KL.get(plain, "k1")


def _correction(draft: Draft, loss: str, interval: int) -> None:
    """Write the rollout correction. veRL corrects nothing by default, but each mini-batch's ratio is to the sampling
    policy.

    The loss `reinforce` (veRL's gpg) has no ratio.
    """
    section = "algorithm.rollout_correction"
    for name, reason in NOT_CORRECTED.items():
        if draft.get(f"{section}.{name}"):
            draft.leave(f"{section}.{name}", reason.rstrip("."))
    bypass = _bypasses(draft)
    if bypass and draft.get(f"{section}.loss_type", "ppo_clip") != "ppo_clip":
        draft.leave(f"{section}.loss_type", NOT_CLIPPED.rstrip("."))
    new, old = f"{section}.rollout_is", "algorithm.rollout_is_level"
    key, level = draft.first((new, old))
    threshold, cap = draft.first((f"{new}_threshold", "algorithm.rollout_is_threshold"))
    if level is None:
        key = f"{_ACTOR}.tis_imp_ratio_cap"
        cap = draft.get(key, -1)
        level = "token" if isinstance(cap, int | float) and cap > 0 else None
        threshold = key
    if bypass or level not in ("token", "sequence"):
        if loss != "reinforce" and (bypass or interval > 1):
            origin = bypass or f"each of {interval} mini-batches is clipped against the policy that sampled, as in veRL"
            draft.put("algorithm.rollout_correction", "bypass", origin)
        else:
            draft.put("algorithm.rollout_correction", "none", "veRL corrects nothing here")
        return
    low, _, high = str(cap).partition("_")
    if high and level == "token":
        draft.put("algorithm.rollout_correction", "icepop", key)
        draft.put("algorithm.rollout_correction_args.low", bound(low), threshold)
        draft.put("algorithm.rollout_correction_args.high", bound(high), threshold)
        return
    draft.put("algorithm.rollout_correction", f"tis_{level}", key)
    if high:
        draft.leave(threshold, "two bounds are those of single tokens here")
    elif cap is not None:
        draft.put("algorithm.rollout_correction_args.cap", cap, threshold)


def _bypasses(draft: Draft) -> str:
    """Return the key that makes the rollouts' log-probs the old ones, or ""."""
    section = "algorithm.rollout_correction"
    key, asked = draft.first((f"{section}.bypass_mode", f"{section}.bypass_old_logprob_for_rollout"))
    computed = draft.get("async_training.compute_prox_log_prob", False)
    own = draft.get("async_training.use_rollout_log_probs", True)
    if asked is True:
        return key
    is_async = draft.verl.is_fully_async and own and not computed
    return draft.origin("async_training.use_rollout_log_probs") if is_async else ""
