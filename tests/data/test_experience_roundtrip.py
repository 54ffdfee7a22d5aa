import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from raising import raising
from safetensors.numpy import load, save

from trinity_core.base.errors import DataError
from trinity_core.data.experience import STORE, Experience, arrays_json, from_bytes, from_json, scalars, to_bytes

OPTIONAL = st.sets(st.sampled_from(["logprobs", "versions", "token_rewards", "teacher_logprobs"]))
INFO = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none(), max_size=3)


@st.composite
def experiences(draw):
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return Experience(
        random.integers(0, 99, prompt + response),
        prompt,
        random.random(response) < 0.5,
        reward=draw(st.none() | st.floats(-5, 5)),
        info=draw(INFO),
        metrics={"accuracy": 0.5},
        group="a/1/2",
        run=draw(st.integers(0, 3)),
        state=draw(st.text(max_size=2)),
        temperature=draw(st.none() | st.floats(0.1, 2) | st.just(random.random(response).astype(np.float32) + 0.1)),
        **{name: random.integers(-9, 9, response) for name in draw(OPTIONAL)},
    )


@given(st.lists(experiences(), max_size=4))
def test_bytes_round_trip(those):
    """Including none, and some with arrays that others lack."""
    others = from_bytes(to_bytes(those))
    for one, other in zip(those, others, strict=True):
        for name in Experience.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert other.tokens.dtype == np.int32 and other.action_mask.dtype == np.bool_


def test_experience_of_a_newer_release_is_refused():
    blob = to_bytes([Experience(np.array([1, 2]), 1, np.array([True]))])
    rows = [row | {"later": 1} for row in scalars(blob)]
    with raising(DataError, key=STORE):
        from_bytes(save(load(blob), {"experiences": json.dumps(rows)}))


def test_lengths_must_agree():
    with raising(DataError, key="logprobs"):
        Experience(np.arange(5), 2, np.ones(3), logprobs=np.zeros(2))
    with raising(DataError, key="temperature"):
        Experience(np.arange(5), 2, np.ones(3), temperature=np.ones(2))
    with raising(DataError, key="temperature"):
        Experience(np.arange(5), 2, np.ones(3), temperature=0.0)
    with raising(DataError, key="prompt_length"):
        Experience(np.arange(2), 2, np.ones(0))


def test_newest_version():
    assert Experience(np.arange(4), 1, np.ones(3), versions=np.array([3, -1, 4])).newest_version == 4
    assert Experience(np.arange(4), 1, np.ones(3)).newest_version == -1


@given(experiences())
def test_json_holds_what_training_reads(one):
    other = from_json(json.loads(json.dumps(arrays_json(one))))
    for name in ("tokens", "action_mask", "logprobs", "versions", "token_rewards", "teacher_logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
