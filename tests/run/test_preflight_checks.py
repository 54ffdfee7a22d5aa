"""What a configuration names is opened before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from unittest import mock

import psutil
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raising
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import DataError, TransientFault
from trinity_core.base.processes import cores, free_memory, memory_limit
from trinity_core.config import ConfigError
from trinity_core.data.files import data_files
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.model_fault import model_fault
from trinity_core.run.configuration import load_checked
from trinity_core.run.preflight import checks, models
from trinity_core.run.preflight.checks import folder_fault, load_ready, require_ready
from trinity_core.run.preflight.needs import ENGINE, REWARDS, TRAINER
from trinity_core.run.preflight.room import Room
from trinity_core.run.stage import StageRequest, choose_stage

INPUT = "buffer.explorer_input"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
JOINED = "data_processor.experience_pipeline.inputs"


@pytest.fixture
def run_file(tiny_folders, tmp_path):
    """A configuration that can start, as a file."""
    taskset = {"name": "words", "path": str(tiny_folders.data), "default_workflow_type": "simple_workflow"}
    taskset["default_reward_fn_type"] = "math_reward"
    taskset["format"] = {"prompt_key": "question", "response_key": "answer"}
    tree = {
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tiny_folders.model), "max_model_len": 128},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"explorer_input": {"taskset": taskset, "eval_tasksets": [{**taskset, "name": "e"}]}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def problems(run_file: Path, *overrides: str) -> dict[str, str]:
    """Key -> message of what keeps the run from starting."""
    try:
        load_ready(run_file, overrides)
    except ConfigError as error:
        return {problem.key: problem.message for problem in error.problems}
    return {}


def on_node(run_file, numbers, *overrides):
    """Keys of the problems that a node of a joined cluster finds, which runs these numbers of processes."""
    findings = checks.unready_node(load_checked(run_file, overrides), 0, numbers, reads=TRAINER in numbers)
    return [finding.key for finding in findings if finding.severity == "error"]


def test_a_run_whose_things_are_there_can_start(run_file, tmp_path):
    assert problems(run_file) == {}
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.model_path=/nowhere/model", "model.model_path"),
        (f"{INPUT}.taskset.path=/nowhere/rows.jsonl", f"{INPUT}.taskset.path"),
        (f"{INPUT}.taskset.split=trian", f"{INPUT}.taskset.split"),
        (f"{INPUT}.eval_tasksets.e.split=exam", f"{INPUT}.eval_tasksets[0].split"),
        (f"{INPUT}.taskset.format.prompt_key=ask", f"{INPUT}.taskset.format"),
        (f"{INPUT}.taskset.format.response_key=reward_model.ground_truth", f"{INPUT}.taskset.format.response_key"),
        ("checkpoint_root_dir=/proc/nope", "checkpoint_root_dir"),
        ("checkpoint_root_dir=/etc/hostname", "checkpoint_root_dir"),
        ("model.chat_template_path=/nowhere.jinja", "model.chat_template_path"),
        ("explorer.auxiliary_models=[{model_path: ./judge, name: judge}]", "explorer.auxiliary_models[0].model_path"),
        (f"{JOINED}={{stars: {{path: ./gone.csv, join_key: id}}}}", f"{JOINED}.stars.path"),
    ],
)
def test_what_is_not_there_is_named_with_its_line(run_file, override, key):
    with raising(ConfigError, key=key) as caught:
        load_ready(run_file, [override])
    [problem] = caught.value.problems
    assert problem.line or override in problem.file
    if "template" in key:  # the trainer writes it into checkpoints
        assert [on_node(run_file, {kind: 1}, override) for kind in (REWARDS, TRAINER, ENGINE)] == [[key], [key], []]


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("nowhere.at_all.Flow", False),
        ("dotted_flows.Flows", False),
        ("dotted_script.Flow", False),
        ("dotted_flows.Flow", True),
    ],
)
def test_a_dotted_workflow_is_imported(run_file, tmp_path, monkeypatch, name, is_found):
    """From the folder in which the run is started too, as the run's own processes do."""
    flow = "from trinity_core.workflows import Workflow\n\n\nclass Flow(Workflow):\n    pass\n"
    (tmp_path / "dotted_flows.py").write_text(flow)
    script = "from argparse import ArgumentParser\nArgumentParser().parse_args(['--of-trinity'])\n"
    (tmp_path / "dotted_script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    key = f"{INPUT}.taskset.default_workflow_type"
    override = f"{key}={name}"
    path, by_key = list(sys.path), problems(run_file, override)
    assert sys.path == path and list(by_key) == [key] * (not is_found)
    assert problems(run_file, override, "mode=train", "buffer.total_steps=1") == {}, "a trainer runs no workflow"
    for kind in (REWARDS, ENGINE):
        assert on_node(run_file, {kind: 1}, override) == list(by_key) * (kind == REWARDS), "the explorer's node"


def test_rows_of_joined_inputs_are_looked_at(run_file, tiny_folders):
    by_key = problems(run_file, f"{JOINED}={{stars: {{path: {tiny_folders.data}, join_key: id}}}}")
    assert list(by_key) == [f"{JOINED}.stars.join_key"]


def test_all_obstacles_are_told_at_once(run_file):
    keys = problems(run_file, "model.model_path=./gone", f"{INPUT}.taskset.path=./gone", "checkpoint_root_dir=/proc/x")
    assert set(keys) == {"model.model_path", f"{INPUT}.taskset.path", "checkpoint_root_dir"}


@pytest.mark.parametrize(("kind", "rows"), [("sft", '{"prompt": "a"}'), ("dpo", '{"prompt": "a", "chosen": "b"}')])
def test_rows_of_the_trainer_are_looked_at(run_file, tmp_path, kind, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{rows}\n" * 3)
    chosen = [f"algorithm.algorithm_type={kind}", f"{EXPERIENCES}.path={path}", "mode=train"]
    key, message = problems(run_file, *chosen).popitem()
    assert key == f"{EXPERIENCES}.format" and f"{path}:1" in message


def test_one_bad_row_keeps_no_run_from_starting(run_file, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('no JSON\n{"question": "1 + 1?", "answer": "2"}\n')
    assert problems(run_file, f"{INPUT}.taskset.path={path}") == {}
    for text, key in (("no JSON\n", "format"), ("", "path")):
        path.write_text(text)
        assert list(problems(run_file, f"{INPUT}.taskset.path={path}")) == [f"{INPUT}.taskset.{key}"]


def test_a_later_stage_needs_no_model_nor_rollouts_yet(run_file, tmp_path):
    tree = yaml.safe_load(run_file.read_text())
    earlier = {"storage_type": "rollouts", "path": str(tmp_path / "runs/not/yet.db")}
    after = {
        "stage_name": "second", "mode": "train", "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": "./written-for-later"},
        "buffer": {"trainer_input": {"experience_buffer": earlier}},
    }  # fmt: skip
    run_file.write_text(yaml.safe_dump({**tree, "stages": [{"stage_name": "first"}, after]}))
    assert problems(run_file) == {}
    run_file.write_text(yaml.safe_dump({**tree, "stages": [after]}))
    assert set(problems(run_file)) == {"stages[0].model.model_path", f"stages[0].{EXPERIENCES}.path"}


def test_models_of_a_joined_cluster_are_left_to_it(run_file):
    assert problems(run_file, "cluster.ray_address=10.0.0.1:6379", "model.model_path=/only/there") == {}
    assert "checkpoint_root_dir" in problems(run_file, "cluster.ray_address=auto", "checkpoint_root_dir=/proc/nope")


def test_a_secret_that_the_explorer_lacks_is_found(run_file, monkeypatch):
    monkeypatch.setenv("HERE", "x")
    command = "default_workflow_type: command_workflow, workflow_args: {command: 'true', secrets: [HERE, NOT_SET]}"
    overrides = (
        f"{INPUT}.eval_tasksets=[{{name: e, path: x, {command}}}]",
        "explorer.rollout_model.enable_openai_api=true",
    )
    key = f"{INPUT}.eval_tasksets[0].workflow_args.secrets"
    message = problems(run_file, *overrides)[key]
    assert "NOT_SET" in message and "HERE" not in message
    assert key not in problems(run_file, *overrides, "explorer.env_vars={NOT_SET: y}")


def test_a_port_in_use_is_told_and_may_pass(run_file):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = ["explorer.rollout_model.enable_openai_api=true", f"explorer.api_port={port}"]
        assert list(problems(run_file, *asked)) == ["explorer.api_port"]
        with pytest.raises(TransientFault):
            require_ready(load_checked(run_file, asked))
    assert problems(run_file, *asked) == {}


def test_more_gpus_than_there_are_are_refused_once(run_file, monkeypatch):
    assert "cluster.gpu_per_node" in problems(run_file, "cluster.gpu_per_node=99")
    monkeypatch.setattr(checks, "survey", lambda: ["a GPU"])
    assert set(problems(run_file, "cluster.gpu_per_node=1", "explorer.rollout_model.engine_num=2")) == {
        "explorer.rollout_model.engine_num"
    }


def test_packages_of_a_base_in_4_bits_are_told(run_file, monkeypatch):
    """vLLM has bitsandbytes by a plugin alone, and refuses the name of the method without it."""
    pinned = Path(__file__).parents[2].joinpath("requirements/qlora.txt").read_text().splitlines()
    names = {line.split("==")[0].replace("-", "_") for line in pinned if "==" in line}
    lora = ["cluster.gpu_per_node=1", "synchronizer.sync_method=memory", "model.lora_configs=[{load_in_4bit: true}]"]
    for there in (set(), {"bitsandbytes"}, names):
        monkeypatch.setattr(models, "find_spec", lambda name, there=there: name in there or None)
        absent = list(models.missing_packages(load_checked(run_file, lora)))
        assert [finding.key for finding in absent] == ["model.lora_configs[0].load_in_4bit"] * (there != names)
        assert all(name in absent[0].message for name in names - there)
        for kind in (ENGINE, TRAINER, REWARDS):
            reported = "model.lora_configs[0].load_in_4bit" in on_node(run_file, {kind: 1}, *lora)
            assert reported is (there != names and kind != REWARDS)
    assert "model.lora_configs[0].load_in_4bit" not in problems(run_file, *lora[:2])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("config.json", b"[]"),
        ("model.safetensors", None),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2-of-2.safetensors"}}'),
        ("model.safetensors.index.json", b"[]"),
    ],
)
def test_a_model_that_is_not_whole_is_told(tiny_folder, tmp_path, name, content):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    assert model_fault(folder) == ""
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    assert model_fault(folder)


