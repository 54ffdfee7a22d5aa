"""Updates with the real engine and one worker: micro-batches never change the result, and every kind of loss learns."""

import inspect
import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import make_answers, make_batch, rows_of, trained_models
from raising import raising
from saving_helpers import save
from torch.utils._python_dispatch import TorchDispatchMode

from trinity_core.algorithms import ADVANTAGES, ALGORITHMS, KL_FNS, POLICY_LOSSES, MetricAccumulator, Objective
from trinity_core.algorithms.kl import KLFn
from trinity_core.algorithms.losses.policy_loss import PolicyLoss
from trinity_core.base.errors import DataError, InputError, TrinityError
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.exchange.sync.versions import VersionPublisher
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.training.batch import make_batch as lay_out
from trinity_core.training.checkpoint import load
from trinity_core.training.distributed import SequenceGroup, join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import FastPaths, Policy
from trinity_core.training.publish import PolicyWeights, trainer_rank
from trinity_core.training.state import buffers, optimizer_state, weights
from trinity_core.training.trainer import RewardSignal
from trinity_core.training.update import _losses, micro_batches, prepare, spare_backward

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    return join(0, 1, *meeting_point(), use_gpu=False)


@pytest.fixture
def learner(make_config, ranks):
    def make(algorithm="grpo", **overrides):
        torch.manual_seed(0)
        return Learner(make_config(algorithm, **overrides), 4, ranks)

    return make


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: numbers and sizes that it reads from tensors."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return operation(*args, **(kwargs or {}))


def _train(learner, batches):
    metrics = [learner.step(batch, step) for step, batch in enumerate(batches, 1)]
    return metrics, {name: w.clone() for name, w in weights(learner.engine)}


def _assert_same(one, other, skip=("timing_s/", "experience/micro_batches")):
    (metrics, weights), (other_metrics, other_weights) = one, other
    for a, b in zip(metrics, other_metrics, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(skip):
                assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-4), name
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"algorithm__loss_agg_mode": "seq-mean-token-mean", "algorithm__entropy_loss_fn_args": "{entropy_coef: 0.1}"},
        {"trainer__trainer_config__actor_rollout_ref__actor__ppo_epochs": 2},
    ],
)
def test_one_large_micro_batch_equals_many_small_ones(learner, overrides):
    batches = [make_batch(1), make_batch(2)]
    whole = _train(learner(**overrides), batches)
    many = learner(**overrides)
    many.cut = replace(many.cut, max_tokens=25)
    cut = _train(many, batches)
    rows = _train(
        learner(
            **overrides,
            trainer__use_dynamic_bsz="false",
            trainer__trainer_config__actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2,
        ),
        batches,
    )
    assert whole[0][0]["experience/micro_batches"] == 1
    assert cut[0][0]["experience/micro_batches"] > 4
    assert rows[0][0]["experience/micro_batches"] == 8
    _assert_same(whole, cut)
    _assert_same(whole, rows)


def test_reference_model_has_its_own_budget_and_offload(learner):
    """Less memory, the same step."""
    ref, batch = "trainer__trainer_config__actor_rollout_ref__ref__", make_batch(1)

    def counted(**overrides):
        """The result of the step, and the number of passes of the reference model."""
        trained, passes = learner(**overrides), []
        trained.reference.module.register_forward_pre_hook(lambda *_: passes.append(1))
        return _train(trained, [batch]), len(passes)

    whole, once = counted()
    small, several = counted(**{f"{ref}log_prob_max_token_len_per_gpu": 64, f"{ref}fsdp_config__param_offload": True})
    rows, four = counted(
        trainer__use_dynamic_bsz="false",
        trainer__trainer_config__actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=16,
        **{f"{ref}log_prob_micro_batch_size_per_gpu": 4},
    )
    assert once == 1 and several >= sum(e.response_length for e in batch) / 64 and four == 4
    assert small[0][0]["experience/micro_batches"] == rows[0][0]["experience/micro_batches"] == 1
    _assert_same(whole, small)
    _assert_same(whole, rows)


