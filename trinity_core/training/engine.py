"""One model with its optimiser: backward over micro-batches, then one step. DeepSpeed is used where ZeRO partitions it.

The loss passed to `backward` is one term of a sum over the whole batch; gradients are summed over micro-batches and
ranks (DeepSpeed averages over ranks, so terms are scaled by their number). `step` takes the learning rate.

Where weights and gradients are whole (ZeRO 0 and 1) DeepSpeed is not used: on the host, its hooks on each parameter
take longer than torch's whole backward pass, and a GPU waits for the host (`benchmarks/gpu.py`, part `host`). Each
parameter then has an owner among the ranks, which alone holds its float32 weights and moments: gradients are summed at
the owner once a step, and the owner sends the updated weights to the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trinity_core.base.compiler import require_compiler
from trinity_core.config.schema import Config
from trinity_core.config.training import AT_ONCE_ON_CPU, GPU_CONTEXT, MAX_LIVE, REDUCE_BUCKET
from trinity_core.exchange.pinned import CopyStream, HostBuffer
from trinity_core.training.distributed import Ranks, start_deepspeed
from trinity_core.training.lora import Adapter

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TrainingEngineSettings:
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    """Largest norm of the whole gradient; 0 switches clipping off."""
    zero_stage: int
    """See `config.training.zero_stage_of`: 0 is for float32 and bfloat16, and stands for 1 too."""
    dtype: torch.dtype
    param_offload: bool = False
    optimizer_offload: bool = False


class TrainingEngine:
    """A module whose parameters are updated by AdamW: whole replicas whose parameters have owners, or DeepSpeed's ZeRO.

    All parameters are in one group: with several, DeepSpeed's ZeRO 2 gives access to the first one's state only.
    """

    def __init__(
        self, module: nn.Module, settings: TrainingEngineSettings, ranks: Ranks, adapter: Adapter | None = None
    ) -> None:
        self.ranks = ranks
        self.adapter = adapter
        """The only part that is trained and saved; None: the whole module."""
        self.settings = settings
        self.device = ranks.device
        self.module: Any = module
        self.plain = settings.zero_stage == 0
        """True if each rank has all weights, and the optimiser state of the parameters that it owns; no DeepSpeed."""
        config = deepspeed_config(settings, ranks)
        place(module, settings, config, ranks)
        trained = [p for p in module.parameters() if p.requires_grad]
        if self.plain:
            broadcast(module, ranks)
        self._host = HostBuffer()
        self._fixed: list[Tensor] | None = None
        """Copies of what is never trained, once it has been moved."""
        self._owners = dict(zip(trained, owners_of([p.numel() for p in trained], ranks.world_size), strict=True))
        """Rank that updates each trained parameter, if `plain`."""
        mastered = [p for p in trained if not self.plain or self._owners[p] == ranks.rank]
        self.masters = {p: _master(p) if self.plain else p for p in mastered}
        """The tensor that this rank's optimiser updates for a parameter: its float32 weights if `plain`, else the
        parameter itself."""
        self._sums = _sum_in_float32(trained) if self.plain else {}
        """Gradients of half-precision parameters, summed over micro-batches."""
        self.optimizer: Any = torch.optim.AdamW(
            [{"params": [*self.masters.values()]}],  # a rank may own nothing
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.copies = CopyStream(ranks.device)
        """Copies weights and optimiser state during the next step's passes; operations that change or move them
        wait."""
        self._forward: Any = module
        if self.plain:
            return
        self.deepspeed = self._forward = start_deepspeed(ranks).initialize(
            model=module,
            optimizer=self.optimizer,
            config=config,
            dist_init_required=False,
        )[0]
        if settings.zero_stage == 3:
            _update_in_place(self.deepspeed.optimizer)

    def __call__(self, *args: Any) -> Any:
        """The module's forward; under DeepSpeed it gathers partitioned parameters."""
        return self._forward(*args)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss; `last` is true for the last one before `step`. Collective."""
        if self.plain:
            loss.backward()
            return
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self.ranks.world_size)

    def step(self, lr: float) -> Tensor:
        """Update the weights; return the norm of the whole gradient before clipping, on the device. Collective.

        If `plain`, a gradient that is not finite leaves weights and optimiser unchanged; the returned norm shows it.
        The device itself decides, as in mixed precision (`found_inf`), so that the host need not wait.
        """
        self.copies.hold_device()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not self.plain:
            self.deepspeed.step()
            norm = self.deepspeed.get_global_grad_norm()
            return torch.as_tensor(0.0 if norm is None else norm, device=self.device)
        self._reduce_gradients()
        norm = self._gradient_norm()
        if self.settings.grad_clip:
            masters = self.masters.values()
            torch.nn.utils.clip_grads_with_norm_(masters, self.settings.grad_clip, norm, foreach=True)
        self.optimizer.found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._send_weights()
        return norm

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        """Sum the gradients over the ranks into `grad` of the owners' masters, and free all others. Collective.

        A parameter that had no part in the loss gets a zero gradient: another rank's may have one, and Adam decays it.
        """
        for owner, parameters in enumerate(self._by_owner()):
            gradients = []
            for p in parameters:
                gradient = p.grad if p.dtype == torch.float32 else self._sums.pop(p, None)
                gradients.append(torch.zeros_like(p, dtype=torch.float32) if gradient is None else gradient)
                p.grad = None
            if self.ranks.world_size > 1:
                _in_buckets(gradients, partial(torch.distributed.reduce, dst=owner), owner, self.ranks)
            if owner == self.ranks.rank:
                for p, gradient in zip(parameters, gradients, strict=True):
                    self.masters[p].grad = gradient

    def _gradient_norm(self) -> Tensor:
        """Return the norm over all ranks' gradients, with the bits of a single rank that has them all. Collective."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        local_norms = iter(torch._foreach_norm(gradients) if gradients else ())
        zero = torch.zeros((), device=self.device)
        norms = torch.stack(
            [next(local_norms) if owner == self.ranks.rank else zero for owner in self._owners.values()]
        )
        if self.ranks.world_size > 1:
            torch.distributed.all_reduce(norms)
        return torch.linalg.vector_norm(norms)

    @torch.no_grad()
    def _send_weights(self) -> None:
        """Copy the masters to the weights of every rank. Collective."""
        if self.settings.dtype != torch.float32 and self.masters:
            torch._foreach_copy_([*self.masters], [*self.masters.values()])
        if self.ranks.world_size > 1:
            for owner, parameters in enumerate(self._by_owner()):
                weights = [p.data for p in parameters]
                _in_buckets(weights, partial(torch.distributed.broadcast, src=owner), None, self.ranks)

    def _by_owner(self) -> list[list[nn.Parameter]]:
        ranks = range(self.ranks.world_size)
        return [[p for p, owner in self._owners.items() if owner == rank] for rank in ranks]

    def offload(self) -> None:
        """Move weights, gradients and optimiser state to host memory. Not under ZeRO 3.

        An offloaded engine cannot compute, but its checkpoint can be saved.
        """
        self.copies.hold_device()
        if not self.plain:
            self.deepspeed.offload_states(pin_memory=False)  # torch would round each pinned tensor up to a power of two
            self._link()
        elif self.device.type == "cuda":
            self._take_to_host()
        self.module.to(HOST)  # also what is not trained

    def reload(self) -> None:
        if self.plain:
            for tensor, put in self._state():
                put(tensor.to(self.device, non_blocking=True))
        else:
            self.deepspeed.reload_states()
            self._link()
        self.module.to(self.device)

    def _state(self) -> list[tuple[Tensor, Callable[[Tensor], None]]]:
        """Return trained weights, their masters and the optimiser's state, each with what puts another in its place."""
        weights = {**dict.fromkeys(self._owners), **dict.fromkeys(self.masters.values())}
        return [
            *((weight.data, partial(setattr, weight, "data")) for weight in weights),
            *(
                (value, partial(state.__setitem__, name))
                for state in self.optimizer.state.values()
                for name, value in state.items()
                if torch.is_tensor(value)
            ),
        ]

    def _take_to_host(self) -> None:
        """Copy the state to the host's buffer. What is never trained is copied once: it does not change."""
        state = self._state()
        for (_, put), copy in zip(state, self._host.copies([tensor for tensor, _ in state]), strict=True):
            put(copy)
        fixed = [p for p in self.module.parameters() if not p.requires_grad and type(p) is nn.Parameter]
        if self._fixed is None:
            self._fixed = HostBuffer().copies([p.data for p in fixed])
        for p, copy in zip(fixed, self._fixed, strict=True):
            p.data = copy

    def _link(self) -> None:
        """Relink parameters to their float32 weights and moments after a move; checkpoints read these links.

        DeepSpeed 0.19.8 loses the moments when states move: it links them once, in the first step.
        """
        zero = self.deepspeed.optimizer
        zero._link_all_hp_params()
        zero._hp_optimizer_states_linked = False
        if self.optimizer.state:
            zero._lazy_init_hp_params_optimizer_state()


