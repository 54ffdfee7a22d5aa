"""Known models on known GPUs: none refused that is known to fit, none accepted that cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preflight_configs import config_of

from trinity_core.config import load_config
from trinity_core.config.training import TrainSettings
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.preflight import checks
from trinity_core.run.preflight.memory import zero_stage_that_fits
from trinity_core.run.preflight.needs import REWARDS, TRAINER, size, total
from trinity_core.run.preflight.room import KEY, Room, shortages
from trinity_core.run.preflight.stage_plan import StagePlan, plans_of

GIB = 1 << 30
SHAPES = {  # hidden, layers, intermediate, heads, heads of keys, channels, vocabulary, tied, as in their config.json
    "Qwen3-0.6B": ("qwen3", 1024, 28, 3072, 16, 8, 128, 151936, True),
    "Qwen3-4B": ("qwen3", 2560, 36, 9728, 32, 8, 128, 151936, True),
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 4864, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 8960, 12, 2, 128, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 36, 11008, 16, 2, 128, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 18944, 28, 4, 128, 152064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 48, 13824, 40, 8, 128, 152064, False),
    "Qwen2.5-32B": ("qwen2", 5120, 64, 27648, 40, 8, 128, 152064, False),
    "Qwen2.5-72B": ("qwen2", 8192, 80, 29568, 64, 8, 128, 152064, False),
    "Qwen-7B": ("llama", 4096, 32, 11008, 32, 32, 128, 151936, False),  # the first Qwen: layers as Llama's
    "Qwen-72B": ("llama", 8192, 80, 24576, 64, 64, 128, 152064, False),
    "Llama-2-7B": ("llama", 4096, 32, 11008, 32, 32, 128, 32000, False),
}
MILLIONS = {
    "Qwen3-0.6B": 596, "Qwen3-4B": 4_022, "Qwen2.5-0.5B": 494, "Qwen2.5-1.5B": 1_544, "Qwen2.5-3B": 3_086,
    "Qwen2.5-7B": 7_616, "Qwen2.5-14B": 14_770, "Qwen2.5-32B": 32_764, "Qwen2.5-72B": 72_706, "Qwen-7B": 7_721,
    "Qwen-72B": 72_286, "Llama-2-7B": 6_738,
}  # fmt: skip
"""As their model cards say."""
FSDP = "trainer.trainer_config.actor_rollout_ref.actor.fsdp_config"
REFERENCE = "trainer.trainer_config.actor_rollout_ref.ref.fsdp_config.param_offload=true"
CRITIC = "trainer.trainer_config.critic.model.fsdp_config"
OFFLOAD = (f"{FSDP}.optimizer_offload=true", REFERENCE)
APART = "cluster.colocate=false"
"""Engine and trainer are on the GPU at once."""
SHARES = "explorer.rollout_model.gpu_memory_utilization"
ENGINES = "explorer.rollout_model.engine_num"
PARALLEL = "explorer.rollout_model.tensor_parallel_size"


def planned(tmp_path: Path, model: str, gpus: int, gpu_gib: int, *overrides: str) -> StagePlan:
    kind, hidden, layers, inner, heads, kv_heads, channels, vocabulary, tied = SHAPES[model]
    config = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": channels,
              "vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 1 << 17}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (plan,) = plans_of(
        config_of(
            f"model.model_path={tmp_path}", f"cluster.gpu_per_node={gpus}", "model.max_prompt_tokens=1024",
            "model.max_response_tokens=1024", "buffer.batch_size=32", "trainer.max_token_len_per_gpu=8192",
            "trainer.gradient_checkpointing=true",
            *overrides,
        ),
        Machine(12 * gpus, gpus),
        gpu_gib * GIB,
    )  # fmt: skip
    return plan


ALL_OFFLOADED = (*OFFLOAD, "trainer.zero_stage=3", f"{FSDP}.param_offload=true")
SFT = (
    "mode=train", "algorithm.algorithm_type=sft", "buffer.train_batch_size=8", "buffer.explorer_input={}",
    "buffer.trainer_input={experience_buffer: {name: answers, path: data}}",
)  # fmt: skip


def adapter(rank: int, four_bits: bool = False) -> str:
    return f"model.lora_configs=[{{lora_rank: {rank}, load_in_4bit: {str(four_bits).lower()}}}]"


def lengths(prompt: int, response: int, rows: int = 1) -> tuple[str, ...]:
    """The longest prompt and response, and `rows` of them in a micro-batch."""
    return (
        f"model.max_prompt_tokens={prompt}", f"model.max_response_tokens={response}",
        f"model.max_model_len={prompt + response}", f"trainer.max_token_len_per_gpu={rows * (prompt + response)}",
    )  # fmt: skip


def verl(prompt: int, response: int, rows: int, share: float) -> tuple[str, ...]:
    """What veRL's scripts set: rows of a micro-batch on a GPU, and the engine's share."""
    return (*lengths(prompt, response, rows), f"{SHARES}={share}", "algorithm.repeat_times=5")


# veRL: documentation, "Hardware Resource Needed for RL", and the scripts in examples/tuning that it names. Engines and
# trainer share several GPUs there; here they have some each.
# Qwen: README of QwenLM/Qwen, "Profiling of Memory and Speed", A100s of 80 GB, one row at a time.
# LLaMA-Factory: wiki, "Performance comparison", A100 of 40 GB, FlashAttention 2, one row at a time.
# Alpaca: tatsu-lab/stanford_alpaca, issues 56 and 221. TRL: huggingface/trl, issue 3456, without vLLM.
REPORTS = {
    "veRL: LoRA, 0.5B": ("Qwen2.5-0.5B", 1, 80, (adapter(32), *verl(512, 1024, 116, 0.1)), True),
    "veRL: LoRA, 3B": ("Qwen2.5-3B", 1, 80, (adapter(32), *verl(512, 1024, 62, 0.1)), True),
    "veRL: LoRA, 7B": ("Qwen2.5-7B", 1, 80, (adapter(32), *verl(512, 1024, 16, 0.2)), True),
    "veRL: LoRA, 32B": ("Qwen2.5-32B", 4, 80, (adapter(32), *verl(512, 1024, 45, 0.9), *ALL_OFFLOADED), True),
    "veRL: LoRA, 72B": (
        "Qwen2.5-72B", 8, 80, (adapter(32), *verl(512, 1024, 22, 0.9), *ALL_OFFLOADED, f"{PARALLEL}=4"), True),
    "veRL: 1.5B": ("Qwen2.5-1.5B", 1, 80, (*verl(1024, 3000, 4, 0.4), "algorithm.kl_loss_fn=none"), True),
    "veRL: 7B": ("Qwen2.5-7B", 2, 80, (*verl(512, 1024, 16, 0.9), *OFFLOAD), True),
    "veRL: 14B": ("Qwen2.5-14B", 4, 80, (*verl(1024, 1024, 16, 0.9), *ALL_OFFLOADED), True),
    "Qwen: LoRA, 7B, 8,192 tokens": ("Qwen-7B", 1, 80, (*SFT, adapter(64), *lengths(4096, 4096)), True),  # 36.6 GB
    "Qwen: LoRA, 72B, ZeRO 3": (
        "Qwen-72B", 4, 80, (*SFT, adapter(64), *lengths(4096, 4096), "trainer.zero_stage=3"), True),  # 289 GB in all
    "Qwen: LoRA, 72B, ZeRO 2": (
        "Qwen-72B", 4, 80, (*SFT, adapter(64), *lengths(128, 128), "trainer.zero_stage=2"), False),
    "Qwen: QLoRA, 72B": ("Qwen-72B", 1, 80, (*SFT, adapter(64, True), *lengths(4096, 4096)), True),  # 75.6 GB
    "LLaMA-Factory: 32k": ("Llama-2-7B", 1, 40, (*SFT, adapter(8, True), *lengths(1 << 14, 1 << 14)), True),  # 32 GB
    "Alpaca, a GPU": ("Llama-2-7B", 1, 80, (*SFT, *lengths(256, 256, 4)), False),
    "Alpaca, two": ("Llama-2-7B", 2, 80, (*SFT, *lengths(256, 256, 4), "trainer.zero_stage=3"), True),
    "TRL: 0.6B": ("Qwen3-0.6B", 1, 80, ("mode=train", *lengths(2048, 1024, 4)), True),  # 48 GiB with whole logits
    "TRL: 4B": ("Qwen3-4B", 1, 80, ("mode=train", *lengths(2048, 1024, 4)), False),
}  # fmt: skip
"""Model, GPUs, their GB, settings, and whether the report says that it fits.

