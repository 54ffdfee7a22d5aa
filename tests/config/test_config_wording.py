"""How problems read: one example of each code. Every other test asks for the key and the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_core.config import ConfigError, config_from_text

GOOD = (Path(__file__).parent / "documents/quick_start.yaml").read_text()
BUFFER = "buffer.trainer_input.experience_buffer"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.repeat_time=8", "is not a known key. Did you mean 'repeat_times'?"),
        ("mode=trian", "must be one of both, train, explore, serve, bench, not 'trian'. Did you mean 'train'?"),
        ("algorithm.optimizer.lr=fast", "must be a number, not 'fast'."),
        ("algorithm.optimizer=3", "must be a section with keys, not 3."),
        ("explorer.api_port=70000", "must be at least 0 and at most 65535, not 70000."),
        ("explorer.env_vars={a: b, a: c}", "is given twice."),
        ("model.model_path=${model.path}", "refers to 'model.path', which does not exist."),
        ("model.model_path=''", "must be given: a Hugging Face folder or hub name."),
        ("name=a/b", "names a folder, so it cannot be 'a/b'."),
        ("stages=[{stage_name: a}, {stage_name: a}]", "two stages are called 'a'; names must differ."),
        ("trainer.worker_num=2", "asks for 2 GPUs, but the engines leave 1 of 2."),
        (f"{BUFFER}.path=mysql://me:secret@host/db", "must be a database, not 'mysql://…': write postgresql://user"),
        (
            "algorithm.entropy_loss_fn_args.entropy_coeff=0.1",
            "is no argument of 'default', which takes entropy_coef, target_entropy, entropy_coef_step. "
            "Did you mean 'entropy_coef'?",
        ),
        (
            "algorithm.kl_loss_fn=low_var_k",
            "must be one of none, k1, k2, k3, low_var_kl, abs, corrected_k3 (or come with plugin_dir), not "
            "'low_var_k'. Did you mean 'low_var_kl'?",
        ),
        (
            "model.model_path=${oc.env:NOT_SET}",
            "environment variable NOT_SET is not set; set it, or give a default: ${oc.env:NOT_SET,DEFAULT}.",
        ),
        ("buffer.batch_size", "an override must read key.path=value."),
        ("trainer.trainer_config_path=nowhere.yaml", "nowhere.yaml: there is no such file."),
        ("project=[", "the value is not valid YAML."),
    ],
)
def test_problems_read_well(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(GOOD, [override])
    head, problem = str(caught.value).splitlines()
    assert head == "The configuration has 1 problem:"
    assert problem.startswith(f"  - override '{override}': ") and line in problem
