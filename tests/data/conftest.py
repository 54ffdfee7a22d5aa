import pytest

from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tiny import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def encoder(tokenizer):
    return ChatEncoder(tokenizer)
