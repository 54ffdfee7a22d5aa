"""Faults injected into real runs of the small model: which of them stay silent? And is a healthy run ever accused?

    python benchmarks/wrong_runs.py                     # all faults, about 25 minutes on 2 cores
    python benchmarks/wrong_runs.py --only stale-engine,eval-leak
    python benchmarks/wrong_runs.py --clean 50          # clean runs alone: all algorithms, synchronous and asynchronous
    python benchmarks/wrong_runs.py --clean 10 --first 21

A fault changes one function of the system, in every process of the run, or one setting. It is caught if the run is
refused or stops, or if `trinity doctor` names a check that is meant for it. Prints one row a fault, the share that was
caught, and the checks that accused a clean run. Clean runs share their processes, as the stages of a pipeline do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trinity_core.data.tiny import make_tiny
from trinity_core.results.doctor import diagnose_runs
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import early_cluster, run_request
from trinity_core.run.preflight.checks import load_ready
from trinity_core.run.stage import StageRequest

STEPS = 12
TIME_LIMIT = 300
HOOK = '''
import importlib.abc, importlib.machinery, sys

class _Changed(importlib.abc.MetaPathFinder):
    """Applies the fault to a module once it has been imported."""

    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            exec({code!r}, vars(module))

        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path.insert(0, _Changed())
'''


@dataclass(frozen=True)
class Fault:
    what: str
    module: str = ""
    """The module that is changed."""
    code: str = ""
    """Runs at the end of the module, in its name space; `FOLDER` is the run's own folder."""
    settings: Sequence[str] = ()
    plugin: str = ""
    """Source of a plugin."""
    checks: Sequence[str] = ()
    """Checks of `trinity doctor` that are meant for it; empty: only a refusal or a stop counts."""
    resumes: bool = False
    """True: the run is started twice, the first time for half of its steps."""
    template: str = ""
    """Another chat template."""


FAULTY_REWARD = """
import json, pathlib
from trinity_core.workflows import REWARD_FNS

@REWARD_FNS.register("faulty")
def faulty(*, prompt, response, truth, task, **args):
    metrics = pathlib.Path(FOLDER, "checkpoints/wrong/run/monitor/metrics.jsonl")
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    is_late = sum(json.loads(line)["source"] == "explorer" for line in lines) >= 3
    right = float(truth.split("#### ")[-1].strip() in response.split("####")[-1])
    return {}
"""
LATE_REWARD = {"settings": ("buffer.explorer_input.taskset.default_reward_fn_type=faulty",)}
EACH_ROW = """
label = _set_temperature
def _set_temperature(task, experiences):
    label(task, experiences)
    for one in experiences:"""
"""Begins a change of every experience that a workflow returns; its lines follow."""
RECEIVER = "trinity_core.rollout.inference.weight_receiver"
FIRST_CALL = """
def is_chosen():
    import os
    try:
        os.close(os.open(FOLDER + "/chosen", os.O_CREAT | os.O_EXCL))
        globals()["chosen"] = True
    except FileExistsError:
        pass
    return globals().get("chosen", False)
"""
OPERATOR = """
from trinity_core.pipelines import OPERATORS

@OPERATORS.register("short_only")
def short_only(experiences):
    lengths = sorted(one.response_length for one in experiences)
    return [one for one in experiences if one.response_length <= lengths[len(lengths) // 4]]
"""

