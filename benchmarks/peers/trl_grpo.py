"""GRPO steps by TRL's own trainer on a local model and jsonl problems, on the CPU; prints one JSON line.

Runs in an environment of its own (requirements/trl.txt); started by vs_trl.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def final_number(text: str) -> str | None:
    """What follows the last `####`, GSM8K's mark of the final answer."""
    return text.rsplit("####", 1)[1].strip() if "####" in text else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("problems")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    lines = Path(args.problems).read_text().splitlines()[: args.tasks * args.steps]
    rows = [json.loads(line) for line in lines]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["question"]}], "truth": final_number(r["answer"])} for r in rows]
    )
    lengths: list[int] = []

    def reward(completions: list, completion_ids: list, truth: list, **_: object) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(final_number(c[0]["content"]) == t) for c, t in zip(completions, truth, strict=True)]

    class StepEnds(TrainerCallback):
        """Writes down when each whole step (generation, rewards, update) ended."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.times.append(time.perf_counter())

    adapter = None
    if args.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    ends = StepEnds()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=reward,
        train_dataset=dataset,
        callbacks=[ends],
        peft_config=adapter,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            temperature=1.0,
            seed=0,
            per_device_train_batch_size=args.tasks * args.repeats,
            num_generations=args.repeats,
            max_completion_length=args.max_new_tokens,
            max_steps=args.steps,
            learning_rate=1e-5,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    seconds = [after - before for before, after in zip(ends.times, ends.times[1:], strict=False)]
    report = {
        "step_seconds": statistics.median(seconds),
        "steps": len(seconds),
        "mean_response_tokens": statistics.fmean(lengths),
        "max_response_tokens": max(lengths),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
