"""What a stage writes to its folder, and what of it is there at the end."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_core.config import Config, train_settings
from trinity_core.runtime.outlook.counts import kept_checkpoints
from trinity_core.runtime.outlook.model_shape import ModelShape
from trinity_core.runtime.outlook.need import Need, known, size

ROW_BYTES = 13
"""Of a token in the experience store: the token, its log-prob and its version, 4 bytes each, and its mask."""


def disk_of(config: Config, steps: int, trained: Sequence[ModelShape], weight_bytes: int) -> tuple[Need, ...]:
    """Bytes below the run's folder at the end of `steps` steps, at most.

    `trained` are the policy and, if there is one, the critic; empty where nothing is trained. `weight_bytes` are those
    of one weight.
    """
    explores = config.explores and not config.is_supervised
    needs: list[Need] = []
    if trained:
        kept = kept_checkpoints(config, steps)
        state = sum(checkpoint_bytes(each.parameters, weight_bytes) for each in trained)
        models = kept if train_settings(config).save_huggingface == "always" else 1
        model = trained[0].parameters * weight_bytes
        needs = [
            Need("checkpoints", kept * state, f"{kept} × {size(state)}: weights and optimizer state"),
            Need("models", models * model, f"{models} in Hugging Face format × {size(model)}"),
        ]
    if explores:
        rows = steps * config.buffer.batch_size * config.algorithm.repeat_times
        needs.append(
            Need(
                "experiences",
                rows * config.model.max_model_len * ROW_BYTES,
                f"{rows:,} rollouts × {config.model.max_model_len:,} tokens × {ROW_BYTES} bytes",
            )
        )
    return known(needs)


def checkpoint_bytes(parameters: int, weight_bytes: int) -> int:
    """One model in a checkpoint: its weights, Adam's two moments, and in half precision the float32 weights."""
    master = 0 if weight_bytes == 4 else 4
    return parameters * (weight_bytes + 8 + master)