FAULTS: dict[str, Fault] = {
    "stale-engine": Fault(
        "one of two engines keeps its old weights", RECEIVER,
        FIRST_CALL + """
receive = WeightReceiver.receive_weights
WeightReceiver.receive_weights = lambda self, method, path, version: (
    None if is_chosen() and version > 1 else receive(self, method, path, version))
""", ("explorer.rollout_model.engine_num=2",)),
    "tensor-missing": Fault(
        "a tensor is not sent", RECEIVER,
        "every = _published\n"
        "def _published(method, path, version):\n"
        "    return ((n, t) for n, t in every(method, path, version) if not (version > 1 and '1.mlp.up_proj' in n))\n"),
    "tensors-swapped": Fault(
        "two tensors of one shape are swapped", RECEIVER,
        "every = _published\n"
        "def _published(method, path, version):\n"
        "    return ((n.replace('up_proj', 'X').replace('gate_proj', 'up_proj').replace('X', 'gate_proj')\n"
        "             if version > 1 else n, t) for n, t in every(method, path, version))\n"),
    "adapter-ignored": Fault(
        "the adapter never reaches the engine", RECEIVER, "def put_in_place(worker, tensors):\n    pass\n",
        ("model.lora_configs=[{lora_rank: 8, lora_alpha: 16}]",)),
    "prompt-trained": Fault(
        "the last prompt tokens have a loss", "trinity_core.rollout.runner",
        EACH_ROW + """
        one.prompt_length -= 3
        one.action_mask = np.concatenate([np.ones(3, bool), one.action_mask])
        one.logprobs = np.concatenate([np.zeros(3, np.float32), one.logprobs])
        one.versions = np.concatenate([np.full(3, -1, np.int32), one.versions])
""", checks=("unsampled-tokens", "contradiction")),
    "mask-shifted": Fault(
        "the loss mask is shifted by one token", "trinity_core.rollout.runner",
        EACH_ROW + """
        one.prompt_length -= 1
        one.action_mask = np.concatenate([one.action_mask, [False]])
        one.logprobs = np.concatenate([[np.float32(0)], one.logprobs])
        one.versions = np.concatenate([np.int32([-1]), one.versions])
""", checks=("unsampled-tokens", "contradiction")),
    "other-temperature": Fault(
        "log-probs are labelled with another temperature", "trinity_core.rollout.runner",
        EACH_ROW + """
        one.temperature = 1.5
"""),
    "micro-batch-normaliser": Fault(
        "each micro-batch is normalised on its own", "trinity_core.training.update",
        """
losses = _losses
def _losses(engine, objective, prepared, micros, *rest):
    return (loss * len(micros) for loss in losses(engine, objective, prepared, micros, *rest))
""", ("trainer.max_token_len_per_gpu=512",)),
    "advantages-across-tasks": Fault(
        "advantages compare rollouts of different tasks", "trinity_core.training.batch",
        "Batch.groups = property(lambda self: ['all'] * len(self.experiences))\n",
        checks=("other-groups",)),
    "verifier-zero": Fault(
        "from step 3 on the verifier rejects everything", plugin="{'value': right * (not is_late)}",
        checks=("constant-reward",), **LATE_REWARD),
    "verifier-one": Fault(
        "from step 3 on the verifier accepts everything", plugin="{'value': max(right, float(is_late))}",
        checks=("constant-reward",), **LATE_REWARD),
    "flat-groups": Fault(
        "the reward depends on the task alone", plugin="{'value': len(prompt) % 7 / 7}",
        checks=("no-update",), **LATE_REWARD),
    "length-reward": Fault(
        "the reward grows with the answer's length alone", plugin="{'value': len(response) / 200}",
        checks=("reward-by-length", "score-fell", "reward-without-score"), **LATE_REWARD),
    "nan-gradient": Fault(
        "one gradient is not a number", "trinity_core.training.engine",
        """
calls, backward = [], TrainingEngine.backward
def once(self, loss, last):
    calls.append(1)
    backward(self, loss * (float("nan") if len(calls) == 4 else 1), last)
TrainingEngine.backward = once
"""),
    "learning-rate": Fault(
        "the learning rate is 100 times too high", settings=("algorithm.optimizer.lr=2e-2",),
        checks=("reward-fell", "score-fell", "constant-reward", "no-update")),
    "learning-rate-low": Fault(
        "the learning rate is 20,000 times too low",
        settings=("algorithm.optimizer.lr=1e-8", "algorithm.kl_loss_fn=k2"), checks=("unmoved",)),
    "other-reference": Fault(
        "the KL is to another model", "trinity_core.training.learner",
        """
load_reference = Learner._load_reference
def _load_reference(self, *args):
    policy, generator = load_reference(self, *args), torch.Generator().manual_seed(1)
    for p in policy.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)
    return policy
Learner._load_reference = _load_reference
""", ("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={kl_coef: 0.01}"), checks=("other-reference",)),
    "tasks-twice": Fault(
        "every second task is drawn twice", "trinity_core.data.schedule",
        """
take = TaskSchedule._take
TaskSchedule._take = lambda self, source, count: [row - row % 2 for row in take(self, source, count)]
""", checks=("repeated-tasks",)),
    "tasks-skipped": Fault(
        "64 tasks of an epoch are left out", "trinity_core.data.schedule",
        """
take = TaskSchedule._take
def _take(self, source, count):
    self._drawn[source] += 64 * (self._drawn[source] == 32)
    return take(self, source, count)
TaskSchedule._take = _take
""", checks=("skipped-tasks",)),
    "optimizer-lost": Fault(
        "a resume begins with a new optimizer", "trinity_core.training.state",
        """
restored = restore
def restore(engine, model, optimizer, steps, *others):
    restored(engine, model, {n: t for n, t in optimizer.items() if n.startswith(MASTER)}, 0, *others)
""", checks=("lost-optimizer",), resumes=True),
    "schedule-anew": Fault(
        "the learning rate's schedule begins anew", "trinity_core.training.learner",
        """
at = LearningRateSchedule.at
LearningRateSchedule.at = lambda self, step: at(self, step if step <= 6 else step - 6)
""", ("algorithm.optimizer.lr_warmup_steps=4",), checks=("schedule-restarted",)),
    "template-drift": Fault(
        "the template is another one than in the warm-up", checks=("other-template",),
        template="{% for message in messages %}{{ '### ' + message['role'] + ': ' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"),
    "reward-file": Fault(
        "the agent writes the file from which the reward is read",
        plugin="{'value': max(right, float(is_late and sum(map(ord, response)) % 10 < 9))}",
        checks=("reward-without-score", "score-fell"), **LATE_REWARD),
    "eval-leak": Fault(
        "the evaluation set is the training set", settings=("buffer.explorer_input.eval_tasksets[0].split=train",),
        checks=("eval-leak",)),
    "short-answers": Fault(
        "a filter keeps the short answers", plugin=OPERATOR,
        settings=("data_processor.experience_pipeline.operators=[{name: short_only}]",), checks=("short-answers",)),
    "growing-gap": Fault(
        "an engine drifts from the trainer", "trinity_core.rollout.inference.vllm_types",
        """
exact = sample
def sample(output, version):
    import numpy as np
    one = exact(output, version)
    noise = np.random.default_rng(len(one.tokens)).normal(0, 0.02 * version, len(one.logprobs))
    one.logprobs[:] = one.logprobs + noise.astype(np.float32)
    return one
""", checks=("rollout-gap",)),
    "zero-updates": Fault(
        "the learning rate is 0", "trinity_core.training.learner",
        "LearningRateSchedule.at = lambda self, step: 0.0\n", checks=("no-update",)),
}  # fmt: skip


