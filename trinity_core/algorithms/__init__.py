"""The parts of algorithms as pure functions, found by name. Tensors are `[B, T]` (B sequences, T response positions),
masks bool over action tokens.

To compute a whole batch, call a part: `POLICY_LOSSES["ppo"](logprobs=, old_logprobs=, advantages=, mask=)`. The trainer
uses `Objective`, which splits the same loss into weights (once, from the whole batch) and per-token values (for each
micro-batch), so that any division gives the same sum. A user's module adds parts with the decorators `policy_loss`,
`advantage`, `kl_fn`, `aggregation`, `correction`, and algorithm types with `register_algorithm`.

torch is imported when the first part is called, so that a configuration can be checked without it.
"""

from trinity_core.algorithms import clipv as clipv
from trinity_core.algorithms import covariance as covariance
from trinity_core.algorithms import dppo as dppo
from trinity_core.algorithms import dro as dro
from trinity_core.algorithms import gdpo as gdpo
from trinity_core.algorithms import maxrl as maxrl
from trinity_core.algorithms import opsd as opsd
from trinity_core.algorithms import reinforceplusplus_baseline as reinforceplusplus_baseline
from trinity_core.algorithms import remax as remax
from trinity_core.algorithms.advantages import ADVANTAGES, advantage
from trinity_core.algorithms.aggregation import AGGREGATIONS, aggregation
from trinity_core.algorithms.correction import CORRECTIONS, correction
from trinity_core.algorithms.entropy import ENTROPY_LOSSES, entropy_loss
from trinity_core.algorithms.kl import KL_FNS, KLCoefficient, kl_fn
from trinity_core.algorithms.losses import POLICY_LOSSES, policy_loss
from trinity_core.algorithms.metric_accumulator import MetricAccumulator
from trinity_core.algorithms.objective import Objective
from trinity_core.base.errors import InputError
from trinity_core.config.algorithm_types import ALGORITHMS, AlgorithmType, register_algorithm

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ALGORITHMS",
    "CORRECTIONS",
    "ENTROPY_LOSSES",
    "KL_FNS",
    "POLICY_LOSSES",
    "AlgorithmType",
    "InputError",
    "KLCoefficient",
    "MetricAccumulator",
    "Objective",
    "advantage",
    "aggregation",
    "correction",
    "entropy_loss",
    "kl_fn",
    "policy_loss",
    "register_algorithm",
]
