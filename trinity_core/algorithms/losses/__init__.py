"""Policy losses, found by name in `POLICY_LOSSES`."""

from trinity_core.algorithms.losses import mix, ppo, reinforce, supervised
from trinity_core.algorithms.losses.policy_loss import POLICY_LOSSES, PolicyLoss, policy_loss

__all__ = ["POLICY_LOSSES", "PolicyLoss", "mix", "policy_loss", "ppo", "reinforce", "supervised"]
