"""Nobody waits without end for a process that lives but does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trinity_core.config import Config
from trinity_core.errors import TransientFault
from trinity_core.runtime import actors, faults, pulse
from trinity_core.runtime.faults import ProcessLost, result_of
from trinity_core.runtime.pulse import within
from trinity_core.runtime.trainers import Trainers


def silent(*verbs: str) -> Any:
    """An actor that is asked and does not answer."""
    return SimpleNamespace(**{verb: SimpleNamespace(remote=lambda *_, verb=verb: verb) for verb in verbs})


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(faults, "POLL_SECONDS", 0.01)


def no_check() -> None:
    pass


def test_a_wait_with_a_limit_says_what_is_lacking() -> None:
    with pytest.raises(ProcessLost, match=r"the moon has not set within 0 s\. Start the same run again"):
        result_of("ref", within(0.05, "the moon has not set", no_check))

    def lost() -> None:
        raise TransientFault("Ray has died")

    with pytest.raises(TransientFault, match="Ray has died"):
        result_of("ref", within(60, "the moon has not set", lost))


def test_kept_processes_that_do_not_answer_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "LOAD_SECONDS", 0.05)
    monkeypatch.setattr(actors, "SILENCE_SECONDS", 0.05)
    with pytest.raises(ProcessLost, match="engines kept from an earlier stage have not loaded some/model within"):
        actors.load_folder([silent("load")], "some/model", no_check)
    with pytest.raises(ProcessLost, match="workers kept from an earlier stage have not let it go within"):
        actors.renew([silent("renew")], Config(), no_check)


def test_a_conversion_ends_if_its_worker_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.05)
    cluster: Any = None
    trainers = Trainers(cluster, Config(), cluster, no_check, lambda: False)
    trainers.workers = [silent("convert", "progress")]
    with pytest.raises(ProcessLost, match=r"trainer_0 has not answered for 0 s"):
        trainers.convert(3)
