"""The training part of a GRPO step against a plain padded loop: the same rollouts, the same optimiser, no engine.

Our side is `Learner.step` with everything in it (layout, advantages, correction of the rollout gap, metrics,
DeepSpeed). The plain loop is what one would write in twenty lines: pad, forward, log-softmax, backward, clip, fused
AdamW. Ours computes each prompt once for all its rollouts, and linear layers compute no padding. The claim: at most
0.7.

    python benchmarks/training_part.py --threads 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from measured import BENCHMARK, make_tiny

GROUPS, REPEATS = 16, 8


def rollouts(vocabulary: int) -> list:
    """16 prompts of 22 to 30 tokens, 8 answers of 35 to 40 tokens to each."""
    import numpy as np

    from trinity_core.data.experience import Experience

    rng, rows = np.random.default_rng(0), []
    for group in range(GROUPS):
        prompt = rng.integers(3, vocabulary, int(rng.integers(22, 31)))
        for run in range(REPEATS):
            length = int(rng.integers(35, 41))
            rows.append(
                Experience(
                    tokens=np.concatenate([prompt, rng.integers(3, vocabulary, length)]),
                    prompt_length=len(prompt),
                    action_mask=np.ones(length),
                    logprobs=np.full(length, -6.0),
                    versions=np.zeros(length),
                    reward=float(rng.random()),
                    group=str(group),
                    run=run,
                )
            )
    return rows


def our_learner(*overrides: str) -> Any:
    """The learner of one trainer worker, in this process."""
    from trinity_core.config import load_config
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner

    return Learner(load_config(BENCHMARK, [*overrides]), 10_000, join(0, 1, *meeting_point(), use_gpu=False))


def our_step(rows: list) -> Callable[[int], object]:
    """A step of the trainer with one worker, in this process."""
    learner = our_learner()
    return lambda step: learner.step(rows, step)


class Work(NamedTuple):
    """A step's micro-batches, and two counts of its floating-point operations."""

    micro_batches: int
    counted: float
    """6 for each parameter and token, each row with its prompt: what is usual, whatever is computed."""
    computed: float
    """2 for each weight of a matrix product and token in each pass: padding, passes of the reference and recomputed
    layers and logits included; a prompt that rows share, and tokens without a loss in the head, as often as they are
    computed. Attention's own products are left out."""


def work_of(learner: Any, rows: list) -> Work:
    from trinity_core.training.batch import make_batch
    from trinity_core.training.policy import LOGITS_AT_ONCE
    from trinity_core.training.update import micro_batches

    lm = learner.engine.module.lm
    micros = micro_batches(make_batch(rows, learner.ranks.device), learner.cut, learner.ranks)
    head, embeddings = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
    outside = {id(weight): weight.numel() for weight in (head, embeddings)}
    layers = lm.num_parameters() - sum(outside.values())
    tokens, targets = sum(m.inputs.tokens.numel() for m in micros), sum(len(m.targets) for m in micros)
    scored = int(learner.reference is not None)
    sliced = learner.engine.module.fast_paths.head_kernels or targets * len(head) > LOGITS_AT_ONCE * len(micros)
    passes = 3 + learner.settings.gradient_checkpointing + scored
    computed = 2.0 * (layers * tokens * passes + head.numel() * targets * (3 + sliced + scored))
    return Work(len(micros), 6.0 * lm.num_parameters() * sum(len(row.tokens) for row in rows), computed)


def plain_step(rows: list, model_path: str) -> Callable[[int], object]:
    """A step of the plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-5, fused=True)
    width = max(len(row.tokens) for row in rows)

    def step(_: int) -> None:
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        present, action = torch.zeros_like(tokens), torch.zeros(tokens.shape)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
            present[i, : len(row.tokens)] = 1
            action[i, row.prompt_length : len(row.tokens)] = 1
        rewards = torch.tensor([row.reward for row in rows]).view(GROUPS, REPEATS)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        logits = lm(tokens, attention_mask=present).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        (-(ratio * advantages * action[:, 1:]).sum() / action[:, 1:].sum()).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    model = str(make_tiny() / "model")
    rows = rollouts(400)
    sides = {"ours": our_step(rows), "plain": plain_step(rows, model)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(1, args.pairs + 4):
        for name, side in sides.items():
            began = time.perf_counter()
            side(step)
            seconds[name].append(time.perf_counter() - began)
    ours, plain = (values[3:] for values in seconds.values())
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    print(
        f"{len(rows)} rollouts, {args.threads} thread(s): ours {statistics.median(ours):.3f} s, plain loop "
        f"{statistics.median(plain):.3f} s, median ratio of {len(ours)} pairs {ratio:.2f} (claim: at most 0.70)"
    )


if __name__ == "__main__":
    main()