def test_a_model_without_a_tokenizer_is_told(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert model_fault(folder) and model_fault(folder, speaks=False) == ""


@contextmanager
def unprivileged():
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_unreadable_model_or_data_are_faults_of_their_own(tiny_folder, name):
    with TemporaryDirectory() as parent:  # `tmp_path` lies below folders that only its owner may enter
        Path(parent).chmod(0o755)
        folder = shutil.copytree(tiny_folder, Path(parent) / "model")
        (folder / name).chmod(0)
        with unprivileged():
            assert str(folder / name) in model_fault(folder)
            if not name:
                with raising(DataError, key=str(folder)):
                    data_files(str(folder))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_download_that_broke_off_is_found(tiny_folder, tmp_path, share):
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(tiny_folder, folder)
    weights = (tiny_folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: int(share * len(weights))])
    assert model_fault(folder)


def test_a_folder_that_can_be_made_is_not_made(tmp_path):
    assert folder_fault(tmp_path / "a/b") == "" and list(tmp_path.iterdir()) == []


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: the names `known`, `gated` and `broken`, and no others."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        status, code = {"known": (200, ""), "gated": (403, "GatedRepo"), "broken": (500, "")}.get(
            name, (404, "RepoNotFound")
        )
        body = json.dumps({"id": name, "siblings": []}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("known", ""),
        ("gated", "unavailable"),
        ("absent", "unavailable"),
        ("broken", "busy"),
        ("not a name", "unavailable"),
    ],
)
def test_a_name_on_the_hub_is_asked_for(hub, run_file, name, code):
    reported = checks.validate(run_file, [f"model.model_path='{name}'"], offline=False).problems
    assert [(problem.key, problem.code) for problem in reported] == ([("model.model_path", code)] if code else [])


