"""How problems read: one example of each code. Every other test asks for the key and the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_core.config import ConfigError, config_from_text

GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.repeat_time=8", "is not a known key. Did you mean 'repeat_times'?"),
        ("mode=trian", "must be one of both, train, explore, serve, bench, not 'trian'. Did you mean 'train'?"),
        ("algorithm.optimizer.lr=fast", "must be a number, not 'fast'."),
        ("explorer.api_port=70000", "must be less than or equal to 65535, not 70000."),
        ("explorer.env_vars={a: b, a: c}", "is given twice."),
        ("model.model_path=${model.path}", "Interpolation key 'model.path' not found."),
        ("stages=[{stage_name: a}, {stage_name: a}]", "two stages are called 'a'; names must differ."),
        ("buffer.batch_size", "an override must read key.path=value."),
        ("nosuch.key=1", "override 'nosuch.key=1': nosuch: is not a known key."),
        ("trainer.trainer_config_path=nowhere.yaml", "nowhere.yaml: there is no such file."),
    ],
)
def test_problems_read_well(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(GOOD, [override])
    head, problem = str(caught.value).splitlines()
    assert head == "The configuration has 1 problem:"
    assert problem.startswith(f"  - override '{override}': ") and line in problem
