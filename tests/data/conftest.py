import pytest
from hypothesis import settings

from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tiny import make_tokenizer

settings.register_profile("patient", deadline=None)  # the machine may be busy: no example is timed
settings.load_profile("patient")


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def encoder(tokenizer):
    return ChatEncoder(tokenizer)
