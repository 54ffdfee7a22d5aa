"""Advantages of a stored group. The store has none: they are computed as the trainer would, or it is said why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.config import AlgorithmConfig
from trinity_core.data.experience import Experience
from trinity_core.errors import InputError

if TYPE_CHECKING:
    from trinity_core.algorithms.objective import Objective

PARTS = ("algorithm_type", "advantage_fn", "advantage_fn_args", "kl_penalty_fn", "kl_penalty_fn_args")
"""Keys of the algorithm section that advantages follow from."""


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of the rollouts of a group, or None, and a sentence on where they come from, or why there are none."""

    values: Sequence[np.ndarray] | None
    """float32 [T] for each experience."""
    note: str


def group_advantages(experiences: Sequence[Experience], algorithm: Mapping[str, Any] | None) -> GroupAdvantages:
    """The advantages that the trainer's own function gives this group.

    None where it needs what the store does not hold (a critic's values, a reference model), or where the other groups
    of the batch have a part in them.
    """
    from trinity_core.algorithms.objective import Objective

    if algorithm is None:
        return GroupAdvantages(None, "Advantages: the run's folder does not say which algorithm; give --config.")
    name = algorithm.get("advantage_fn")
    if name in (None, "none"):
        return GroupAdvantages(None, f"Advantages: {algorithm.get('algorithm_type')} has none.")
    try:
        objective = Objective(AlgorithmConfig(**{key: algorithm[key] for key in PARTS if key in algorithm}))
        values = _computed(objective, experiences)
        beside_another = _computed(objective, [*experiences, *map(_another, experiences)])[: len(values)]
    except InputError as error:
        return GroupAdvantages(None, f"Advantages: '{name}' cannot be computed here: {error}")
    if not all(np.allclose(one, other, atol=1e-6) for one, other in zip(values, beside_another, strict=True)):
        return GroupAdvantages(None, f"Advantages: '{name}' depends on the whole batch, which is not kept together.")
    return GroupAdvantages(values, f"Advantages: computed by '{name}' from the rewards stored, as the trainer does.")


def _another(experience: Experience) -> Experience:
    """A row of a group with other rewards."""
    reward = None if experience.reward is None else 3.0 * experience.reward + 1.0 + experience.run
    return replace(experience, group=f"{experience.group} beside", reward=reward)


def _computed(objective: Objective, experiences: Sequence[Experience]) -> list[np.ndarray]:
    import torch

    from trinity_core.training.batch import make_batch
    from trinity_core.training.update import prepare

    prepared, _ = prepare(objective, make_batch(experiences, torch.device("cpu")), None, None, None)
    rows = prepared.advantages.float().numpy()
    return [row[: each.response_length] for row, each in zip(rows, experiences, strict=True)]