Two reports are not among them. Qwen-7B, all weights, on two A100s takes 139 GB in all there (ZeRO 3): gradients there
are bfloat16; they are summed in float32 here, 8 GiB more on each, and the plan refuses it. 64k tokens of Llama-2-7B do
not fit into 40 GB there, with whole logits (8 GiB a copy); here they are sliced, and the plan is 37 GiB.
"""


@pytest.mark.parametrize(
    ("overrides", "gpus", "stage"),
    [
        (("trainer.param_offload=true",), 4, 3),
        ((f"{FSDP}.param_offload=true", "trainer.optimizer_offload=true"), 4, 3),
        (("algorithm.algorithm_type=ppo", f"{CRITIC}.param_offload=true"), 4, 3),
        ((f"{FSDP}.param_offload=true", "trainer.zero_stage=2"), 4, 2),
        ((f"{FSDP}.param_offload=true", "synchronizer.sync_method=memory", adapter(8, True)), 4, 2),
        ((REFERENCE,), 4, 2),
        ((f"{FSDP}.param_offload=true",), 1, None),
        ((f"{FSDP}.param_offload=true", APART, f"{SHARES}=0.3"), 1, 3),
    ],
)
def test_weights_in_host_memory_take_zero_3(tmp_path: Path, overrides: tuple[str, ...], gpus: int, stage: int) -> None:
    """The run and its plan agree."""
    config = config_of("model.model_path=unknown", f"cluster.gpu_per_node={gpus}", *overrides)
    placement = place(config, Machine(64, gpus))
    assert zero_stage_that_fits(config, placement, 80 * GIB) == stage
    plan = planned(tmp_path, "Qwen3-0.6B", gpus, 80, *overrides)
    [trainer] = [process for process in plan.processes if process.kind == TRAINER]
    held = {need.what for need in trainer.memory}
    assert ("policy weights" not in held) is (stage == 3 and "ppo" not in overrides[0])
    assert ("critic weights" in held) is False


@pytest.mark.parametrize("name", REPORTS)
def test_plans_agree_with_public_reports(name: str, tmp_path: Path) -> None:
    model, gpus, gb, overrides, fits = REPORTS[name]
    assert_fits(planned(tmp_path, model, gpus, gb, *overrides), model, gb, 2048, fits)


def test_plan_holds_what_was_measured_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/results/h100.md`: 1.5B, DeepSpeed's ZeRO 2 on one GPU, 128 rows of 768 tokens: 30.6 GiB."""
    monkeypatch.setattr(TrainSettings, "zero_stage_for", lambda *_: 2)
    plan = planned(
        tmp_path, "Qwen2.5-1.5B", 1, 80, "mode=train", *lengths(256, 512), "trainer.max_token_len_per_gpu=8192"
    )
    (trainer,) = plan.processes
    assert trainer.memory is not None and 30.6 <= total(trainer.memory) / GIB < 1.25 * 30.6


