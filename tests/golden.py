"""Six small runs and every recipe, to see that a change of the code's structure changes nothing else.

    python tests/golden.py before.json                        # on the commit before the change
    python tests/golden.py after.json --against before.json   # after it; exits with 1 and names what differs

Recorded of each run: the digest of its weights and, step by step, its batch (tokens, log-probs, masks, versions and
rewards of every row) and the metrics that do not depend on the machine; of a configuration, what each of its stages
resolves to. Numbers are compared with those of the same machine only.

The runs: synchronous; one step off (`sync_offset: 1`); synchronous and killed twice, which must equal the first; an
adapter with a reference; DPO; MIX.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos.comparing import steady_metrics
from chaos.killing import ChaosRun, Kill

from trinity_core.config import load_config, stages, to_yaml
from trinity_core.config.findings import ConfigError
from trinity_core.config.paths import database_url
from trinity_core.data.tiny import TinyFolders, make_tiny
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.results.audit import open_store

ROOT = Path(__file__).parent.parent
STEPS = 4
ADAPTER = (
    "model.lora_configs=[{lora_rank: 4, lora_alpha: 16}]",
    "algorithm.kl_loss_fn=k2",
    "algorithm.kl_loss_fn_args={kl_coef: 0.01}",
)
MIX = ("algorithm.algorithm_type=mix", "algorithm.sample_strategy_args={expert_data_ratio: 0.25}")
DPO = ("mode=train", "algorithm.algorithm_type=dpo", "buffer.train_batch_size=16", "buffer.explorer_input=null")
PLACES = {
    "MODEL_PATH": "/models/policy",
    "TRINITY_MODEL_PATH": "/models/policy",
    "TRINITY_TASKSET_PATH": "/data/tasks",
    "TRINITY_SFT_DATASET_PATH": "/data/sft",
    "TRINITY_DATASET_PATH": "/data/warm_up",
    "TRINITY_CHECKPOINT_ROOT_DIR": "/checkpoints",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file to compare with")
    parser.add_argument("--only", default="", help="names, separated by commas, of runs; `configs`: no runs")
    args = parser.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    golden: dict[str, Any] = {"configs": dict(resolved_configs())}
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder) / "tiny", 0, 64, 16, 16, count_dpo=64)
        for name, (overrides, kills) in runs(tiny).items():
            if not wanted or name in wanted:
                golden[name] = recorded(Path(folder) / name, tiny, overrides, kills)
                print(f"{name}: {golden[name]['weights'][:16]}", flush=True)
    args.out.write_text(json.dumps(golden, indent=1, sort_keys=True))
    faults = list(differences("killed", golden.get("synchronous"), golden.get("killed")))
    if args.against:
        before = json.loads(args.against.read_text())
        faults += [fault for name, value in golden.items() for fault in differences(name, before.get(name), value)]
    print("\n".join(faults) or "equal")
    sys.exit(bool(faults))


def runs(tiny: TinyFolders) -> dict[str, tuple[Sequence[str], Sequence[Kill]]]:
    """name → (overrides, kills)."""
    columns = "format: {prompt_key: question, response_key: answer}"
    pairs = "format: {prompt_key: question, chosen_key: chosen, rejected_key: rejected}"
    auxiliary = f"{{sft_dataset: {{path: {tiny.data}, split: sft, {columns}}}}}"
    preferences = f"{{name: pairs, path: {tiny.data}, split: dpo, {pairs}}}"
    return {
        "synchronous": ((), ()),
        "one_step_off": (("synchronizer.sync_offset=1",), ()),
        "killed": ((), (Kill("trainer", 2, "saving"), Kill("explorer", 3))),
        "lora": (ADAPTER, ()),
        "dpo": ((*DPO, f"buffer.trainer_input.experience_buffer={preferences}"), ()),
        "mix": ((*MIX, f"buffer.trainer_input.auxiliary_buffers={auxiliary}"), ()),
    }


def recorded(folder: Path, tiny: TinyFolders, overrides: Sequence[str], kills: Sequence[Kill]) -> dict[str, Any]:
    with ChaosRun(folder, tiny.model, tiny.data, STEPS, overrides=overrides) as run:
        run.go(kills)
    assert len(run.killed) == len(kills), "a run ended before its kills"
    metrics = {f"{source} {step}": metrics for (source, step), metrics in steady_metrics(run.job).items()}
    batches = dict(ledger(run.job)) if any((run.job / "buffer").glob("*.db")) else {}
    faults = run.faults() if batches else []
    return {"weights": run.digest(), "batches": batches, "metrics": metrics, "faults": faults}


def ledger(job: Path) -> Iterator[tuple[str, list[str]]]:
    """Each step's rows in their order: group, run, turn, reward and a digest of the row's arrays."""
    with ExperienceStore(open_store(job, database_url(None, job / "buffer"))) as store:
        for step in range(1, STEPS + 1):
            yield (
                str(step),
                [
                    f"{row.group} {row.run} {row.turn} {row.reward!r} "
                    + hashlib.sha256(
                        b"|".join(
                            b"" if array is None else array.tobytes()
                            for array in (row.tokens, row.logprobs, row.versions, row.action_mask)
                        )
                    ).hexdigest()
                    for row in store.batch(step)
                ],
            )


def resolved_configs() -> Iterator[tuple[str, list[str]]]:
    """The stages of every recipe and of every document of the tests, or where a document is wrong."""
    os.environ.update(PLACES)
    for path in sorted([*ROOT.glob("configs/*/*.yaml"), *ROOT.glob("tests/config/documents/*.yaml")]):
        try:
            yield str(path.relative_to(ROOT)), [to_yaml(stage) for stage in stages(load_config(path))]
        except ConfigError as error:
            yield str(path.relative_to(ROOT)), [f"{found.line} {found.key}" for found in error.problems]


def differences(name: str, before: Any, after: Any) -> Iterator[str]:
    """Where two values of one name differ; nothing if one of them was not recorded."""
    if before is None or after is None or before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                yield f"{name}/{key}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(f"{name}/{key}", before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(f"{name}[{number}]", *pair)
    elif isinstance(before, str) and "\n" in before:
        lines = set(str(after).splitlines()) ^ set(before.splitlines())
        yield f"{name}: {'; '.join(sorted(lines))[:400]}"
    else:
        yield f"{name}: {before!r}, now {after!r}"


if __name__ == "__main__":
    main()
