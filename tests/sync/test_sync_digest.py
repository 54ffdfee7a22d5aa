"""Digests of tensors and of an engine's parameters: what changes them, and what does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import WeightSyncError
from trinity_core.exchange.sync.tensorfile import CHUNK, digest, value_digest
from trinity_core.exchange.sync.weight_check import PACKED, match, verify_parameters
from trinity_core.rollout.inference.weight_receiver import parameter_digests
from trinity_core.training.state import BLOCK, sum_of_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def mixed(bits: int) -> int:
    """The mix of one 16- or 32-bit pattern, in plain integers."""

    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    spread = signed(bits * 2654435761)
    return signed((spread ^ (spread >> 15)) * 2246822519)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_value_digest_is_the_sum_of_mixes(values):
    assert value_digest(torch.tensor(values, dtype=torch.int32)) == sum(map(mixed, values))
    narrow = torch.tensor([v >> 16 for v in values], dtype=torch.int16).view(torch.bfloat16)
    assert value_digest(narrow) == sum(mixed(v >> 16) for v in values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_of_any_dtype_and_shape(dtype):
    for shape in ((), (0, 3), (5,), (3, 4, 5)):
        tensor = (torch.rand(shape) * 9).to(dtype)
        changed = tensor.clone()
        assert digest(tensor) == digest(changed)
        if changed.numel():
            changed.view(-1)[-1] = 1 - changed.view(-1)[-1].to(torch.int64)
            assert value_digest(changed) != value_digest(tensor)


def test_value_digest_of_parts_adds_up():
    whole = torch.randn(2 * CHUNK["cpu"] // 100 + 7, 100)
    for parts in (whole.split(13), whole.T.split(9), [torch.nn.functional.pad(whole, (3, 0, 0, 5))]):
        assert sum(value_digest(part) for part in parts) == value_digest(whole)
    assert value_digest(whole.flip(0)) == value_digest(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 5, BLOCK, 3 * BLOCK + 7])
def test_trained_weights_are_digested_with_their_places_and_in_parts(dtype, count):
    """As ZeRO 3 partitions them; `value_digest` leaves places out, because engines store weights in another order."""
    tensor = torch.arange(1, count + 1).to(dtype)
    whole = int(sum_of_bits(tensor))
    for parts in (2, 3, 5):
        size = -(-count // parts)
        digests = [int(sum_of_bits(part, i * size)) for i, part in enumerate(tensor.split(size))]
        assert (sum(digests) - whole) % 2**64 == 0
    moved = [tensor.flip(0), tensor.roll(1), tensor.roll(BLOCK)]
    assert all(int(sum_of_bits(other)) != whole for other in moved if not torch.equal(other, tensor))
    assert int(sum_of_bits(tensor[:0], count)) == 0


def test_every_16_bit_pattern_has_its_own_mix():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    assert len({mixed(bits) for bits in patterns.tolist()}) == 2**16
    assert mixed(0) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_compared_in_the_engines_dtype(dtype):
    published = torch.randn(100)
    assert value_digest(published, dtype) == value_digest(published.to(vars(torch)[dtype]))
    assert value_digest(torch.arange(5), dtype) == value_digest(torch.arange(5))


def test_norms_beside_packed_weights_are_no_part_of_them():
    names = [f"m.attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
    published = {name: 3**i for i, name in enumerate(names)}
    held = {name: published[name] for name in names[3:]} | {"m.attn.qkv_proj.weight" + PACKED: 1 + 3 + 9}
    verify_parameters(1, published, [held])
    with raising(WeightSyncError, key="m.attn.qkv_proj.weight" + PACKED):
        verify_parameters(1, published | {names[0]: 2}, [held])


def attention(ranks, heads=4, kv_heads=2, seed=0):
    """Published q, k, v and norm, and what `ranks` tensor-parallel ranks hold of them: sharded, or copied."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {x: torch.randn(h, 8, generator=generator) for x, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    norm = torch.randn(8, generator=generator)
    held = []
    for rank in range(ranks):
        kv_rank, kv_ranks = rank // max(ranks // kv_heads, 1), min(ranks, kv_heads)
        shards = [tensors["q"].chunk(ranks)[rank], *(tensors[x].chunk(kv_ranks)[kv_rank] for x in "kv")]
        held.append({"m.attn.qkv_proj.weight": value_digest(torch.cat(shards)), "m.norm.weight": value_digest(norm)})
    published = {f"m.attn.{x}_proj.weight": value_digest(t) for x, t in tensors.items()}
    return published | {"m.norm.weight": value_digest(norm)}, held


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_and_copies_of_all_ranks_add_up(ranks):
    published, held = attention(ranks)
    verify_parameters(5, published, held)
    other, _ = attention(ranks, seed=1)
    with raising(WeightSyncError, key="m.norm.weight"):
        verify_parameters(5, other, held)
    other["m.norm.weight"] = published["m.norm.weight"]
    with raising(WeightSyncError, key="m.attn.qkv_proj.weight"):
        verify_parameters(5, other, held)
    held[-1]["m.norm.weight"] += 1
    with raising(WeightSyncError, key="m.norm.weight"):
        verify_parameters(5, published, held)


