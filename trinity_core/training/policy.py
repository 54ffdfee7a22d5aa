"""The policy and the value model: a Hugging Face causal LM that returns log-probs or values, never all logits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.functional import linear, log_softmax, nll_loss

from trinity_core.algorithms.clipv import expected_signals
from trinity_core.algorithms.divergence import Taught, divergence_from_teacher
from trinity_core.algorithms.logprobs import Head, token_logprobs_and_entropy
from trinity_core.algorithms.objective import EntropyUse
from trinity_core.base.errors import TrinityError
from trinity_core.base.lazy import OWN_ATTENTION
from trinity_core.data.experience import Experience
from trinity_core.training.batching import LARGEST_MASK
from trinity_core.training.distributed import SequenceGroup
from trinity_core.training.micro import Micro, build_micro
from trinity_core.training.packing import ATTENTION, Packed, attention
from trinity_core.training.sequence_parallel import share_of, whole

log = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 24
"""Largest K * V for which logits are computed at once (64 MB in float32); beyond it, and by kernels, in slices of the
vocabulary."""
FAST_PATH_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Largest difference of a log-prob (nats) between a fast path and the plain computation, by dtype; scaled by their
standard deviation if that is below 1, as in an untrained model."""
SAMPLE_WIDTH = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class FastPaths:
    """The faster computations that leave this model's output unchanged, as found by `find_fast_paths`."""

    packing: bool
    """True if attention is plain causal attention, so that rows may share prompts."""
    own_head: bool
    """True if logits are the output embedding applied to the last hidden state, so that the head can be computed
    here."""
    by_length: bool = False
    """True if a kernel takes packed sequences by their lengths, so that attention needs no mask."""
    head_scale: float = 1.0
    """Factor on the logits, as in Cohere and Granite."""
    head_kernels: bool = False
    """True if the head is computed by the kernels of `algorithms/head_kernels.py`, on CUDA."""

    @property
    def largest_mask(self) -> int | None:
        """Mask elements beyond which rows do not share prompts; None if there is no mask."""
        return None if self.by_length else LARGEST_MASK