def test_a_data_set_on_the_hub_is_asked_for(hub, run_file):
    assert problems(run_file, f"{INPUT}.taskset.path=known") == {}
    assert f"{INPUT}.taskset.path" in problems(run_file, f"{INPUT}.taskset.path=absent")


def test_what_is_in_the_cache_needs_no_hub(hub, run_file, tmp_path):
    assert problems(run_file, "model.model_path=me/mine")
    (tmp_path / "cache/models--me--mine/snapshots/abc").mkdir(parents=True)
    assert problems(run_file, "model.model_path=me/mine") == {}


def test_a_hub_that_is_away_is_a_fault_that_passes(monkeypatch, run_file):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    config = load_checked(run_file, ["model.model_path=nobody/nothing"])
    with pytest.raises(TransientFault):
        require_ready(config)


def test_validate_opens_what_it_can(run_file):
    def validated(*arguments):
        result = CliRunner().invoke(app, ["validate", "--config", str(run_file), *arguments])
        return result.exit_code, result.output

    assert validated()[0] == 0 and "Models, data and ports were not opened" not in validated()[1]
    code, text = validated("model.model_path=./gone", "--json")
    report = json.loads(text)
    assert code == 2 and not report["accepted"] and report["problems"][0]["key"] == "model.model_path"
    assert "value" not in report["problems"][0], "a value may be a secret"
    code, text = validated("model.model_path=./gone", "--offline", "--json")
    assert code == 0 and json.loads(text)["accepted"] and not json.loads(text)["opened"]