class FrozenModule:
    """A module that is only evaluated: whole on every rank, or partitioned under ZeRO 3."""

    def __init__(self, module: nn.Module, settings: TrainingEngineSettings, ranks: Ranks) -> None:
        self.module = module.eval().requires_grad_(False)
        self._device = ranks.device
        self.rests_on = torch.device("cpu") if settings.param_offload and settings.zero_stage < 3 else ranks.device
        self._forward: Any = self.module
        if settings.zero_stage < 3:
            if settings.zero_stage:
                _cast(module, settings.dtype)
            if ranks.world_size > 1:  # only rank 0 has read the weights
                self.module.to(self._device)
                broadcast(self.module, ranks)
            self.module.to(self.rests_on)
            return
        config = deepspeed_config(settings, ranks)
        place(module, settings, config, ranks)
        self._forward = start_deepspeed(ranks).initialize(model=module, config=config, dist_init_required=False)[0]

    def move(self, to_host: bool) -> None:
        """Move the module to host memory when an engine needs the GPU, or back to `rests_on`."""
        self.module.to(HOST if to_host else self.rests_on)

    @contextmanager
    def on_device(self) -> Iterator[Callable[..., Any]]:
        """A context that yields the forward with the weights on the device; with `param_offload` they are in host
        memory otherwise."""
        self.module.to(self._device)
        try:
            yield self._forward
        finally:
            self.module.to(self.rests_on)