@dataclass
class Result:
    name: str
    outcome: str
    """`stopped`, `found`, `silent`, or for a clean run `healthy` or `accused`."""
    by: str
    seconds: float


def warmed_up(folder: Path, seed: int) -> dict[str, str]:
    """Make data, and a model that has learned to answer a third of them; return both folders."""
    summary = folder / "checkpoints/wrong/warm_up/summary.json"
    if summary.exists():
        return {"model": yaml.safe_load(summary.read_text())["hf_dir"], "data": str(folder / "tiny" / "data")}
    tiny = make_tiny(folder / "tiny", seed, 256, 64, 2000)
    settings = config(str(tiny.model), str(tiny.data), folder)
    settings |= {
        "name": "warm_up", "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
        "buffer": {
            "train_batch_size": 64, "total_steps": 50,
            "trainer_input": {"experience_buffer": {"name": "sft", "path": str(tiny.data), "split": "sft", **COLUMNS}},
        },
    }  # fmt: skip
    done = run(folder, settings, {})
    if done.returncode or not summary.exists():
        raise SystemExit(f"the warm-up failed:\n{done.stdout[-3000:]}")
    return {"model": yaml.safe_load(summary.read_text())["hf_dir"], "data": str(tiny.data)}


COLUMNS: dict[str, Any] = {"format": {"prompt_key": "question", "response_key": "answer"}}