def test_a_run_that_does_not_fit_is_refused_with_its_numbers(run_file, monkeypatch):
    few = Room(memory=1 << 30, gpu_memory=0, disk=1 << 20)
    monkeypatch.setattr(checks, "room_for", lambda _: few)
    steps = "buffer.total_steps=10"
    config = load_checked(run_file, [steps])
    memory, disk = (finding.message for finding in checks.oversized(config))
    assert "1 GiB" in memory and "1 MiB" in disk
    with raising(ConfigError, key="cluster.allow_oversized"):
        require_ready(config)
    require_ready(load_checked(run_file, [steps, "cluster.allow_oversized=true"]))


@pytest.mark.parametrize(
    ("overrides", "lengths", "refused", "noted"),
    [
        ([], "long", True, False),
        (["explorer.rollout_model.enable_openai_api=true"], "long", False, False),
        ([], "all", True, False),
        ([], "many", False, True),
        ([], "short", False, False),
    ],
)
@pytest.mark.parametrize("data_set", ["taskset", "eval_tasksets[0]"])
def test_prompts_that_are_too_long_are_found_among_the_first_rows(
    run_file: Path, tmp_path: Path, data_set: str, overrides: list[str], lengths: str, refused: bool, noted: bool
) -> None:
    questions = {
        "short": ["1 + 1"] * 2,
        "long": ["1 + 1 + " * 40] * 2,
        "all": ["1 + 1 + " * 40] * 20,
        "many": ["1 + 1 + " * 40] * 20 + ["1 + 1"],
    }[lengths]
    settings = ["model.max_prompt_tokens=40", *overrides]
    for name in ("taskset", "eval_tasksets[0]"):
        rows, texts = tmp_path / f"{name}.jsonl", questions if name == data_set else ["1 + 1"]
        rows.write_text("".join(json.dumps({"question": text, "answer": "2"}) + "\n" for text in texts))
        settings += [f"{INPUT}.{name}.path='{rows}'"]
    with mock.patch.object(checks, "policy_encoder", wraps=checks.policy_encoder) as loaded:
        validated = checks.validate(run_file, settings, offline=False)
    assert loaded.call_count == 1, "for each finding that needs the tokenizer"
    assert ([problem.key for problem in validated.problems] == ["model.max_prompt_tokens"]) is refused
    listed = (notice for stage in validated.stages for notice in stage["notices"])
    notices = [notice for notice in listed if "model.max_prompt_tokens" in notice]
    assert len(notices) == noted
    if noted:
        run = choose_stage(StageRequest(load_ready(run_file, settings)), is_ready=True)
        assert set(notices) <= set(run.warnings), "a run logs them"