class BaseAlone:
    """A policy without its adapter: the reference model, at no memory cost. Same interface as `FrozenModule`."""

    def __init__(self, engine: TrainingEngine) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._engine = engine
        self._layers = [module for module in engine.module.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def on_device(self) -> Iterator[Callable[..., Any]]:
        """A context that yields the base model's forward; the adapter is disabled in it."""
        self._switch(False)
        try:
            yield self._engine
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(on)


def broadcast(module: nn.Module, ranks: Ranks) -> None:
    """Send rank 0's parameters to every rank; only rank 0 has read them. Collective."""
    if ranks.world_size > 1:
        for p in module.parameters():
            torch.distributed.broadcast(p.data, 0)


def _master(p: nn.Parameter) -> nn.Parameter:
    """Return a parameter's float32 copy; the parameter itself if float32."""
    return p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())


def _sum_in_float32(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return a dict to which gradients of half-precision parameters are added, in float32, as they arrive."""
    sums: dict[nn.Parameter, Tensor] = {}

    def add(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter) and p.grad is not None
        sums[p] = sums[p].add_(p.grad) if p in sums else p.grad.float()
        p.grad = None

    for p in parameters:
        if p.dtype != torch.float32:
            p.register_post_accumulate_grad_hook(add)
    return sums


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each of several tensors of these sizes: the largest first, each where least is."""
    owned = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners


def _in_buckets(
    tensors: Sequence[Tensor], collective: Callable[[Tensor], Any], receiver: int | None, ranks: Ranks
) -> None:
    """Apply a collective to the tensors in place, many at a time; None: every rank receives its result."""
    for bucket in _buckets(tensors, REDUCE_BUCKET if ranks.device.type == "cuda" else AT_ONCE_ON_CPU):
        flat = _flatten_dense_tensors(bucket)
        collective(flat)
        if receiver is None or receiver == ranks.rank:
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of at most `limit` elements; a larger tensor is alone."""
    bucket: list[Tensor] = []
    room = limit
    for tensor in tensors:
        if bucket and tensor.numel() > room:
            yield bucket
            bucket, room = [], limit
        bucket.append(tensor)
        room -= tensor.numel()
    if bucket:
        yield bucket


def _update_in_place(zero: Any) -> None:
    """Make the optimiser of ZeRO 3 update the float32 weights in place.

    DeepSpeed 0.19.8 intends to, but keeps a copy: it compares a tensor's device with the name of one.
    """
    groups = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    for updated, weights in groups:
        if (updated.dtype, updated.device) == (weights.dtype, weights.device):
            updated.data = weights.data


def place(module: nn.Module, settings: TrainingEngineSettings, config: dict[str, Any], ranks: Ranks) -> None:
    """Move a module to its device; under ZeRO 3 tensor by tensor, so that a device never holds more than its part."""
    if settings.zero_stage == 3:
        _cast(module, settings.dtype)
        start_deepspeed(ranks).zero.Init(module=module, config_dict_or_path=config, dtype=settings.dtype)
    module.to(ranks.device)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters that were read in another dtype, such as ERNIE 4.5's router in float32. Below ZeRO 3 DeepSpeed
    does so."""
    for p in module.parameters():
        p.data = p.data.to(dtype) if p.is_floating_point() else p.data


def deepspeed_config(settings: TrainingEngineSettings, ranks: Ranks) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Batch sizes are placeholders: `micro.py` plans micro-batches."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if ranks.device.type == "cuda":
        zero |= {"reduce_bucket_size": REDUCE_BUCKET, "stage3_max_live_parameters": MAX_LIVE}
    else:
        bounded = ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")
        zero |= dict.fromkeys(bounded, AT_ONCE_ON_CPU)
    if settings.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.param_offload and settings.zero_stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": ranks.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings.dtype == torch.bfloat16},
        "fp16": {"enabled": settings.dtype == torch.float16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }


def compile_layers(lm: nn.Module, compiles: bool | None, packing: bool, device: torch.device) -> None:
    """Compile each decoder layer of `lm` at its first use, if `compiles`; None: on a GPU, where rows are packed.

    All layers share one compilation, for micro-batches of any size. Raises `TrinityError` without a C++ compiler on the
    CPU; Triton says what it lacks on a GPU.
    """
    if compiles is None:
        compiles = device.type == "cuda" and packing
    elif compiles and device.type == "cpu":
        require_compiler("trainer.torch_compile is true", "leave torch_compile out")
    for layer in decoder_layers(lm) if compiles else []:
        layer.compile(dynamic=True)


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformers model, as named by its `_no_split_modules`."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


@contextmanager
def beginning_on(device: torch.device, lm: nn.Module) -> Iterator[None]:
    """A context in which `lm` has only its first two layers, on `device`, which may have no room for the others.

    A model without a list of layers is left where it is.
    """
    names = {type(layer) for layer in decoder_layers(lm)}
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList) and len(module)]
    stacks = [layers for layers in lists if {type(layer) for layer in layers} <= names]
    others = [(stack, list(stack)[2:]) for stack in stacks]
    try:
        for stack, _ in others:
            del stack[2:]
        if others:
            lm.to(device)
        yield
    finally:
        lm.to(HOST)
        for stack, rest in others:
            stack.extend(rest)


def uncompiled() -> AbstractContextManager[Any]:
    """A context for passes over a row or two, which would otherwise trigger a separate compilation."""
    return torch.compiler.set_stance("force_eager")


def fits_beside_engine(config: Config, device: torch.device) -> bool:
    """True if the states now on the GPU may stay there while the engine has its share; never on a CPU.

    False with `kv_cache_gib` instead of a share, which does not bound the engine's total memory.
    """
    if device.type != "cuda" or config.explorer.rollout_model.kv_cache_gib is not None:
        return False
    whole = torch.cuda.mem_get_info(device)[1]
    share = config.explorer.rollout_model.gpu_memory_utilization
    return torch.cuda.memory_reserved(device) + GPU_CONTEXT <= (1 - share) * whole


def free_cached(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
