"""What a stage writes to its folder, and what of it is there at the end."""

from __future__ import annotations

from trinity_core.config import Config, train_settings
from trinity_core.runtime.outlook.counts import kept_checkpoints
from trinity_core.runtime.outlook.model_shape import ModelShape
from trinity_core.runtime.outlook.need import Need, known

ROW_BYTES = 13
"""Of a token in the experience store: the token, its log-prob and its version, 4 bytes each, and its mask."""


def disk_of(
    config: Config, steps: int, shape: ModelShape, critic: ModelShape | None, weight_bytes: int
) -> tuple[Need, ...]:
    """Bytes below the run's folder at the end of `steps` steps, at most. `weight_bytes` are those of one weight."""
    trains, explores = config.mode in ("both", "train"), config.explores and not config.is_supervised
    needs: list[Need] = []
    if trains:
        kept = kept_checkpoints(config, steps)
        state = checkpoint_bytes(shape.parameters, weight_bytes)
        state += checkpoint_bytes(critic.parameters, weight_bytes) if critic else 0
        models = kept if train_settings(config).save_huggingface == "always" else 1
        model = shape.parameters * weight_bytes
        needs = [
            Need("checkpoints", kept * state, f"{kept} × {state:,} bytes: weights and optimizer state"),
            Need("models", models * model, f"{models} in Hugging Face format × {model:,} bytes"),
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