@pytest.mark.parametrize("value", ["eighty", "88.5"])
def test_a_prompt_limit_of_the_wrong_type_is_refused_once(run_file: Path, value: str) -> None:
    limits = ("model.max_model_len=null", "model.max_response_tokens=8", f"model.max_prompt_tokens={value}")
    assert [*problems(run_file, *limits)] == ["model.max_prompt_tokens"]


def test_memory_of_a_container_is_its_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert memory_limit(tmp_path, tmp_path / "own") == 1 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, tmp_path / "own") == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("own", "limited", "names"),
    [
        ("4:memory:/slurm/job_7/step_0\n0::/\n", "memory/slurm/job_7", ("limit_in_bytes", "usage_in_bytes")),
        ("0::/slurm/job_7/step_0\n", "slurm/job_7", ("max", "current")),
    ],
)
def test_memory_of_a_job_is_what_every_group_above_it_leaves(own, limited, names, tmp_path):
    """A job of Slurm or a service of systemd sees all control groups of its machine, and none at the root limits it."""
    root, mine = tmp_path / "cgroup", tmp_path / "own"
    mine.write_text(own)
    (root / limited).mkdir(parents=True)
    for name, text in zip(names, ("1000000", "900000"), strict=True):
        (root / limited / f"memory.{name}").write_text(f"{text}\n")
    (root / limited / "memory.stat").write_text("inactive_file 300000\ntotal_inactive_file 300000\n")
    assert memory_limit(root, mine) == 1_000_000
    assert free_memory(root, mine) == 400_000


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"job/cpu.max": "300000 100000", "own": "0::/job/step"}, 3),
        ({"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000", "own": "3:cpu:/job"}, 3),
        ({}, 64),
    ],
)
def test_cores_of_a_container_are_its_share(files, limit, tmp_path, monkeypatch):
    """On a machine of 64 cores a container of two would start 64 threads and 16 reward workers, and stand still."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores(tmp_path, tmp_path / "own") == limit


@pytest.fixture
def other_model(tiny_folder, tmp_path):
    """A copy of the small model, to be changed."""
    return shutil.copytree(tiny_folder, tmp_path / "other")


TEMPLATE = (
    '{% for m in messages if m.role in ["user", "assistant"] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMAT = f"{EXPERIENCES}.format={{prompt_type: messages, tools_key: tools}}"
SFT = ["mode=train", "algorithm.algorithm_type=sft", FORMAT]


def written(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("mode", ["both", "explore", "bench", "train"])
def test_a_run_that_renders_needs_a_chat_template(run_file, other_model, mode):
    (other_model / "chat_template.jinja").unlink()
    settings = [f"model.model_path={other_model}", f"mode={mode}", "synchronizer.sync_method=checkpoint"]
    assert ("model.custom_chat_template" in problems(run_file, *settings)) is (mode != "train")
    assert "model.custom_chat_template" not in problems(run_file, *settings, f"model.custom_chat_template='{TEMPLATE}'")
    assert "model.custom_chat_template" in problems(run_file, *settings, *SFT[:2])


def test_a_template_with_a_syntax_error_is_named(run_file, other_model, tmp_path):
    broken = "{% for m in messages %}"
    assert "model.custom_chat_template" in problems(run_file, f"model.custom_chat_template='{broken}'")
    (tmp_path / "own.jinja").write_text(broken)
    assert "model.chat_template_path" in problems(run_file, f"model.chat_template_path={tmp_path / 'own.jinja'}")
    (other_model / "chat_template.jinja").write_text(broken)
    assert "model.model_path" in problems(run_file, f"model.model_path={other_model}")


def test_tokens_of_the_first_rows_have_embeddings(run_file, other_model, tmp_path):
    tokenizer = load_tokenizer(str(other_model))
    tokenizer.add_tokens([f"<new{number}>" for number in range(100)])
    tokenizer.save_pretrained(str(other_model))
    model = f"model.model_path={other_model}"
    assert problems(run_file, model) == {}, "unused ones do no harm"
    rows = written(tmp_path, {"question": "What is <new99>?", "answer": "3"})
    assert set(problems(run_file, model, f"{INPUT}.taskset.path={rows}")) == {f"{INPUT}.taskset.format"}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<new99>"}]
    path = f"{EXPERIENCES}.path={written(tmp_path, {'messages': talk})}"
    assert set(problems(run_file, model, path, *SFT)) == {f"{EXPERIENCES}.format"}


ANSWERED = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]}
LONG = {"messages": [{"role": "user", "content": "hm " * 200}, {"role": "assistant", "content": "x"}]}


@pytest.mark.parametrize(
    "rows, is_usable",
    [
        ([{**ANSWERED, "tools": [{"name": "f"}]}], False),
        ([ANSWERED], True),
        ([{"messages": [{"role": "critic", "content": "hm"}, {"role": "assistant", "content": "x"}]}], False),
        ([LONG], False),
        ([LONG] * 40, False),
        ([LONG] * 40 + [ANSWERED], True),
    ],
    ids=["tools", "usable", "role", "long", "all long", "first long"],
)
def test_rows_to_learn_from_are_rendered(run_file, tmp_path, rows, is_usable):
    """A run is refused if none of its first rows can be used, nor any row after them."""
    settings = [*SFT, f"{EXPERIENCES}.path={written(tmp_path, *rows)}"]
    reported = problems(run_file, *settings, f"model.custom_chat_template='{TEMPLATE}'")
    assert set(reported) == (set() if is_usable else {f"{EXPERIENCES}.format"}), reported


REWARDS_FILE = """
from trinity_core.workflows import REWARD_FNS
from trinity_core.workflows.rewards.functions import reward_of

