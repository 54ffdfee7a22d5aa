"""LoRA on the CPU, for engines whose requests all use one adapter: two matrix products a layer.

vLLM's own CPU implementation serves requests of several adapters: it copies the adapter's matrices for every token
(2,000 tokens of a layer of 4,096 outputs at rank 16 take 0.5 GB), and generation takes four times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe_method
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend


class OneAdapter(PunicaWrapperCPU):
    """Adds the adapter's contribution to the outputs of linear layers."""

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...], scale: float, output_slices: tuple[int, ...],
        *, buffer: tuple[torch.Tensor, ...] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Add `scale * x A^T B^T` to y [tokens, out], slice by slice (for example q, k and v).

        The stacked A are [1, 1, rank, in] and B [1, 1, out, rank]. As in vLLM, x A^T is in float32.
        """
        x, y = x.view(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1])
        for a, b, part in zip(lora_a_stacked, lora_b_stacked, y.split(output_slices, 1), strict=True):
            part.addmm_((x @ a[0, 0].float().T).to(y.dtype), b[0, 0].to(y.dtype).T, alpha=scale)


def _experts_backend(moe_config: Any) -> Any:
    """Select the experts' kernels as without an adapter, which experts do not have: vLLM would select LoRA kernels,
    which need a GPU."""
    moe_config.is_lora_enabled = False
    return select_unquantized_moe_backend(moe_config)


def use_one_adapter() -> None:
    """Make all CPU engines built later in this process use `OneAdapter`."""
    from vllm.platforms.cpu import CpuPlatform

    name = f"{__name__}.{OneAdapter.__qualname__}"
    moe_method.select_unquantized_moe_backend = _experts_backend
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: name)  # type: ignore[method-assign, assignment]