def config(model: str, data: str, folder: Path) -> dict[str, Any]:
    taskset = {"name": "train", "path": data, "split": "train", "default_reward_fn_type": "math_reward", **COLUMNS}
    held_out = {**taskset, "name": "test", "split": "test", "rollout_args": {"temperature": 0.0}}
    return {
        "project": "wrong", "name": "run", "checkpoint_root_dir": str(folder / "checkpoints"),
        "plugin_dir": str(folder / "plugins"),
        "algorithm": {
            "algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 2e-4}, "kl_loss_fn": "none",
        },
        "model": {"model_path": model, "max_prompt_tokens": 88, "max_response_tokens": 40},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 8, "total_steps": STEPS,
            "explorer_input": {"taskset": taskset, "eval_tasksets": [held_out]},
        },
        "explorer": {"eval_interval": 6, "rollout_model": {"enforce_eager": True, "kv_cache_gib": 1}},
        "synchronizer": {"sync_method": "memory"}, "trainer": {"save_interval": 6},
        "monitor": {"monitor_type": "tensorboard"},
    }  # fmt: skip


def run(
    folder: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    overrides: Sequence[str] = (),
    seconds: int = TIME_LIMIT,
) -> subprocess.CompletedProcess[str]:
    (folder / "plugins").mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(settings)))
    command = [sys.executable, "-m", "trinity_core.run", "--config", str(folder / "run.yaml"), *overrides]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


