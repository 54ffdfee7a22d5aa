import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.data.experience import Experience
from trinity_core.errors import DataError


@given(
    prompt=st.integers(1, 5),
    response=st.integers(1, 6),
    seed=st.integers(0, 99),
    optional=st.sets(st.sampled_from(["logprobs", "versions", "token_rewards", "teacher_logprobs"])),
    reward=st.none() | st.floats(-5, 5),
    info=st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none(), max_size=3),
)
def test_bytes_round_trip(prompt, response, seed, optional, reward, info):
    random = np.random.default_rng(seed)
    arrays = {name: random.integers(-9, 9, response) for name in optional}
    one = Experience(
        random.integers(0, 99, prompt + response),
        prompt,
        random.random(response) < 0.5,
        reward=reward,
        info=info,
        metrics={"accuracy": 0.5},
        group="a/1/2",
        run=3,
        **arrays,
    )
    other = Experience.from_bytes(one.to_bytes())
    for name in Experience.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert other.tokens.dtype == np.int32 and other.action_mask.dtype == np.bool_


def test_lengths_must_agree():
    with pytest.raises(DataError, match=r"logprobs has shape \(2,\), but the response has 3 tokens"):
        Experience(np.arange(5), 2, np.ones(3), logprobs=np.zeros(2))
    with pytest.raises(DataError, match="needs a prompt and a response"):
        Experience(np.arange(2), 2, np.ones(0))


def test_newest_version():
    assert Experience(np.arange(4), 1, np.ones(3), versions=np.array([3, -1, 4])).newest_version == 4
    assert Experience(np.arange(4), 1, np.ones(3)).newest_version == -1