class Backbone(nn.Module):
    """The causal LM without its head, shared by policy and value model."""

    def __init__(self, lm: Any, fast_paths: FastPaths, sequence: SequenceGroup | None = None) -> None:
        """`sequence`: ranks that compute each pass together (`sequence_parallel.py`)."""
        super().__init__()
        self.lm: Any = lm
        self.fast_paths = fast_paths
        self.sequence = sequence
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module. The LM's modules stay in evaluation mode, except layers that recompute their
        activations and an adapter's dropout (supervised training only).

        Log-probs are compared with those of engines, the reference and earlier passes, so nothing may be random: in
        training mode some models add noise to the input of routers (Mixtral) or sample the experts (Phi-MoE).
        """
        super().train(mode)
        for part in self.lm.modules():
            drops = isinstance(part, nn.Dropout) and part.p > 0
            part.training = mode and (drops or getattr(part, "gradient_checkpointing", False))
        return self

    def hidden(self, micro: Micro) -> Tensor:
        """[K, H]: the states that predict the loss-carrying tokens."""
        inputs = micro.inputs
        if isinstance(inputs, Packed):
            inputs = inputs if self.fast_paths.by_length else inputs.masked(self.lm.dtype)
            out = decoder(self.lm)(inputs.tokens, position_ids=inputs.positions, packed=inputs, use_cache=False)
        else:
            out = decoder(self.lm)(inputs.tokens, attention_mask=inputs.present, use_cache=False)
        return out.last_hidden_state.flatten(0, 1).index_select(0, micro.source)


def decoder(lm: Any) -> Any:
    """The causal LM without its head. Llama 4's text model names another prefix than its own decoder's."""
    return lm.model if lm.base_model is lm else lm.base_model


class Policy(Backbone):
    def forward(
        self,
        micro: Micro,
        temperature: float,
        entropy_use: EntropyUse,
        more: Taught | Literal["signals", "states"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies, float32 [K] each, at the rows' own temperatures.

        `more`: `Taught` adds the divergences from the teacher, "signals" the `expected_signals`. "states" returns
        instead what `Taught` needs of a reference model: its states and its head.

        `temperature` is the default for rows without one. Entropies carry a gradient only if they are for the loss; if
        nobody uses them they are 0 and cost nothing.
        """
        if more == "states":
            return self._states(micro)
        if self.sequence is not None:
            part, indices = share_of(micro, self.sequence)
            values = self._values(part, temperature, entropy_use, more)
            return tuple(whole(value, indices, len(micro.targets), self.sequence) for value in values)
        return self._values(micro, temperature, entropy_use, more)

    def _states(self, micro: Micro) -> tuple[Tensor, ...]:
        """Return the states [K, H] and the head's weight, and bias if it has one, as tensors that stay when the module
        moves to the host. Under ZeRO 3 they are copies from before the pass, after which parameters are partitioned
        again."""
        head = self.lm.get_output_embeddings()
        parameters = [p for p in (head.weight, head.bias) if p is not None]
        constants = [p.clone() if hasattr(p, "ds_id") else p.detach() for p in parameters]
        return self.hidden(micro), *constants

    def _values(
        self, micro: Micro, temperature: float, entropy_use: EntropyUse,
        more: Taught | Literal["signals", "states"] | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        temperatures = _temperatures(micro, temperature)
        if not self.fast_paths.own_head:
            return self._through_the_model(micro, temperatures, entropy_use)
        temperatures = temperatures / self.fast_paths.head_scale
        hidden = self.hidden(micro)
        head = self.lm.get_output_embeddings()
        kernels = self.fast_paths.head_kernels
        if kernels or len(hidden) * len(head.weight) > LOGITS_AT_ONCE:
            logprobs, entropy = token_logprobs_and_entropy(
                hidden, head.weight, micro.targets, temperatures, head.bias,
                with_entropy=entropy_use != "none", kernels=kernels,
            )  # fmt: skip
            entropy = entropy if entropy_use == "loss" else entropy.detach()
        else:
            logits = linear(hidden, head.weight, head.bias)
            logprobs, entropy = _logprobs(logits, micro.targets, temperatures, entropy_use)
        if isinstance(more, Taught):
            return logprobs, entropy, self._divergences(hidden, temperatures, micro, more)
        if more == "signals":
            return logprobs, entropy, expected_signals(hidden, Head(head.weight, head.bias), temperatures)
        return logprobs, entropy

    def _divergences(self, hidden: Tensor, temperatures: float | Tensor, micro: Micro, taught: Taught) -> Tensor:
        teacher_hidden = taught.hidden
        if teacher_hidden is None:
            with torch.no_grad():
                teacher_hidden = self.hidden(micro.for_teacher)
        embedding = self.lm.get_output_embeddings()  # after the pass, which under ZeRO 3 partitions tied weights again
        head = Head(embedding.weight, embedding.bias)
        return divergence_from_teacher(hidden, head, teacher_hidden, taught.head or head, taught.beta, temperatures)

    def _through_the_model(
        self, micro: Micro, temperature: float | Tensor, entropy_use: EntropyUse
    ) -> tuple[Tensor, Tensor]:
        assert not isinstance(micro.inputs, Packed)
        logits = self.lm(micro.inputs.tokens, attention_mask=micro.inputs.present, use_cache=False).logits
        return _logprobs(logits.flatten(0, 1).index_select(0, micro.source), micro.targets, temperature, entropy_use)


class ValueModel(Backbone):
    """Computes the expected return at each state: a linear head on the last hidden state, initialised to zero."""

    def __init__(
        self, lm: Any, fast_paths: FastPaths, hidden_size: int, dtype: torch.dtype,
        sequence: SequenceGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lm, fast_paths, sequence)
        self.value_head = nn.Linear(hidden_size, 1, bias=True, dtype=dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: Micro) -> Tensor:
        """float32 [K]: the value of the state in which each token was chosen."""
        if self.sequence is not None:
            part, indices = share_of(micro, self.sequence)
            return whole(self._values(part), indices, len(micro.targets), self.sequence)
        return self._values(micro)

    def _values(self, micro: Micro) -> Tensor:
        values: Tensor = self.value_head(self.hidden(micro)).squeeze(-1).float()
        return values


def _temperatures(micro: Micro, default: float) -> float | Tensor:
    """Return one temperature, or float32 [K]."""
    temperatures = micro.temperature
    if isinstance(temperatures, Tensor):
        return temperatures.nan_to_num(default)
    return default if temperatures is None else temperatures


def _logprobs(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, entropy_use: EntropyUse
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    logprobs = log_softmax(logits, -1)
    of_targets = -nll_loss(logprobs, targets, reduction="none")
    if entropy_use == "none":
        return of_targets, torch.zeros_like(of_targets)
    if entropy_use == "metric":
        logprobs = logprobs.detach()
    return of_targets, -(logprobs.exp() * logprobs).sum(-1)


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    reads: bool = True,
    quantized: Mapping[str, Any] | None = None,
) -> Any:
    """Load a Hugging Face causal LM from a folder or the hub, in evaluation mode; `overrides` change its configuration.

    If `reads` is false, weights are not read and are undefined; untouched memory takes no space. `quantized` are
    transformers' arguments for weights in 4 bits (`lora.in_4_bits`).

    Dropout is removed; see `without_dropout`. With `max_model_len`, rotary frequencies are fixed for sequences of that
    length; see `fix_rotary_frequencies`. Raises TrinityError if `path` holds no model, or none that transformers can
    load with these settings.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    AttentionInterface.register(ATTENTION, attention)
    if Path(path).exists() and not (Path(path) / "config.json").exists():
        raise TrinityError(
            f"model.model_path {path} has no config.json; give a Hugging Face model folder", key="model.model_path"
        )
    common: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, **OWN_ATTENTION}
    try:
        if reads:
            lm = AutoModelForCausalLM.from_pretrained(path, **common, **(quantized or {}), **(overrides or {}))
            freeze_as_defined(lm)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **(overrides or {}))
            with no_init_weights():
                lm = AutoModelForCausalLM.from_config(config, **common)
            lm.tie_weights()
    except (OSError, ValueError, ImportError) as error:  # no such model, an unknown or untrusted one, a missing package
        if "trust_remote_code" in str(error):  # part of transformers' own error message
            raise TrinityError(
                f"model.model_path {path} needs code of its own; read that code, and set model.trust_remote_code to "
                "true to let it run",
                key="model.trust_remote_code",
            ) from error
        raise TrinityError(
            f"model.model_path {path} cannot be loaded: {_first_line(error)}", key="model.model_path"
        ) from error
    if max_model_len is not None:
        fix_rotary_frequencies(lm, max_model_len)
    without_dropout(lm)
    if quantized:  # checkpoints hold an adapter, and it is merged into a model in half precision
        vars(lm.config_as_given).pop("quantization_config", None)
    return lm.eval()


def _unsupported() -> tuple[type[Exception], ...]:
    """Return what torch, and Triton where it is installed, raise for what this GPU or model does not support."""
    errors: tuple[type[Exception], ...] = (RuntimeError, TypeError, ImportError)
    if find_spec("triton") is None:
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError, CalledProcessError)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def freeze_as_defined(lm: Any) -> None:
    """Freeze the parameters that the model's class does not train, such as the bias of ERNIE 4.5's router: transformers
    makes all parameters it reads trainable, and AdamW would decay them."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        defined = type(lm)(lm.config)
    for name, p in defined.named_parameters():
        if not p.requires_grad:
            lm.get_parameter(name).requires_grad_(False)


def fix_rotary_frequencies(lm: Any, max_model_len: int) -> None:
    """Set the rotary frequencies of `lm` once, by `max_model_len`, as vLLM does.

    Transformers chooses those of `longrope` (Phi-3, Phi-4) and `dynamic` in each forward pass, by the longest position:
    the log-probs of a row would depend on the other rows of its micro-batch. vLLM's `dynamic` frequencies are those of
    sequences within `max_position_embeddings` and undefined beyond. Raises TrinityError for a larger `max_model_len`,
    and for `longrope` in a model's own code.
    """
    config = lm.config.get_text_config()
    kinds = _rope_types(config)
    long = [module for module in lm.modules() if vars(module).get("rope_type") == "longrope"]
    if "dynamic" in kinds and max_model_len > config.max_position_embeddings:
        raise TrinityError(
            f"model.max_model_len is {max_model_len}, but {config.model_type} has rotary embeddings of type 'dynamic' "
            f"for {config.max_position_embeddings} positions; beyond, they vary with the micro-batch, unlike the "
            f"engine's; set max_model_len to at most {config.max_position_embeddings}, or choose another rope_type",
            key="model.max_model_len",
        )
    if "longrope" in kinds and not long:
        raise TrinityError(
            f"the code of {config.model_type} chooses its 'longrope' frequencies for each micro-batch, so that "
            "log-probs would depend on the micro-batch; set model.trust_remote_code to false to use transformers' code",
            key="model.trust_remote_code",
        )
    weight = next(lm.parameters())
    for module in long:
        module(weight.new_zeros(1), torch.tensor([[max_model_len - 1]], device=weight.device))
        module.rope_type = "default"  # transformers does not change the frequencies of this type


def _rope_types(config: Any) -> set[str]:
    """Return the types of a model's rotary embeddings: one, one for each kind of layer, or none."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return {part["rope_type"] for part in (settings, *nested) if "rope_type" in part}


def without_dropout(lm: Any) -> Any:
    """Set every dropout probability of `lm` to 0, in its configuration and its modules.

    `lm.config_as_given` is the original configuration, which checkpoints get. Layers that recompute their activations
    stay in training mode; see `Backbone.train`.
    """
    lm.config_as_given = copy.deepcopy(lm.config)
    for part in (*_configs(lm.config), *lm.modules()):
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return lm


def _configs(config: Any) -> Iterator[Any]:
    """Yield a model's configuration and those nested in it."""
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def find_fast_paths(lm: Any) -> FastPaths:
    """Try the fast paths on a few tokens, and set the attention implementation that works.

    Models with other attention (windows, soft caps, sinks) or a custom head use the plain path, with a warning; if
    scores have a soft cap, or transformers has no SDPA for the model (GPT-OSS), with `eager` attention.
    """
    rows = sample(lm.config.get_text_config().vocab_size)
    device = next(lm.parameters()).device
    plain = build_micro(rows, range(len(rows)), SAMPLE_WIDTH, packing=False).to(device)
    shared = build_micro(rows, range(len(rows)), SAMPLE_WIDTH).to(device)
    text = lm.config.get_text_config()
    attention_capped, head_capped = _soft_caps(text)
    padded = "sdpa" if lm._supports_sdpa and not attention_capped else "eager"  # SDPA ignores soft caps
    with torch.no_grad():
        lm.set_attn_implementation(padded)
        truth = _tried(lm, FastPaths(False, False), plain)
        scales = (FastPaths(False, True, head_scale=scale) for scale in ([] if head_capped else _head_scales(text)))
        padded_paths = next((paths for paths in scales if _agrees(lm, paths, plain, truth)), FastPaths(False, False))
        packed_paths = replace(padded_paths, packing=True)
        packing = padded_paths.own_head and padded == "sdpa" and _attends_to_all(lm)
        if packing:
            lm.set_attn_implementation(ATTENTION)  # no effect on models whose layers have their own attention
            packing = text._attn_implementation == ATTENTION and _agrees(lm, packed_paths, shared, truth)
        if not packing:
            lm.set_attn_implementation(padded)
            log.warning(
                "%s: rows cannot share prompts with this model's attention; training pads them", lm.config.model_type
            )
        paths, micro = (packed_paths, shared) if packing else (padded_paths, plain)
        by_length = replace(paths, by_length=True)
        kernels: list[Literal["FA3"] | None] = ["FA3", None] if find_spec("flash_attn_interface") else [None]
        tried = kernels if packing and lm.dtype != torch.float32 else []
        if any(_fits_on_gpu(lm, by_length, micro, truth, kernel) for kernel in tried):
            paths = by_length
        by_kernels = replace(paths, head_kernels=True)
        return by_kernels if paths.own_head and _fits_on_gpu(lm, by_kernels, micro, truth) else paths


def _tried(lm: Any, paths: FastPaths, micro: Micro) -> Tensor:
    """Return log-probs [K] on these paths. Evaluation mode disables an adapter's dropout, which would make passes
    differ."""
    logprobs: Tensor = Policy(lm, paths).eval()(micro, 1.0, "none")[0]
    return logprobs


def _agrees(lm: Any, paths: FastPaths, micro: Micro, truth: Tensor) -> bool:
    """True if these paths give the log-probs `truth`. A model's own code may not accept the arguments of a path."""
    try:
        return _same(_tried(lm, paths, micro), truth, next(lm.parameters()).dtype)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        log.info("%s: %s fail: %s", lm.config.model_type, paths, _first_line(error))
        return False


def _fits_on_gpu(
    lm: Any, paths: FastPaths, micro: Micro, truth: Tensor, attention_kernel: Literal["FA3"] | None = None
) -> bool:
    """True if these paths, which are for CUDA alone, give the log-probs `truth` and a finite gradient.

    `attention_kernel` is torch's name of the kernel to use instead of FlashAttention 2, from then on if it fits.
    """
    fits = False
    if not micro.targets.is_cuda:
        return fits
    try:
        if attention_kernel is not None:
            activate_flash_attention_impl(attention_kernel)
        with torch.enable_grad():
            logprobs = _tried(lm, paths, micro)
            smallest = min((p for p in lm.parameters() if p.requires_grad), key=Tensor.numel)
            [gradient] = torch.autograd.grad(logprobs.sum(), smallest)
        fits = _same(logprobs.detach(), truth, lm.dtype) and bool(gradient.isfinite().all())
    except torch.OutOfMemoryError:
        raise
    except _unsupported() as error:
        log.info("%s: %s %s fail: %s", lm.config.model_type, paths, attention_kernel or "", _first_line(error))
    if not fits and attention_kernel is not None and current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    return fits


def _attends_to_all(lm: Any) -> bool:
    """True if no layer carries state between tokens (Mamba) or has a sliding window. The trial cannot detect a window
    longer than the sample."""
    if lm._is_stateful:
        return False
    settings = lm.config.get_text_config().to_dict()
    if settings.get("layer_types"):
        return set(settings["layer_types"]) == {"full_attention"}
    return not settings.get("sliding_window") or settings.get("use_sliding_window") is False


def _head_scales(config: Any) -> list[float]:
    """Return candidate factors on the logits: the one in the configuration (Cohere, Granite), then 1."""
    factor, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return [1.0 if isinstance(factor, str) else factor / divisor, 1.0]


def _soft_caps(config: Any) -> tuple[bool, bool]:
    """Return whether attention scores and whether logits have a soft cap, as in Gemma-2. The small values of a sample
    would not reveal one."""
    caps = [name for name, value in config.to_dict().items() if value and "cap" in name and "soft" in name]
    attention = [name for name in caps if "attn" in name or "attention" in name]
    return bool(attention), len(caps) > len(attention)


def _same(a: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    return bool((a - truth).abs().max() <= FAST_PATH_TOLERANCE[dtype] * truth.std().clamp(max=1.0))


def sample(vocab_size: int) -> list[Experience]:
    """Return a few rows to try a model on: two groups of two rows with mixed lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt_length in (5, 3):
        prompt = rng.integers(0, vocab_size, prompt_length)
        for length in (SAMPLE_WIDTH, SAMPLE_WIDTH // 2):
            tokens = np.concatenate([prompt, rng.integers(0, vocab_size, length)])
            rows.append(Experience(tokens=tokens, prompt_length=prompt_length, action_mask=np.ones(length)))
    return rows
