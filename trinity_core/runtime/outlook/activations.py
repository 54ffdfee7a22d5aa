"""What autograd keeps of a forward pass until the backward pass has used it.

The layer is Llama's and Qwen's, as transformers computes it: two RMS norms, attention over packed rows
(`training/packing.py`), a gated MLP. Each line below counts the tensors that a part saves, as
`torch.autograd.graph.saved_tensors_hooks` shows them (`tests/runtime/test_runtime_outlook_memory.py`).
"""

from __future__ import annotations

from trinity_core.runtime.outlook.micro_batches import MicroBatches
from trinity_core.runtime.outlook.model_shape import ModelShape

FLOAT = 4
"""Bytes of the number in which norms and log-probs are computed, whatever the weights are."""
LOGITS_AT_ONCE = 1 << 24
"""Logits beyond which the head is computed in slices (`training/policy.py`)."""
SLICE = 1 << 23
"""Logits of a slice (`algorithms/logprobs.py`)."""


def layer_bytes(shape: ModelShape, micro: MicroBatches, width: int) -> int:
    """Bytes that one layer saves for the micro-batch; `width` are the bytes of a weight."""
    norms = 2 * shape.hidden * (FLOAT + width)  # the input in float32, and the normed input
    linear = 2 * shape.hidden + shape.queries  # the inputs of q/k/v, of the MLP and of the output projection
    heads = 2 * shape.queries + 2 * shape.keys  # q and the output; k and v
    mlp = 4 * shape.intermediate  # gate, its activation, up, and their product
    repeated = 2 * micro.rows * micro.longest * shape.keys  # k and v of each row with its prompt
    return micro.tokens * (norms + width * (linear + heads + mlp)) + width * repeated


def activation_bytes(shape: ModelShape, micro: MicroBatches, width: int, checkpointing: bool) -> int:
    """Bytes that all layers save; with gradient checkpointing the input of each, and all of the one computed again."""
    last = micro.tokens * shape.hidden * (FLOAT + width) + micro.targets * shape.hidden * width  # norm and head
    layer = layer_bytes(shape, micro, width)
    if not checkpointing:
        return last + shape.layers * layer
    return last + shape.layers * micro.tokens * shape.hidden * width + layer


def logit_bytes(shape: ModelShape, micro: MicroBatches) -> int:
    """Bytes at the end of the forward pass: logits, log-probs, probabilities and what their entropy sums up.

    A large head is computed in slices, of which three copies exist at a time.
    """
    logits = micro.targets * shape.vocabulary
    if logits > LOGITS_AT_ONCE:
        return 3 * FLOAT * SLICE
    return 4 * FLOAT * logits