def test_logprobs_use_the_sampling_temperature(learner):
    """From the task sets, or from the model if another run explores; given answers were not sampled."""
    model = {"model__temperature": 0.5}
    tasks = {"buffer__explorer_input__taskset": "{path: x, rollout_args: {temperature: 0.8}}"}
    file = {"buffer__trainer_input__experience_buffer__path": "data.jsonl"}
    assert learner(**model).temperature == 0.5
    assert learner(**model, **tasks).temperature == 0.8
    assert learner(model__temperature=0).temperature == learner("sft", **model, **file).temperature == 1.0


@pytest.mark.parametrize("at_once", [2**40, 0])
def test_rows_have_log_probs_at_their_own_temperature(learner, monkeypatch, at_once):
    """Log-probs, entropies and gradients of a mixed micro-batch equal those of its rows at one temperature each."""
    monkeypatch.setattr("trinity_core.training.policy.LOGITS_AT_ONCE", at_once)
    module, temperatures = learner().engine.module, [(None, 0.5, 2.0)[i % 3] for i in range(16)]
    head = module.lm.get_output_embeddings().weight

    def found(own, chosen):
        rows = make_batch(1)
        for row, temperature in zip(rows, own, strict=True):
            row.temperature = temperature
        micro = build_micro(rows, range(16), max(row.response_length for row in rows))
        grids = [micro.grid(values)[chosen] for values in module(micro, 1.3, "loss")]
        return grids + [torch.autograd.grad(grid.sum(), head, retain_graph=True)[0] for grid in grids]

    for temperature in (None, 0.5, 2.0):
        chosen = [i for i in range(16) if temperatures[i] == temperature]
        for mixed, alone in zip(found(temperatures, chosen), found([temperature] * 16, chosen), strict=True):
            torch.testing.assert_close(mixed, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("algorithm", "stage"), [("grpo", None), ("grpo", 0), ("ppo", 3)])
def test_half_precision_resumes_bit_for_bit(learner, tmp_path, stage, algorithm):
    overrides = {} if stage is None else {"trainer__zero_stage": stage}
    one = learner(algorithm, trainer__dtype="bfloat16", **overrides)
    _train(one, [make_batch(1), make_batch(2)])
    save(one, 2, tmp_path)

    def third():
        metrics = one.step(make_batch(3), 3)
        tensors = {name: t.clone() for state in (weights, optimizer_state) for name, t in state(one.engine)}
        return {name: v for name, v in metrics.items() if not name.startswith("timing_s/")}, tensors

    (metrics, tensors), _ = third(), load(one, tmp_path)
    again, restored = third()
    assert again == metrics
    assert restored.keys() == tensors.keys() and "master.model.norm.weight" in tensors
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize("stage", [0, 2])
def test_half_precision_resumes_in_float32_with_its_master_weights(learner, tmp_path, stage):
    half, full = learner(trainer__dtype="bfloat16", trainer__zero_stage=2), learner(trainer__zero_stage=stage)
    _train(half, [make_batch(1)])
    save(half, 1, tmp_path)
    masters = {name: t.clone() for name, t in optimizer_state(half.engine) if name.startswith("master.")}
    load(full, tmp_path)
    assert masters
    for name, tensor in weights(full.engine):
        assert torch.equal(tensor, masters[f"master.{name}"]), name


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this processor does not take float16")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_keeps_its_loss_scale(learner, tmp_path, stage):
    """Otherwise each resume would skip updates until the scale is found again."""
    rewards = {"algorithm__advantage_fn": "reinforce", "algorithm__loss_agg_mode": "seq-mean-token-sum"}

    def made():
        return learner(trainer__dtype="float16", trainer__zero_stage=stage, **rewards)

    def norm(of, step):
        return of.step([replace(e, reward=20.0 * e.reward) for e in make_batch(step)], step)["actor/grad_norm"]

    one, resumed = made(), made()
    norms = [norm(one, step) for step in range(1, 9)]
    assert np.isinf(norms[0]) and np.isfinite(norms[-1]), "the first scales are too large for these gradients"
    save(one, 8, tmp_path)
    load(resumed, tmp_path)
    assert norm(resumed, 9) == norm(one, 9) < np.inf


