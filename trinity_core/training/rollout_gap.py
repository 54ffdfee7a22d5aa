"""The rollout gap of a run's first step: engine and trainer have the same weights there, so it must be small."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trinity_core.config.engine_args import is_lossy
from trinity_core.config.schema import Config
from trinity_core.errors import TrinityError

LIMITS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.1, "fp8": 0.3}
"""Mean |log pi - log mu| of a token, in nats, by the coarser number format of engine and trainer. Kernels that round
otherwise differ by 1e-5 in float32, 0.01 in bfloat16; a wrong temperature, chat template or tensor by 0.3 and more."""


def check_first_gap(metrics: Mapping[str, float], config: Config, on_gpu: bool) -> None:
    """Raise TrinityError if the mean gap of step 1 is not plausible (`algorithm.max_rollout_gap`)."""
    gap = metrics.get("rollout_gap/mean")
    if gap is None or metrics.get("staleness/max") != 0.0:  # rows may also say no version
        return
    limit = config.algorithm.max_rollout_gap or LIMITS[_coarser(config, on_gpu)]
    if not gap <= limit or math.isnan(gap):
        raise TrinityError(
            f"algorithm.max_rollout_gap: in step 1 the log-probs of engine and trainer differ by {gap:.3g} nats a "
            f"token in the mean; with the same weights at most {limit:g} is plausible. Look at what changes them in "
            "the engine alone: extra_engine_args, sampling arguments, log-probs that a workflow gives. Set a larger "
            "algorithm.max_rollout_gap if the gap is meant."
        )


def _coarser(config: Config, on_gpu: bool) -> str:
    engine = config.explorer.rollout_model
    if is_lossy(engine.extra_engine_args):
        return "fp8"
    default = "bfloat16" if on_gpu else "float32"
    asked = (default if engine.dtype == "auto" else engine.dtype, config.trainer.dtype or default)
    return max(asked, key=lambda dtype: LIMITS[dtype])