@REWARD_FNS.register("fine")
def fine(prompt, response, truth, task): return 1.0

@REWARD_FNS.register("of_another_field")
def of_another_field(completions, **kwargs): return [1.0]

@REWARD_FNS.register("of_trl_with_columns")
def of_trl_with_columns(completions, prompts, answer, **columns):
    assert prompts == ["1 + 2?"] and isinstance(completions[0], str)
    return [float(text == right) for text, right in zip(completions, answer)]

@REWARD_FNS.register("of_trl_without_column")
def of_trl_without_column(completions, solution): return [1.0]

@REWARD_FNS.register("needs_others")
def needs_others(answer, nonsense): return 1.0

@REWARD_FNS.register("breaks")
def breaks(prompt, response, truth, task):
    return float(truth.value == response)

@REWARD_FNS.register("lacks_a_column")
def lacks_a_column(prompt, response, truth, task): return float(task["solution"] == response)

@REWARD_FNS.register("wants_a_box")
def wants_a_box(prompt, response, truth, task):
    import re
    return float(re.search("boxed{(.*)}", response).group(1) == truth)

@REWARD_FNS.register("misspelt")
def misspelt(prompt, response, truth, task): return float(respones)

@REWARD_FNS.register("strict")
def strict(prompt, response, truth, task):
    from trinity_core.base.errors import DataError
    if not truth.isdigit(): raise DataError("the reference answer is no number", key="answer")
    return 1.0

@REWARD_FNS.register("runs_tests")
def runs_tests(prompt, response, truth, task):
    exec(response + chr(10) + task["tests"], {})
    return 1.0

@REWARD_FNS.register("of_verl")
def of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0