def test_buffers_are_saved_loaded_and_converted(learner, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    glm = Glm4MoeForCausalLM(config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    values = glm.get_buffer(bias).normal_().clone()
    glm.save_pretrained(tmp_path / "glm")
    tokenizer.save_pretrained(tmp_path / "glm")

    one = learner(model__model_path=tmp_path / "glm", algorithm__kl_loss_fn="none", trainer__zero_stage=3)
    assert list(buffers(one.engine)) == [bias]
    step = tmp_path / "global_step_1"
    step.mkdir()
    save(one, 1, step)
    buffers(one.engine)[bias].zero_()
    load(one, step)
    assert torch.equal(dict(weights(one.engine))[bias], values)
    shutil.copytree(tmp_path / "glm", step / "actor" / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    converted = convert(step)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(converted).get_buffer(bias), values)

    (shard,) = (step / "actor").glob("model_*.pt")
    tensors = torch.load(shard, weights_only=True)
    torch.save({name: t for name, t in tensors.items() if name != bias}, shard)
    shutil.rmtree(converted)
    with pytest.raises(DataError, match=bias):
        convert(step, tmp_path / "glm")


@pytest.mark.parametrize("stage", [2, 3])
def test_half_precision_sums_micro_batches_in_float32(learner, stage):
    """512 times a gradient, then 20 times the gradient itself: in bfloat16 the sum would not change."""
    engine = (trained := learner(trainer__dtype="bfloat16", trainer__zero_stage=stage)).engine
    (micro,) = micro_batches(lay_out(make_batch(1), torch.device("cpu")), trained.cut, trained.ranks)

    def norm(*factors):
        for i, factor in enumerate(factors, 1):
            engine.backward(factor * engine(micro, 1.0, "none")[0].mean(), last=i == len(factors))
        return float(engine.step(0.0))

    assert norm(512, *[1] * 20) == pytest.approx(532 * norm(1), rel=1e-3)


def _unscored(experience):
    return replace(experience, reward=None, action_mask=np.zeros_like(experience.action_mask))


@pytest.mark.parametrize(
    ("algorithm", "rewards", "warnings", "flat"),
    [("grpo", (1, 1, 1, 1), 1, 16), ("grpo", (1, None, 1, 1), 0, 0), ("sft", (1, 1, 1, 1), 0, 0)],
)
def test_rewards_that_never_differ_within_a_group_give_one_warning(learner, caplog, algorithm, rewards, warnings, flat):
    """`None`: the step's rewards differ."""
    overrides = {"buffer__trainer_input__experience_buffer__path": "given.jsonl"} if algorithm == "sft" else {}
    one, signal = learner(algorithm, **overrides), RewardSignal()
    for step, reward in enumerate(rewards, 1):
        batch = [replace(e, reward=e.reward if reward is None else float(reward)) for e in make_batch(step)]
        signal.note(batch, one.step(batch, step))
    assert len([r for r in caplog.records if r.levelname == "WARNING" and r.name.endswith("trainer")]) == warnings
    assert signal.flat_groups == flat


def test_expert_rows_do_not_form_groups():
    batch, signal = make_batch(1), RewardSignal()
    mixed = [*batch, *(replace(e, is_expert=True, group=f"expert {number}") for number, e in enumerate(batch))]
    signal.note(mixed, {"advantages/zero_rows": 1.0})
    assert signal.groups == len({e.group for e in batch})


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_batch_of_unscored_answers_changes_nothing(learner, algorithm):
    """All verifiers failed: the run continues, and no momentum or weight decay moves a model."""
    trained = learner(algorithm)
    trained.step(make_batch(1), 1)
    before = [w.clone() for engine in trained_models(trained).values() for _, w in weights(engine)]
    metrics = trained.step([_unscored(e) for e in make_batch(2)], 2)
    assert metrics["skipped_step"] == 1.0 and metrics["experience/unscored_rows"] == 16.0
    after = [w for engine in trained_models(trained).values() for _, w in weights(engine)]
    assert trained.advantages == [] and all(map(torch.equal, after, before))


@pytest.mark.parametrize("unscored", [0, 1])
def test_loss_and_norm_equal_a_plain_loop(learner, tiny_model, unscored):
    """GRPO's first step computed with only transformers and autograd, over the answers with a verdict."""
    from transformers import AutoModelForCausalLM

    scored = make_batch(1)[unscored:]
    batch = [_unscored(e) for e in make_batch(1)[:unscored]] + scored
    (metrics,), _ = _train(learner(algorithm__kl_loss_fn="none", algorithm__rollout_correction="none"), [batch])
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, loss = sum(int(e.action_mask.sum()) for e in scored), torch.zeros(())
    for e in scored:
        rewards = torch.tensor([other.reward for other in scored if other.group == e.group])
        advantage = (e.reward - rewards.mean()) / (rewards.std() + 1e-6)
        logprobs = lm(torch.tensor(e.tokens[None]).long()).logits[0].log_softmax(-1)
        response = torch.tensor(e.tokens[e.prompt_length :]).long()
        chosen = logprobs[e.prompt_length - 1 : -1].gather(-1, response[:, None])[:, 0][torch.tensor(e.action_mask)]
        loss = loss - (advantage * (chosen - chosen.detach()).exp()).sum() / total
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(("args", "adapted"), [({"beta": 1}, False), ({"teacher": "reference"}, False),
                                               ({"beta": 0.5, "teacher": "reference"}, True)])  # fmt: skip
def test_a_teacher_with_another_prompt_is_followed_over_the_whole_vocabulary(learner, tiny_model, args, adapted):
    """Loss and gradient of two steps against a plain loop; packed, padded and in small micro-batches."""
    from transformers import AutoModelForCausalLM

    overrides = {"algorithm__policy_loss_fn_args": json.dumps(args), "algorithm__rollout_correction": "none"}
    if adapted:
        overrides["model__lora_configs"] = "[{lora_rank: 4, lora_alpha: 12}]"
    batches = [rows_of("opsd_full", step) for step in (1, 2)]
    whole = _train(learner("opsd_full", **overrides), batches)
    for difference in ({"max_tokens": 30}, {"packing": False}):
        other = learner("opsd_full", **overrides)
        other.cut = replace(other.cut, **difference)
        _assert_same(whole, _train(other, batches))
    first, second = whole[0]
    if adapted:
        return
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, loss = sum(int(e.action_mask.sum()) for e in batches[0]), torch.zeros(())

    def logprobs(prompt, e):
        tokens = np.concatenate([prompt, e.tokens[e.prompt_length :]])
        return lm(torch.tensor(tokens[None]).long()).logits[0, len(prompt) - 1 : -1].log_softmax(-1)[e.action_mask]

    for e in batches[0]:
        teacher, student = logprobs(e.teacher_prompt, e).detach(), logprobs(e.tokens[: e.prompt_length], e)
        p, q = (student, teacher) if args.get("beta") else (teacher, student)
        loss = loss + (p.exp() * (p - q)).sum() / total
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
    assert first["actor/opsd_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert first["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert second["actor/opsd_loss"] > 0


def test_a_reference_that_goes_back_to_the_host_still_teaches(learner, monkeypatch):
    """Its head is used after its pass, when a move to the host has put other data into its parameters."""
    taught = learner("opsd_full", algorithm__policy_loss_fn_args="{teacher: reference}")
    module = taught.reference.module

    def move(device):
        for p in module.parameters() if device == "host" else ():
            p.data = p.data[:0]

    monkeypatch.setattr(module, "to", move)
    taught.reference.rests_on = "host"
    batch = lay_out(rows_of("opsd_full", 1), torch.device("cpu"))
    [micro, *_] = micro_batches(batch, taught.cut, taught.ranks)
    assert len(taught._teacher(micro).head.weight) == taught.model_config.vocab_size


@pytest.mark.parametrize(
    ("overrides", "own_head", "shared", "key"),
    [
        ({"algorithm__algorithm_type": "opsd_full"}, False, False, "algorithm.policy_loss_fn"),
        ({"algorithm__algorithm_type": "opsd_full"}, True, True, "trainer.ulysses_sequence_parallel_size"),
        ({"algorithm__advantage_fn": "clipv"}, False, False, "algorithm.advantage_fn"),
    ],
)
def test_a_model_whose_distributions_cannot_be_compared_is_refused(make_config, overrides, own_head, shared, key):
    parts = SimpleNamespace(objective=Objective(make_config(**overrides).algorithm))
    parts.ranks = SimpleNamespace(sequence=SequenceGroup(0, 2, None) if shared else None)
    with raising(TrinityError, key=key):
        Learner._require_head(parts, FastPaths(False, own_head), "gemma2")


def test_mix_takes_a_batch_without_an_expert(learner):
    mix = learner("mix", buffer__trainer_input__auxiliary_buffers__expert__path="data.jsonl")
    metrics = mix.step(make_batch(1), 1)
    assert metrics["actor/grad_norm"] > 0 and "experience/expert_rows" not in metrics


def test_ppo_trains_a_critic_and_waits_for_it(learner):
    ppo = learner(
        "ppo",
        trainer__trainer_config__trainer__critic_warmup=2,
        trainer__trainer_config__critic__optim__lr=0.01,
        algorithm__optimizer="{lr: 0.0001, lr_warmup_steps: 4}",
    )
    rates = [0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4]
    steps = [ppo.step(make_batch(9), step) for step in range(1, 9)]
    assert "actor/pg_loss" not in steps[1] and "actor/pg_loss" in steps[2]
    assert "actor/lr" not in steps[1] and [step["actor/lr"] for step in steps[2:]] == pytest.approx(rates)
    assert steps[-1]["critic/vf_loss"] < 0.7 * steps[0]["critic/vf_loss"]
    assert steps[0]["values/mean"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_worker_trains_saves_and_resumes_without_deepspeed(learner, tmp_path, monkeypatch, dtype):
    """Its import probes thirty operators."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    first, second = learner(trainer__dtype=dtype), learner(trainer__dtype=dtype)
    first.step(make_batch(1), 1)
    save(first, 1, tmp_path)
    load(second, tmp_path)
    _assert_same(_train(first, [make_batch(2)]), _train(second, [make_batch(2)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nonfinite_gradient_changes_nothing_and_is_not_waited_for(learner, dtype):
    """The device decides; on a GPU, reading a number would let it run dry."""
    grpo, batch = learner(trainer__dtype=dtype), make_batch(1)

    def state():
        moments = (moment for p in grpo.engine.masters.values() for moment in grpo.engine.optimizer.state[p].values())
        return [tensor.clone() for tensor in (*grpo.engine.masters, *grpo.engine.masters.values(), *moments)]

    grpo.step(batch, 1)
    before = state()
    grpo.engine.backward(
        grpo.zero_losses()["actor"]() + float("nan") * next(grpo.engine.module.parameters()).sum(), True
    )
    with Reads() as reads:
        norm = grpo.engine.step(0.1)
    assert not norm.isfinite() and not reads.count
    torch.testing.assert_close(state(), before, atol=0, rtol=0)
    assert grpo.step(batch, 2)["actor/grad_norm"] > 0
    assert not all(torch.equal(*pair) for pair in zip(state(), before, strict=True))


@pytest.mark.parametrize("more", [{}, {"trainer__gradient_checkpointing": True, "algorithm__entropy_loss_fn": "mix"}])
def test_host_waits_for_no_micro_batch(learner, more):
    """Numbers are read a few times a step, whatever the number of micro-batches: with a reference, and all metrics."""
    grpo, counts = learner(**more), []
    for step, tokens in enumerate((10_000, 70), 1):
        grpo.cut = grpo.reference_cut = replace(grpo.cut, max_tokens=tokens)
        with Reads() as reads:
            metrics = grpo.step(make_batch(1), step)
        counts.append((metrics["experience/micro_batches"], reads.count))
    (one, reads_of_one), (several, reads_of_several) = counts
    assert one == 1 and several > 1 and reads_of_one == reads_of_several


@pytest.mark.parametrize(
    ("overrides", "second_update", "spared"),
    [
        ({}, False, 9),
        ({}, True, 9),
        ({"algorithm__kl_loss_fn": "k2"}, False, 1),
        ({"algorithm__entropy_loss_fn_args": "{entropy_coef: 0.1}"}, False, 1),
    ],
)
def test_rows_without_a_gradient_are_spared_the_backward_pass(learner, overrides, second_update, spared):
    """Two of four groups have equal rewards, and a row of another has no token with a loss; in float64."""
    rows = [replace(row, reward=float(place % 2 and place >= 8)) for place, row in enumerate(make_batch(1))]
    rows[9].action_mask[:] = False
    grpo = learner(**{"algorithm__kl_loss_fn": "none"} | overrides)
    objective, module = grpo.objective, grpo.engine.module.double()
    batch = lay_out(rows, torch.device("cpu"), objective.needs_of_rows)
    rollout = batch.rollout_logprobs
    micros = micro_batches(batch, grpo.cut, grpo.ranks)
    prepared, _ = prepare(objective, batch, rollout if second_update else None, rollout, None)
    results = []
    for learning, idle in ((micros, ()), spare_backward(objective, prepared, micros, grpo.cut, grpo.ranks)):
        accumulator = MetricAccumulator()
        with torch.no_grad():
            list(_losses(grpo.engine, objective, prepared, idle, 1.0, 1, accumulator))
        for loss in _losses(grpo.engine, objective, prepared, learning, 1.0, 1, accumulator):
            loss.backward()
        results.append(([p.grad for p in module.parameters()], accumulator.metrics()))
        module.zero_grad()
    assert sum(len(micro.rows) for micro in idle) == spared
    (gradients, metrics), (fewer_gradients, same_metrics) = results
    assert all(gradient.any() for gradient in gradients)
    torch.testing.assert_close(fewer_gradients, gradients, rtol=1e-9, atol=1e-13)
    assert same_metrics == pytest.approx(metrics)


def test_nonfinite_loss_ends_run_and_names_its_cause(learner):
    grpo = learner()
    next(grpo.reference.module.parameters()).data.fill_(float("nan"))
    before = {name: w.clone() for name, w in weights(grpo.engine)}
    with pytest.raises(TrinityError, match=r"train step 5.*reference model's log-probs"):
        grpo.step(make_batch(1), 5)
    assert all(torch.equal(before[name], w) for name, w in weights(grpo.engine))


def test_critic_learns_nothing_from_expert_rows(learner):
    """The critic's update is that of the rollouts alone: no gradient on expert tokens, and no share in the mean."""
    updated = []
    for experts in (False, True):
        ppo = learner("ppo", trainer__trainer_config__critic__optim__lr=0.01)
        rows = make_batch(3)
        if experts:
            rows += [replace(row, is_expert=True, reward=None, logprobs=None, versions=None) for row in make_batch(4)]
        batch = lay_out(rows, torch.device("cpu"))
        micros = ppo.critic.micro_batches(batch)
        values = ppo.critic.values(batch, micros)
        returns = torch.where(batch.excluded[:, None], 0.0, 0.8) * batch.mask
        metrics = ppo.critic.update(batch, micros, values, returns, 1)
        updated.append((metrics, ppo.critic.engine.module.value_head.weight.detach().clone()))
    (alone, weight), (beside, other) = updated
    assert beside["critic/vf_loss"] == pytest.approx(alone["critic/vf_loss"], rel=1e-5)
    assert beside["critic/grad_norm"] == pytest.approx(alone["critic/grad_norm"], rel=1e-4)
    torch.testing.assert_close(other, weight, atol=1e-6, rtol=1e-4)


def test_student_at_another_temperature_is_refused():
    def prepared(temperature):
        rows = [
            replace(row, temperature=temperature, teacher_logprobs=np.full(row.response_length, -2.0))
            for row in make_batch(1)
        ]
        batch = lay_out(rows, torch.device("cpu"))
        return prepare(
            Objective(ALGORITHMS["on_policy_distill"]), batch, torch.full(batch.mask.shape, -3.0), None, None
        )

    for same in (None, 1.0):
        torch.testing.assert_close(prepared(same)[0].advantages, prepared(1.0)[0].advantages)
    with raising(InputError, key="rollout_args.temperature"):
        prepared(0.5)


@pytest.mark.parametrize(("advantage", "passes"), [("grpo", 0), ("high_entropy", 1), ("clipb", 1), ("clipv", 1)])
def test_what_an_advantage_needs_of_the_policy_takes_one_pass(learner, monkeypatch, advantage, passes):
    trained = learner(algorithm__advantage_fn=advantage, algorithm__kl_loss_fn="none")
    count = 0

    def forward(self, *args, forward=Policy.forward):
        nonlocal count
        count += not torch.is_grad_enabled()
        return forward(self, *args)

    monkeypatch.setattr(Policy, "forward", forward)
    metrics = trained.step(make_batch(1), 1)
    assert count == passes and metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("algorithm", "warnings"), [("mix", 0), ("grpo", 1), ("raft", 1)])
def test_expert_rows_that_a_loss_learns_nothing_from_give_one_warning(learner, caplog, algorithm, warnings):
    path = {"buffer__trainer_input__auxiliary_buffers__expert__path": "data.jsonl"} if algorithm == "mix" else {}
    one = learner(algorithm, **path)
    for step in (1, 2):
        one.step([*make_batch(step), *make_answers(2)], step)
    assert len([r for r in caplog.records if r.levelname == "WARNING" and r.name.endswith("learner")]) == warnings


def test_a_train_step_gives_parts_every_input_that_their_registries_list(learner, monkeypatch):
    """With parts that take all inputs: the learner loads a reference and a critic, and computes old log-probs."""

    def taking_all(names, result):
        def part(**inputs):
            assert all(value is not None for value in inputs.values())
            return result(inputs)

        kind = inspect.Parameter.KEYWORD_ONLY
        part.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in sorted(names)])
        return part

    loss = taking_all(POLICY_LOSSES.inputs, lambda data: (-data["advantages"] * data["logprobs"], {}))
    advantage = taking_all(
        ADVANTAGES.inputs, lambda data: (data["mask"] * data["rewards"][:, None], {}, None, data["mask"])
    )
    kl = taking_all(KL_FNS.inputs, lambda data: data["logprobs"] - data["ref_logprobs"])
    monkeypatch.setitem(POLICY_LOSSES, "all", PolicyLoss("all", loss))
    monkeypatch.setitem(ADVANTAGES, "all", advantage)
    monkeypatch.setitem(KL_FNS, "all", KLFn("all", kl))
    rows = [replace(row, teacher_logprobs=row.logprobs, teacher_prompt=row.tokens[:2]) for row in make_batch(1)]
    parts = {"policy_loss_fn": "all", "advantage_fn": "all"}
    for terms in ({"kl_loss_fn": "none"}, {"kl_loss_fn": "all", "kl_penalty_fn": "all"}):
        trained = learner(**{f"algorithm__{key}": value for key, value in (parts | terms).items()})
        assert trained.critic is not None and trained.reference is not None
        assert trained.step(rows, 1)["actor/grad_norm"] > 0


def test_zero_stages_train_alike_and_publish_each_tensor_once(learner, tmp_path):
    batches = [make_batch(step) for step in (1, 2, 3)]
    plain = _train(learner(), batches)
    for stage in (2, 3):
        other = learner(trainer__zero_stage=stage)
        _assert_same(plain, _train(other, batches))
        _assert_tied_embeddings_are_published_once(other, tmp_path / str(stage))


def _assert_tied_embeddings_are_published_once(trained, folder):
    """In one file with each tensor once, from which engines load both names."""
    versions = CheckpointVersions(folder)
    rank = trainer_rank(PolicyWeights(trained.engine), trained.ranks, lambda version: True, lambda: False)
    VersionPublisher(versions, rank).publish(1, WeightCheck((1, 2), (-1.0,)))
    loaded = dict(versions.load(1))
    assert torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])
    held = {name: tensor.clone() for name, tensor in weights(trained.engine)}
    assert loaded.keys() == {*held, "lm_head.weight"} and all(torch.equal(loaded[name], held[name]) for name in held)
    [file] = folder.rglob("*.safetensors")
    assert file.stat().st_size < sum(tensor.nbytes for tensor in held.values()) + 10_000


def test_nonfinite_value_or_reward_error_names_the_step(learner):
    ppo = learner("ppo", algorithm__kl_loss_fn="none")
    batch = make_batch(1)
    batch[2].reward = float("inf")
    with pytest.raises(TrinityError, match=r"train step 2: .*inf"):
        ppo.step(batch, 2)
    ppo.critic.engine.module.value_head.weight.data.fill_(float("nan"))
    with raising(TrinityError, key="values"):
        ppo.step(make_batch(1), 3)
