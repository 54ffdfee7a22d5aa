"""Moves the trainer's states between the GPU and the machine's memory, where an engine shares the GPU.

While they are in the machine's memory the trainer cannot compute, but it can save a checkpoint.
"""

from __future__ import annotations

import gc

import torch

from trinity_core.config.schema import Config
from trinity_core.training.engine import FrozenModule, TrainingEngine

CONTEXT_BYTES = 3 << 29
"""Of the GPU, what the trainer's process holds beside its tensors: CUDA's context, libraries and their workspaces."""
HOST = torch.device("cpu")


def fits_beside_engine(config: Config, device: torch.device) -> bool:
    """True if the states that are on the GPU now may stay there while the engine has its share; never on a CPU.

    `kv_cache_gib` in place of a share says nothing of what the engine takes in all: then they may not.
    """
    if device.type != "cuda" or config.explorer.rollout_model.kv_cache_gib is not None:
        return False
    whole = torch.cuda.mem_get_info(device)[1]
    share = config.explorer.rollout_model.gpu_memory_utilization
    return torch.cuda.memory_reserved(device) + CONTEXT_BYTES <= (1 - share) * whole


def offload(engine: TrainingEngine) -> None:
    """Move weights, gradients and optimiser state to the machine's memory. Not under ZeRO 3."""
    if engine.plain:
        _move_state(engine, HOST)
    else:
        engine.deepspeed.offload_states(pin_memory=engine.device.type == "cuda")
        _link(engine)
    engine.module.to(HOST)  # of what is not trained DeepSpeed knows nothing


def reload(engine: TrainingEngine) -> None:
    """Undo `offload`."""
    if engine.plain:
        _move_state(engine, engine.device)
    else:
        engine.deepspeed.reload_states()
        _link(engine)
    engine.module.to(engine.device)


def move(frozen: FrozenModule, to_host: bool) -> None:
    """Move a module that is only evaluated, unless it rests in the machine's memory anyway."""
    frozen.module.to(HOST if to_host else frozen.rests_on)


def free_cached(device: torch.device) -> None:
    """Return to the GPU what torch keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _move_state(engine: TrainingEngine, device: torch.device) -> None:
    for state in engine.optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value):
                state[name] = value.to(device)


def _link(engine: TrainingEngine) -> None:
    """Let parameters find their float32 weights and moments where these are now; checkpoints read them so.

    DeepSpeed 0.19.8 forgets the moments when states move: it links them once, in the first step.
    """
    zero = engine.deepspeed.optimizer
    zero._link_all_hp_params()
    zero._hp_optimizer_states_linked = False
    if engine.optimizer.state:
        zero._lazy_init_hp_params_optimizer_state()
