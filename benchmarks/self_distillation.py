"""Self-distillation against SFT and GRPO on the small model: accuracy on the test set before and after.

The warm-up teaches the model to answer, and to follow an answer that its prompt shows. From there, on the same tasks
and with as many answers in the loss: `grpo` learns from rewards, `sft` from the reference answers, `opsd` (sampled
tokens) and `opsd_full` (whole vocabulary) from themselves with the reference answer in the prompt.

    python benchmarks/self_distillation.py
    python benchmarks/self_distillation.py --only opsd_full --steps 40
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from learns import ANEW, FOLDER, make_data
from measured import newest, run

HINT = "{question} Say: {demonstration}"
RFT, SFT = "configs/quickstart/quickstart.yaml", "configs/sft/sft.yaml"
LENGTHS = ["model.max_prompt_tokens=140", "model.max_model_len=180"]
TASKS, ROLLOUTS = 32, 8
METHODS = {"sft": 2e-4, "grpo": 2e-4, "opsd": 5e-5, "opsd_full": 5e-5}
"""Learning rate of each. `opsd` at 2e-4 first rises and then falls below where it began."""


def main() -> None:
    """Run the chosen methods and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--lr", type=float, help="Of all methods, in place of their own.")
    args = parser.parse_args()
    make_data()
    model = warm_model()
    if args.only == list(METHODS):
        print(f"before     accuracy {accuracy('before', model):.3f}", flush=True)
    for name in args.only:
        began = time.monotonic()
        lines = trained(name, model, args.steps, args.lr or METHODS[name])
        tokens = sum(line["metrics"].get("tokens", 0) for line in lines if line["source"] == "explorer")
        after = accuracy(f"{name}_after", exported(name))
        seconds = time.monotonic() - began
        print(f"{name:10} accuracy {after:.3f}, {tokens:,.0f} tokens sampled, {seconds:.0f} s", flush=True)


def warm_model() -> Path:
    """The model after the warm-up, made once."""
    rows = [json.loads(line) for line in (FOLDER / "data" / "sft.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["question"] = HINT.format(question=row["question"], demonstration=row["answer"])
    data = FOLDER / "hinted" / "sft.jsonl"
    data.parent.mkdir(exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not any(FOLDER.glob("distillation/warm/*/*/global_step_*/actor/huggingface/*.safetensors")):
        overrides = ["name=warm", f"model.model_path={FOLDER / 'model'}", "buffer.total_steps=250", *LENGTHS, *ANEW]
        run(SFT, FOLDER / "distillation" / "warm", *overrides, TRINITY_TASKSET_PATH=str(data.parent))
    return exported("warm")


def trained(name: str, model: Path, steps: int, lr: float) -> list[dict]:
    """Train by a method; the run's metrics lines."""
    overrides = [f"name={name}", f"model.model_path={model}", f"buffer.total_steps={steps}", "stages=[]"]
    overrides += [f"algorithm.optimizer.lr={lr}", "algorithm.optimizer.lr_warmup_steps=5", *LENGTHS, *ANEW]
    overrides.append(f"trainer.save_interval={steps}")
    if name == "sft":
        source = "buffer.trainer_input.experience_buffer"
        overrides += [f"{source}.split=train", f"buffer.train_batch_size={TASKS * ROLLOUTS}"]
        overrides += ["algorithm.optimizer.warmup_style=constant"]
    else:
        overrides += [f"algorithm.algorithm_type={name}", f"algorithm.repeat_times={ROLLOUTS}"]
        overrides.append(f"buffer.batch_size={TASKS}")
    if name.startswith("opsd"):
        taskset = "buffer.explorer_input.taskset"
        overrides.append(f"{taskset}.default_workflow_type=self_distill_workflow")
        overrides.append(f"{taskset}.workflow_args.hint='{HINT}'")
    if name == "opsd_full":
        overrides.append("algorithm.policy_loss_fn_args={beta: 0, teacher: reference}")
    config = SFT if name == "sft" else RFT
    return run(config, FOLDER / "distillation" / name, *overrides, TRINITY_TASKSET_PATH=str(FOLDER / "data"))


def accuracy(name: str, model: Path) -> float:
    """The share of right greedy answers to the test set."""
    overrides = [f"name={name}", "mode=bench", f"model.model_path={model}", "stages=[]", *LENGTHS]
    overrides += ["continue_from_checkpoint=false", "cluster.gpu_per_node=0"]
    lines = run(RFT, FOLDER / "distillation" / name, *overrides, TRINITY_TASKSET_PATH=str(FOLDER / "data"))
    return next(line["metrics"]["eval/test/accuracy"] for line in lines if "eval/test/accuracy" in line["metrics"])


def exported(name: str) -> Path:
    """The folder of the last model of the runs with that name."""
    return newest(FOLDER, f"distillation/{name}/*/*/global_step_*/actor/huggingface/*.safetensors").parent


if __name__ == "__main__":
    main()