def assert_fits(plan: StagePlan, model: str, gpu_gib: int, host_gib: int, fits: bool) -> None:
    assert plan.parameters is not None and plan.parameters / 1e6 == pytest.approx(MILLIONS[model], rel=0.001)
    room = Room(memory=host_gib * GIB, gpu_memory=gpu_gib * GIB, disk=1 << 50)
    short = list(shortages(plan, room))
    assert (not short) is fits, short


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_gib", "host_gib", "overrides", "fits"),
    [
        ("Qwen3-0.6B", 1, 24, 64, (f"{SHARES}=0.3", APART), True),
        ("Qwen3-0.6B", 1, 24, 64, (f"{SHARES}=0.7", APART), False),  # the share and the trainer's 12 bytes a weight
        ("Qwen2.5-1.5B", 1, 24, 64, (), False),  # 12 bytes a weight alone are 17 GiB
        ("Qwen2.5-1.5B", 1, 24, 64, OFFLOAD, True),
        ("Qwen2.5-1.5B", 1, 24, 32, OFFLOAD, False),  # 18 bytes a weight on the host, and the sleeping engine
        ("Qwen2.5-1.5B", 1, 24, 64, (f"{SHARES}=0.95", *OFFLOAD), False),  # no room for the resting trainer's context
        ("Qwen2.5-7B", 2, 80, 512, (), False),  # 12 bytes a weight alone are 85 GiB
        ("Qwen2.5-7B", 8, 80, 1024, (f"{ENGINES}=4",), True),  # four trainer workers, ZeRO 2
        ("Qwen2.5-32B", 8, 80, 256, (f"{PARALLEL}=4", "trainer.zero_stage=3", *OFFLOAD), False),  # 18 bytes on the host
        ("Qwen2.5-32B", 8, 80, 2048, (f"{PARALLEL}=1", "trainer.zero_stage=3", f"{SHARES}=0.6"), False),  # 61 of 48 GiB
    ],
)
def test_plans_agree_with_arithmetic(
    model: str, gpus: int, gpu_gib: int, host_gib: int, overrides: tuple[str, ...], fits: bool, tmp_path: Path
) -> None:
    assert_fits(planned(tmp_path, model, gpus, gpu_gib, *overrides), model, gpu_gib, host_gib, fits)