@REWARD_FNS.register("without_the_rest")
def without_the_rest(response, truth): return 1.0

@REWARD_FNS.register("a_class")
class AClass:
    def __call__(self, **inputs): return 1.0

@REWARD_FNS.register("lists")
def lists(response, **inputs): return [1.0]

@REWARD_FNS.register("texts")
def texts(response, **inputs): return {"score": "1.0"}

REWARD_FNS.register("of_trl")(reward_of({"one": lambda completions, **_: 1.0}))

@REWARD_FNS.register("abstains")
def abstains(response, **inputs): return None

@REWARD_FNS.register("choosy")
def choosy(prompt, response, truth, task): return float(response.index("box"))
"""


UNCALLABLE = ("needs_others", "of_verl", "without_the_rest", "a_class")
"""Refused at load, and so before any answer is judged."""
FAILING = ("of_trl_without_column", "breaks", "lacks_a_column", "misspelt", "lists", "texts", "of_trl", "strict")
NOTED = ("wants_a_box", "abstains", "choosy", "runs_tests")
FINE = ("fine", "of_another_field", "of_trl_with_columns", "math_reward")


@pytest.mark.parametrize("rewards", [UNCALLABLE, FAILING, (*NOTED, *FINE)], ids=["uncallable", "failing", "fine"])
def test_reward_functions_judge_an_answer_to_the_first_rows(run_file, tmp_path, rewards):
    """Each that of a task set of its own."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / f"trial_{tmp_path.name}.py").write_text(REWARDS_FILE)
    sets = []
    for reward in rewards:
        answer = {"math_reward": "the sum", "strict": "three"}.get(reward, "3")
        row = {"question": "1 + 2?", "answer": answer, "tests": "assert add(1, 2) == 3"}
        path, columns = tmp_path / f"{reward}.jsonl", {"prompt_key": "question", "response_key": "answer"}
        path.write_text(f"{json.dumps(row)}\n" * 3)
        sets.append({"name": reward, "path": str(path), "format": columns, "default_reward_fn_type": reward})
    settings = [f"{INPUT}.taskset=null", f"{INPUT}.tasksets={json.dumps(sets)}", f"plugin_dir={tmp_path / 'plugins'}"]
    settings.append(f"{INPUT}.default_workflow_type=math_workflow")
    validated = checks.validate(run_file, settings, offline=False)
    messages = {problem.key: problem.message for problem in validated.problems}
    keys = {reward: f"{INPUT}.tasksets[{place}].default_reward_fn_type" for place, reward in enumerate(rewards)}
    expected = {reward: keys[reward] for reward in rewards if reward in UNCALLABLE + FAILING}
    if rewards == FAILING:
        expected["strict"] = f"{INPUT}.tasksets[{FAILING.index('strict')}].format.response_key"
        line = REWARDS_FILE[: REWARDS_FILE.index("truth.value")].count("\n") + 1
        assert f"trial_{tmp_path.name}.py, line {line})" in messages[keys["breaks"]]
    assert list(messages) == list(expected.values())
    notices = [notice for stage in validated.stages for notice in stage["notices"]]
    noted = [reward for reward in rewards if any(keys[reward] in notice for notice in notices)]
    assert noted == [reward for reward in rewards if reward in NOTED]


RECIPES = Path(checks.__file__).parents[3] / "configs"
SMALL = (
    "dpo/dpo", "lora/quickstart", "mix/mix", "opmd/opmd", "ppo/ppo", "quickstart/quickstart", "sft/sft", "tools/tools",
)  # fmt: skip


@pytest.mark.parametrize("recipe", SMALL)
def test_recipes_for_the_small_model_can_start(tiny_folders, tmp_path, monkeypatch, recipe):
    for name, folder in {"MODEL_PATH": tiny_folders.model, "TASKSET_PATH": tiny_folders.data}.items():
        monkeypatch.setenv(f"TRINITY_{name}", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    assert problems(RECIPES / f"{recipe}.yaml", "cluster.allow_oversized=true", "cluster.gpu_per_node=0") == {}
