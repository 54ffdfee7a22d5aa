"""Policy losses, found by name in `POLICY_LOSSES`. Add a new file of losses to the import below."""

from trinity_core.algorithms.losses import ppo, reinforce, supervised  # noqa: F401 - they register their losses
from trinity_core.algorithms.losses.policy_loss import POLICY_LOSSES, PolicyLoss, policy_loss

__all__ = ["POLICY_LOSSES", "PolicyLoss", "policy_loss"]