@pytest.mark.parametrize(
    ("model", "gpu_gib", "overrides", "severity"),
    [
        ("Qwen3-0.6B", 24, (f"{SHARES}=0.7", APART), "error"),  # the other 0.3 are no 12 bytes a weight
        ("Qwen2.5-1.5B", 24, (), "warning"),  # 12 bytes a weight are 17 GiB; the activations are an estimate
        ("Qwen2.5-1.5B", 16, (), "error"),
    ],
)
def test_only_weights_and_optimizer_refuse_a_run(
    model: str, gpu_gib: int, overrides: tuple[str, ...], severity: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, model, 1, gpu_gib, *overrides)
    findings = list(shortages(plan, Room(memory=64 * GIB, gpu_memory=gpu_gib * GIB, disk=1 << 50)))
    assert {finding.severity for finding in findings} == {severity}


def test_what_engines_load_and_trainers_publish_refuses_no_run(tmp_path: Path) -> None:
    """On a CPU: the version that is loaded beside the old weights, and the published ones, are peaks."""
    plan = planned(tmp_path, "Qwen3-0.6B", 0, 0)
    needs = [need for process in plan.processes for need in process.memory or ()]
    held = sum(need.bytes for need in needs if need.held)
    passing = {need.what: need.bytes for need in needs if not need.held}
    assert passing["loading weights"] + passing["published weights"] > 8 * GIB
    for memory, severity in ((held + 4 * GIB, "warning"), (held, "error")):
        (finding,) = shortages(plan, Room(memory=memory, gpu_memory=0, disk=1 << 50))
        assert finding.severity == severity


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_gib", "overrides", "stage"),
    [
        ("Qwen2.5-1.5B", 3, 80, (), 0),
        ("Qwen2.5-7B", 5, 80, (), 2),  # weights, gradients and a quarter of the rest are 64 GiB
        ("Qwen2.5-7B", 5, 141, (), 0),
        ("Qwen2.5-7B", 5, 80, ("trainer.zero_stage=0",), 0),
        ("Qwen2.5-7B", 5, 141, ("trainer.zero_stage=2",), 2),
        ("Qwen2.5-1.5B", 3, 0, (), 2),  # not known
        ("Qwen2.5-7B", 2, 80, (), 0),  # one worker
    ],
)
def test_states_are_partitioned_where_they_do_not_fit(
    model: str, gpus: int, gpu_gib: int, overrides: tuple[str, ...], stage: int, tmp_path: Path
) -> None:
    plan = planned(tmp_path, model, gpus, gpu_gib, *overrides)
    (weights,) = [need for need in plan.processes[-2].memory or () if need.what == "policy weights"]
    assert f"ZeRO {stage}" in weights.why