class Leaf(torch.nn.Module):
    """A module with one parameter, `weight`."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))


def modules(**parts):
    root = torch.nn.Module()
    for name, part in parts.items():
        setattr(root, name, part)
    return root


def mixture(shared, gate_is_shared, bias):
    """A layer of experts as vLLM has it: the runner of the experts holds other parts of the layer too; its tensors."""
    gate, fused, down = Leaf(4, 8), Leaf(12, 8), Leaf(8, 6)
    gate_up, downs = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    published = {"gate.weight": gate.weight, "experts.gate_up_proj": gate_up, "experts.down_proj": downs}
    routed = modules(w13_weight=torch.nn.Parameter(gate_up), w2_weight=torch.nn.Parameter(downs))
    experts, layer = modules(routed_experts=routed), modules(gate=gate)
    if gate_is_shared:
        experts.gate = gate
    if bias:
        gate.e_score_correction_bias = routed.e_score_correction_bias = torch.nn.Parameter(torch.randn(4))
        published["gate.e_score_correction_bias"] = gate.e_score_correction_bias
    if shared:
        expert = modules(gate_up_proj=fused, down_proj=down)
        names = {"gate_proj": fused.weight[:6], "up_proj": fused.weight[6:], "down_proj": down.weight}
        published |= {f"{shared}.{name}.weight": tensor for name, tensor in names.items()}
        setattr(layer, shared, expert)
        if shared == "shared_expert":
            expert.expert_gate = layer.shared_expert_gate = Leaf(1, 8)
            published["shared_expert_gate.weight"] = expert.expert_gate.weight
        experts._shared_experts = modules(_layer=expert)
    layer.experts = experts
    return modules(mlp=layer), {f"mlp.{name}": tensor.detach().clone() for name, tensor in published.items()}


@pytest.mark.parametrize(
    ("shared", "gate_is_shared", "bias"),
    [
        ("", False, False),
        ("", True, False),
        ("shared_expert", True, False),
        ("shared_experts", False, True),
        ("shared_experts", True, True),
    ],
    ids=["Mixtral", "Qwen3", "Qwen2", "GLM-4.5", "DeepSeek"],
)
def test_parameters_that_modules_share_are_matched_once(shared, gate_is_shared, bias):
    model, published = mixture(shared, gate_is_shared, bias)
    held = parameter_digests(model, "float32")
    verify_parameters(1, {name: value_digest(tensor) for name, tensor in published.items()}, [held])
    for name in published:
        other = {n: value_digest(tensor + 1 if n == name else tensor) for n, tensor in published.items()}
        with pytest.raises(WeightSyncError):
            verify_parameters(1, other, [held])


def test_tied_weights_must_be_published_alike():
    embeddings, head = Leaf(4, 8), torch.nn.Module()
    head.weight = embeddings.weight
    held = parameter_digests(modules(embed=embeddings, head=head), "float32")
    values = {"embed.weight": value_digest(embeddings.weight.detach())}
    for published in (values, values | {"head.weight": values["embed.weight"]}):
        verify_parameters(1, published, [held])
    with raising(WeightSyncError, key="head.weight"):
        verify_parameters(1, values | {"head.weight": 3}, [held])


def test_parameters_that_a_loader_computes_are_left_out():
    """Mamba layers hold -exp(A_log)."""
    from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader

    a_log = torch.randn(4)
    mixer = modules(A=torch.nn.Parameter(torch.empty(4)), D=torch.nn.Parameter(torch.randn(4)))
    mixer.A.weight_loader = composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x))
    mixer.A.weight_loader(mixer.A, a_log)
    held = parameter_digests(modules(mixer=mixer), "float32")
    published = {"mixer.A_log": value_digest(a_log), "mixer.D": value_digest(mixer.D.detach())}
    verify_parameters(1, published, [held])
    with raising(WeightSyncError, key="mixer.D"):
        verify_parameters(1, published | {"mixer.D": 3}, [held])


def test_weights_that_the_engine_rounds_are_not_compared():
    """What was published says nothing of their bits."""
    layer = modules(weight=torch.nn.Parameter(torch.arange(64, dtype=torch.uint8), requires_grad=False))
    layer.quant_method = object()
    before = parameter_digests(modules(layer=layer), "bfloat16")
    verify_parameters(1, {"layer.weight": 3}, [before])
    layer.weight.data[0] = 9
    assert parameter_digests(modules(layer=layer), "bfloat16") != before


def test_untouched_and_unpublished_parameters_are_errors():
    with raising(WeightSyncError, key="a.bias"):
        verify_parameters(1, {"a.weight": 3}, [{"a.weight": 3, "a.bias": 4}])
    with raising(WeightSyncError, key="lm_head.weight" + PACKED):
        verify_parameters(1, {"lm_head.weight": 3}, [{"lm_head.weight": 3, "lm_head.weight" + PACKED: None}])


LAYER = "model.layers.0."


def test_experts_and_renamed_models_are_matched_as_a_whole():
    experts = [f"{LAYER}mlp.experts.{i}.{x}_proj.weight" for i in range(2) for x in ("gate", "up", "down")]
    stacked = [LAYER + "mlp.experts.w13_weight", LAYER + "mlp.experts.w2_weight"]
    assert list(match(stacked, {*experts, LAYER + "mlp.gate.weight"})) == [(stacked, sorted(experts))]
    assert list(match(["language_model.model.norm.weight"], {"model.norm.weight"})) == [
        (["language_model.model.norm.weight"], ["model.norm.weight"])
    ]
    assert list(match(["model.extra.weight"], set())) == [(["model.extra.weight"], [])]