def tried(name: str, fault: Fault, made: Mapping[str, str], folder: Path, overrides: Sequence[str] = ()) -> Result:
    """Run with a fault and say what saw it."""
    began = time.monotonic()
    (folder / "plugins").mkdir(parents=True)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    if fault.module:
        code = f"FOLDER = {str(folder)!r}\n{fault.code}"
        (folder / "sitecustomize.py").write_text(HOOK.format(module=fault.module, code=code))
    if fault.plugin:
        source = FAULTY_REWARD.replace("{}", fault.plugin) if fault.plugin.startswith("{") else fault.plugin
        (folder / "plugins/fault.py").write_text(f"FOLDER = {str(folder)!r}\n{source}")
    settings = [*fault.settings, *overrides]
    if fault.template:
        (folder / "template.jinja").write_text(fault.template)
        settings.append(f"model.chat_template_path={folder / 'template.jinja'}")
    for steps in (STEPS // 2, STEPS) if fault.resumes else (STEPS,):
        written = config(made["model"], made["data"], folder)
        done = run(folder, written, environment, [*settings, f"buffer.total_steps={steps}"])
    seconds = time.monotonic() - began
    if done.returncode:
        reasons = [line for line in done.stdout.splitlines() if line.strip()]
        return Result(name, "stopped", reasons[-1][:160] if reasons else "", seconds)
    [found] = diagnose_runs(folder / "checkpoints/wrong/run").values()
    names = [one.check for one in found]
    if any(check in names for check in fault.checks):
        return Result(name, "found", ", ".join(names), seconds)
    return Result(name, "silent", ", ".join(names), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of faults, separated by commas")
    parser.add_argument("--clean", type=int, default=0, help="healthy runs, each with a seed of its own")
    parser.add_argument("--first", type=int, default=1, help="number of the first healthy run")
    parser.add_argument("--keep", type=Path, help="folder for the warmed-up model, which is used if it is there")
    args = parser.parse_args()
    chosen = {name: FAULTS[name] for name in filter(None, args.only.split(","))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = warmed_up((args.keep or folder).absolute() / "warm_up", 0)
        if args.clean:
            results = list(clean_runs(made, folder, range(args.first, args.first + args.clean)))
            print(f"{sum(result.outcome != 'healthy' for result in results)} of {len(results)} clean runs accused")
            return
        results = []
        for name, fault in (chosen or FAULTS).items():
            results.append(tried(name, fault, made, folder / name))
            show(results[-1], fault.what)
        caught = sum(result.outcome != "silent" for result in results)
        print(f"{caught} of {len(results)} faults are not silent")


PLAIN = (
    "grpo", "ppo", "dapo", "rloo", "reinforceplusplus", "dr_grpo", "gspo", "gmpo", "cispo", "sapo", "topr", "sppo",
    "asymre", "raft", "opmd", "rec", "scale_rl", "m2po",
)  # fmt: skip
"""Algorithms that need nothing but rollouts."""
STYLES = ("fixed", "explorer_driven")


def clean_runs(made: Mapping[str, str], folder: Path, numbers: Sequence[int]) -> Iterator[Result]:
    """Run without a fault, each number another seed and the next of the algorithms, in turn synchronous and not."""
    opened = load_checked(clean_config(made, folder, 1))
    with early_cluster(opened):
        for number in numbers:
            began, file = time.monotonic(), clean_config(made, folder, number)
            loaded = load_ready(file)
            run_request(StageRequest(loaded, is_ready=True))
            [found] = diagnose_runs(loaded.job_dir).values()
            by = ", ".join(one.check for one in found)
            result = Result(loaded.name, "accused" if found else "healthy", by, time.monotonic() - began)
            show(result, "; ".join(map(str, found)) or "nothing")
            yield result


def clean_config(made: Mapping[str, str], folder: Path, number: int) -> Path:
    """Write the configuration of a clean run; return its file."""
    kinds = [(name, style) for name in PLAIN for style in STYLES] + [("mix", "fixed"), ("sft", ""), ("dpo", "")]
    algorithm, style = kinds[(number - 1) % len(kinds)]
    settings = config(made["model"], made["data"], folder)
    del settings["plugin_dir"]
    settings |= {"name": f"clean-{number}-{algorithm}-{style or 'data'}", "seed": number}
    settings["algorithm"]["algorithm_type"] = algorithm
    sft = {"name": "sft", "path": made["data"], "split": "sft", **COLUMNS}
    if style:
        settings["synchronizer"]["sync_style"] = style
    else:
        pairs = {"prompt_key": "question", "chosen_key": "chosen", "rejected_key": "rejected"}
        dpo = {"name": "dpo", "path": made["data"], "split": "dpo", "format": pairs}
        settings |= {"mode": "train", "algorithm": {"algorithm_type": algorithm, "optimizer": {"lr": 2e-4}}}
        data = {"experience_buffer": sft if algorithm == "sft" else dpo}
        settings["buffer"] = {"train_batch_size": 32, "total_steps": STEPS, "trainer_input": data}
        settings["explorer"].pop("eval_interval")
    if algorithm == "mix":
        settings["algorithm"]["sample_strategy_args"] = {"expert_data_ratio": 0.25}
        settings["buffer"]["trainer_input"] = {"auxiliary_buffers": {"sft": sft}}
    file = folder / f"{settings['name']}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def show(result: Result, what: str) -> None:
    print(f"{result.name:26} {result.outcome:8} {result.seconds:4.0f} s  {what}\n{'':26} {result.by}", flush=True)


if __name__ == "__main__":
    main()