def test_a_node_is_asked_for_its_own_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of 7 workers are more than 64 GiB, those of one are not; a folder without weights counts for both."""
    planned(tmp_path, "Qwen2.5-7B", 8, 80)  # writes the model's shape
    monkeypatch.setattr(checks, "room_for", lambda job_dir: Room(64 * GIB, 80 * GIB, disk=1 << 50))
    config = config_of(f"model.model_path={tmp_path}", "cluster.gpu_per_node=8", "trainer.zero_stage=2", *OFFLOAD)
    for workers, keys in ((0, []), (1, ["model.model_path"]), (7, ["model.model_path", KEY])):
        numbers = {TRAINER: workers, REWARDS: 1}
        findings = checks.unready_node(config, 8, numbers, reads=workers == 7)
        assert [finding.key for finding in findings if finding.severity == "error"] == keys


def test_a_fixed_cache_takes_the_place_of_an_engines_share(tmp_path: Path) -> None:
    cache = "explorer.rollout_model.kv_cache_gib"
    both = (f"{SHARES}=0.7", APART)
    engine, trainer, _ = planned(tmp_path, "Qwen3-0.6B", 1, 24, *both, f"{cache}=4").processes
    assert engine.memory is not None and trainer.memory is not None
    assert {need.what: need.bytes for need in engine.memory}["KV cache"] == 4 * GIB
    room = Room(memory=64 * GIB, gpu_memory=24 * GIB, disk=1 << 50)
    for amount, fits in ((4, True), (0.1, False)):
        plan = planned(tmp_path, "Qwen3-0.6B", 1, 24, *both, f"{cache}={amount}")
        assert bool(list(shortages(plan, room))) is not fits


@pytest.mark.parametrize(
    ("recipe", "model", "smaller"),
    [("gsm8k", "Qwen2.5-1.5B", ""), ("lora", "Qwen2.5-7B", "model.lora_configs=[{rank: 32, load_in_4bit: true}]")],
)
def test_the_recipe_for_one_gpu_says_what_the_plan_says(recipe: str, model: str, smaller: str, tmp_path: Path) -> None:
    """Every amount of its head is the plan's, and 24 GiB are enough; 16 GiB are with the setting `smaller` alone."""
    file = Path(__file__).parents[2] / f"configs/{recipe}/one_gpu.yaml"
    planned(tmp_path, model, 1, 24)  # writes the model's shape

    def plan_on(gpu_gib: int, *overrides: str) -> tuple[StagePlan, bool]:
        config = load_config(file, [f"model.model_path={tmp_path}", *overrides])
        (plan,) = plans_of(config, Machine(8, 1), gpu_gib * GIB)
        return plan, not list(shortages(plan, Room(memory=64 * GIB, gpu_memory=gpu_gib * GIB, disk=1 << 50)))

    plan, fits = plan_on(24)
    assert fits and not (smaller and plan_on(16)[1]) and (not smaller or plan_on(16, smaller)[1])
    head = [line for line in file.read_text().splitlines() if line.startswith("#   ")]
    by_model = {line.split(":")[0].strip("# "): line for line in head if " GiB" in line}
    amounts = {}
    for process in plan.processes:
        assert process.memory is not None
        side = process.kind.split()[0]
        amounts |= {f"{side} on the GPU": total(process.memory), f"{side} in memory": total(process.host)}
        amounts |= {f"{side}'s {need.what}": need.bytes for need in process.memory if len(process.memory) > 1}
    assert by_model.keys() <= amounts.keys() and len(by_model) >= 6
    for name, line in by_model.items():
        assert f" {size(amounts[name])}" in line, name
