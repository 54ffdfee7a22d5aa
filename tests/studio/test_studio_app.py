"""Studio's pages as Streamlit runs them, without a browser: fields, sections of plugins, starts, the key."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from raising import raising
from results.chat_run import chat_run
from streamlit.proto.WidgetStates_pb2 import WidgetStates
from streamlit.testing.v1 import AppTest
from test_studio_records import run_folder

from studio.__main__ import main
from studio.config_draft import ConfigDraft
from studio.docs_page import ORDER
from studio.launch import Launch, trinity, waiting, warm_up
from studio.run_page import findings
from studio.run_table import table_row
from studio.runs import Run, find_runs
from studio.sections import SECTIONS
from studio.settings import StudioSettings, studio_settings
from studio.start_form import validated, what_is_there
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import project_files, read_json, write_json
from trinity_core.base.gate import key_file, server_key
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.exchange.tracking.answers import TaskAnswers, save_answers
from trinity_core.exchange.tracking.metrics_file import MetricsFile, metrics_path
from trinity_core.exchange.tracking.notes import Note
from trinity_core.exchange.tracking.run_record import read_record, record_end, record_path, record_start
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.results.chat import Conversation

APP = Path(__file__).parent.parent.parent / "studio/pages.py"
TEXT = """\
name: mine  # a name
algorithm:
  algorithm_type: grpo
  repeat_times: 8
model: {model_path: org/model, max_prompt_tokens: 16, max_response_tokens: 16}
buffer:
  batch_size: 4
  train_batch_size: 32
  explorer_input:
    taskset: {path: org/data}
"""
PLUGIN = '''
import streamlit as st
from studio.config_draft import ConfigDraft
from studio.sections import SECTIONS

@SECTIONS.register("Budget")
def budget(draft):
    """Sets the steps."""
    st.button("Ten steps", on_click=draft.change, args=("buffer.total_steps", 10))
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a configuration and no server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["app.py", "my.yaml"])
    for variable in ("PREFECT_API_URL", "TRINITY_CHECKPOINT_ROOT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "my.yaml").write_text(TEXT)
    return tmp_path


def opened() -> AppTest:
    page = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not page.exception
    return page


def plan(page: AppTest) -> str:
    """The plan that stands beside the fields."""
    return " ".join(part.proto.body for part in page.get("html"))  # type: ignore[attr-defined]


def labels(page: AppTest) -> list[str]:
    """Of all buttons."""
    return [button.label for button in page.button]


def field(page: AppTest, label: str) -> object:
    [match] = [widget for widget in (*page.text_input, *page.selectbox) if widget.label == label]
    return match


def test_a_field_changes_the_file_and_its_problem_stands_below(folder: Path) -> None:
    page = opened()
    assert "32 rollouts" in plan(page)
    field(page, "repeat_times").set_value("-3").run()  # type: ignore[attr-defined]
    assert "repeat_times: -3" in page.text_area[0].value
    assert any("-3" in error.value for error in page.error)
    field(page, "repeat_times").set_value("16").run()  # type: ignore[attr-defined]
    assert "64 rollouts" in plan(page) and not page.error
    assert (folder / "my.yaml").read_text() == TEXT.replace("repeat_times: 8", "repeat_times: 16")
    press(page, "Undo changes")
    assert field(page, "repeat_times").value == "8" and (folder / "my.yaml").read_text() == TEXT  # type: ignore


def test_text_edited_by_hand_fills_the_fields(folder: Path) -> None:
    page = opened()
    page.text_area[0].set_value(TEXT.replace("grpo", "ppo")).run()
    assert field(page, "algorithm_type").value == "ppo"  # type: ignore[attr-defined]
    page.text_area[0].set_value("name: [").run()
    assert not page.exception and page.error, "invalid YAML is reported and can be fixed"
    press(page, "Undo changes")
    assert not page.error and page.text_area[0].value == TEXT


def test_another_file_is_opened_as_it_is(folder: Path) -> None:
    """A browser sends with its next click what the fields of the file before have shown."""
    (folder / "other.yaml").write_text(TEXT.replace("8", "9"))
    page = opened()
    field(page, "repeat_times").set_value("16").run()  # type: ignore[attr-defined]
    before = page._tree.get_widget_states()
    field(page, "File").set_value("other.yaml").run()  # type: ignore[attr-defined]
    states = page._tree.get_widget_states()
    removed = [state for state in before.widgets if state.id not in {state.id for state in states.widgets}]
    assert removed
    page._run(WidgetStates(widgets=[*removed, *states.widgets]))
    assert page.text_area[0].value == (folder / "other.yaml").read_text() == TEXT.replace("8", "9")
    assert "repeat_times: 16" in (folder / "my.yaml").read_text()


def test_two_tabs_lose_nothing_of_each_other(folder: Path) -> None:
    """Each edits what the other has not shown yet; a text written over another's change is asked about."""
    one, other = opened(), opened()
    field(one, "repeat_times").set_value("16").run()  # type: ignore[attr-defined]
    field(other, "batch_size (tasks)").set_value("2").run()  # type: ignore[attr-defined]
    text = other.text_area[0].value
    assert "repeat_times: 16" in text and "batch_size: 2" in text and (folder / "my.yaml").read_text() == text
    one.text_area[0].set_value("").run()
    assert one.warning and one.text_area[0].value == text
    press(one, "Use this text")
    assert not one.text_area[0].value and not one.warning and not (folder / "my.yaml").read_text()


def test_a_value_that_cannot_be_read_is_not_written(folder: Path) -> None:
    page = opened()
    assert field(page, "repeat_times").set_value("[1").run().toast  # type: ignore[attr-defined]
    assert field(page, "repeat_times").value == "8" and page.text_area[0].value == TEXT  # type: ignore[attr-defined]


def test_a_misspelt_key_is_shown_with_the_key_that_is_meant(folder: Path) -> None:
    page = opened()
    page.text_area[0].set_value(TEXT.replace("repeat_times", "repeat_time")).run()
    assert [text.value for text in page.text if "'repeat_times'" in text.value]


def test_recipes_are_offered_once(folder: Path) -> None:
    """On the page of a file that is empty, else in a dialog; the new file's run has its name."""
    (folder / "my.yaml").unlink()
    page = opened()
    [new] = [button for button in page.button if button.label == "New"]
    assert new.disabled
    [name] = [field for field in page.text_input if field.label == "New file"]
    page.radio[0].set_value("gsm8k").run()
    assert "Trinity-Flows/gsm8k" in plan(page) and "disk" in plan(page), "what the chosen recipe would do and take"
    page.radio[0].set_value("quickstart").run()
    name.set_value("mine.yaml").run()
    page.button(key="create").click().run()
    assert not page.exception and "\nname: mine\n" in (text := (folder / "mine.yaml").read_text())
    assert Path(text.partition("$schema=")[2].splitlines()[0]).is_file(), "editors complete the new file too"


def test_all_settings_are_shown_by_section_or_search(folder: Path) -> None:
    page = opened()
    page.toggle[0].set_value(True).run()
    [find] = [widget for widget in page.text_input if widget.label == "Find"]
    find.set_value("a").run()
    assert not page.exception and field(page, "optimizer.lr_warmup_steps (steps)")
    assert len([*page.text_input, *page.selectbox]) > 100 and page.text_area[0].value == TEXT


def test_a_section_of_a_plugin_changes_the_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plugins").mkdir()
    (folder / "plugins/studio_budget.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "argv", ["app.py", "my.yaml", "--plugin-dir", "plugins"])
    try:
        page = opened()
        assert "Budget" in [heading.value for heading in page.subheader]
        [button] = [button for button in page.button if button.label == "Ten steps"]
        button.click().run()
        assert "total_steps: 10" in page.text_area[0].value
    finally:
        SECTIONS.pop("Budget", None)
        sys.modules.pop("studio_budget", None)


def test_a_plugin_that_has_our_name_is_refused(folder: Path) -> None:
    from trinity_core.base.plugins import load_plugins

    (folder / "studio.py").touch()
    with raising(TrinityError, key=str(folder / "studio.py")):
        load_plugins(folder)


def start_form_of_my_file() -> None:
    """The form as its dialog shows it."""
    from studio.config_draft import ConfigDraft, checked
    from studio.settings import studio_settings
    from studio.start_form import start_form

    draft = ConfigDraft(studio_settings(["my.yaml"]).file)
    start_form(draft, checked(draft.text), studio_settings([]))


def test_a_run_that_cannot_start_is_not_started_and_says_why(folder: Path) -> None:
    page = opened()
    [start] = [button for button in page.button if button.label == "Start"]
    start.click().run(timeout=120)
    assert not page.exception
    assert [error.value for error in page.error if error.value.startswith("model.model_path")], "there is no such model"
    assert labels(page).count("Start") == 1 and not [*(folder / ".trinity/studio").glob("*")]
    page.text_area[0].set_value(f"{TEXT}cluster: {{gpu_per_node: 64}}\n").run()
    assert any("Not on this machine" in warning.value for warning in page.warning)


def test_a_stage_has_fields_of_its_own(folder: Path) -> None:
    (folder / "my.yaml").write_text(f"{TEXT}stages:\n  - stage_name: sft\n    mode: train\n  - stage_name: rft\n")
    page = opened()
    page.button_group[0].set_value("rft").run()
    assert field(page, "repeat_times").placeholder == "all stages: 8"  # type: ignore[attr-defined]
    field(page, "repeat_times").set_value("4").run()  # type: ignore[attr-defined]
    assert page.text_area[0].value.endswith("- stage_name: rft\n    algorithm:\n      repeat_times: 4\n")


def test_a_start_asks_where_and_says_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the configuration names is opened once, before that."""
    validations, started = [], []
    monkeypatch.setattr("studio.start_form.validated", lambda *_: validations.append(1) or ([], ["a notice"]))
    monkeypatch.setattr("studio.start_form.start_run", lambda launch, *_: started.append(launch))
    monkeypatch.setattr("studio.start_form.open_runs", started.append)
    page = AppTest.from_function(start_form_of_my_file, default_timeout=60).run()
    assert page.success and "a notice" in page.warning[0].value and not page.info
    own = record_start(folder / "checkpoints/trinity/mine", {}, "rft")
    page.run()
    assert "mine already exists (running)" in page.info[0].value and page.button[0].disabled
    record_end(folder / "checkpoints/trinity/mine", own, RunOutcome.FAILED)
    page.run().button[0].click().run()
    assert not page.exception and len(validations) == 1
    assert started == [Launch(str(folder / "my.yaml")), "trinity/mine"]


@pytest.mark.parametrize(
    ("settings", "running", "ended"),
    [
        ({}, "cannot be started", "Only what is left"),
        ({"mode": "explore"}, "joins", "joins"),
        ({"mode": "train"}, "joins", "joins"),
        ({"mode": "bench"}, "", ""),
        ({"continue_from_checkpoint": False}, "", ""),
    ],
)
def test_the_start_of_a_run_that_is_there_says_what_it_does(
    tmp_path: Path, settings: dict[str, Any], running: str, ended: str
) -> None:
    config = Config(checkpoint_root_dir=str(tmp_path)).with_values(settings)
    assert what_is_there(config) == ("", True)
    own = record_start(config.job_dir, {}, "rft")
    for expected in (running, ended):
        text, may_start = what_is_there(config)
        assert bool(text) == bool(expected) and expected in text and may_start == ("cannot" not in expected)
        record_end(config.job_dir, own, RunOutcome.FINISHED)


def test_a_plugin_folder_relative_to_the_file_is_found(folder: Path) -> None:
    (folder / "configs/games").mkdir(parents=True)
    (folder / "configs/games/wins.py").write_text(
        "from pathlib import Path\n"
        "from trinity_core.workflows import REWARD_FNS\n"
        "games = Path(__file__).parent\n"
        "(games / 'beside').write_text(' '.join(path.name for path in games.parent.iterdir()))\n"
        "@REWARD_FNS.register('wins')\n"
        "def wins(*, prompt, response, truth, task): return 1.0\n"
    )
    file = folder / "configs/lake.yaml"
    text = TEXT.replace("buffer:", "plugin_dir: games\nbuffer:\n  default_reward_fn_type: wins")
    file.write_text(text)
    lines, _ = validated(ConfigDraft(file), studio_settings([]))
    assert [line.partition(":")[0] for line in lines] == ["model.model_path", "buffer.explorer_input.taskset.path"]
    assert "games" in (folder / "configs/games/beside").read_text()


def test_the_list_of_runs_may_be_empty(folder: Path) -> None:
    page = AppTest.from_function(runs_of_this_folder, default_timeout=60).run()
    assert not page.exception and "quickstart" in page.info[0].value


def runs_of_this_folder() -> None:
    from studio.runs_page import runs_page
    from studio.settings import studio_settings

    runs_page(studio_settings([]))


def with_ticks(*names: str) -> AppTest:
    """The list of runs at an address with ticks."""
    page = AppTest.from_function(runs_of_this_folder, default_timeout=60)
    page.query_params["ticked"] = list(names)
    return page.run()


def press(page: AppTest, label: str) -> None:
    [button] = [button for button in page.button if button.label == label]
    button.click().run()
    assert not page.exception


def test_runs_are_ticked_archived_and_deleted(folder: Path) -> None:
    for name in ("one", "two"):
        job = folder / "checkpoints/p" / name
        record_end(job, record_start(job, {}, "rft"), RunOutcome.FINISHED)
    page = with_ticks("p/one")
    assert {"Open", "Archive", "Delete for good"} <= {*labels(page)}, "ticks come with the address"
    press(page, "Archive")
    assert [*page.dataframe[0].value["run"]] == ["p/two"]
    page.toggle[0].set_value(True).run()
    states = zip(page.dataframe[0].value["run"], page.dataframe[0].value["state"], strict=True)
    assert dict(states) == {"p/one": "finished, archived", "p/two": "finished"}
    press(with_ticks("p/two"), "Delete for good")
    assert [path.name for path in (folder / "checkpoints/p").iterdir()] == ["one"]


def test_a_stage_is_not_deleted_while_its_pipeline_goes_on(folder: Path) -> None:
    whole, stage = (folder / "checkpoints/p" / name for name in ("all", "all_sft"))
    record_start(whole, {}, "pipeline")
    record_end(stage, record_start(stage, {}, "sft"), RunOutcome.FINISHED)
    write_json(JobLayout(whole).stages, {"sft": "all_sft"})
    page = with_ticks("p/all_sft")
    assert "Delete for good" not in labels(page)
    record_end(whole, read_record(whole), RunOutcome.FINISHED)
    assert "Delete for good" in labels(page.run())


def test_a_run_shows_its_note_what_it_waits_for_and_what_the_doctor_finds(folder: Path) -> None:
    job = folder / "checkpoints/p/one"
    record_start(job, {}, "sft")
    for step in range(1, 9):
        MetricsFile(job, "explorer").write(step, {"truncated/mean": 0.97, "reward/zero_variance_groups": 0.9})

    def shown() -> None:
        from pathlib import Path

        from studio.prefect_runs import FlowRunSeen
        from studio.run_page import show_run
        from studio.runs import find_runs
        from studio.settings import studio_settings

        seen = FlowRunSeen("1", "p/one", "sft", "PAUSED", tags={"project": "p", "name": "one"})
        show_run(find_runs(Path("checkpoints"), [seen])[0], [], studio_settings([]))

    page = AppTest.from_function(shown, default_timeout=60).run()
    assert not page.exception and any("Resume" in info.value for info in page.info)
    assert any("cut-off" in warning.value for warning in page.warning)
    assert any("is 0.9, normally at most 0.8" in caption.value for caption in page.caption)
    page.text_input[0].set_value("to be watched").run()
    assert Note.of(job) == Note("to be watched")


def test_two_models_answer_side_by_side(folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline the last stage's model, and the first stage's base."""
    chat_run(folder / "checkpoints/p/one", tiny_folder)
    record_start(folder / "checkpoints/p/all", {}, "pipeline")
    write_json(JobLayout(folder / "checkpoints/p/all").stages, {"rft": "one"})

    def chat() -> None:
        from studio.chat_page import chat_page
        from studio.settings import studio_settings

        chat_page(studio_settings([]))

    page = AppTest.from_function(chat, default_timeout=120).run()
    assert {*page.selectbox[0].options} == {"p/all", "p/one"}
    page.selectbox[0].set_value("p/all").run()
    page.toggle[0].set_value(True).run()
    page.chat_input[0].set_value("How many?").run()
    assert not page.exception and not page.error
    answers = [message.children[0].value for message in page.chat_message if message.name == "assistant"]
    assert len(answers) == 2 and answers[0] == answers[1], "the same weights, greedily"
    assert "vllm serve" in page.code[0].value

    def fails(*_: object) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr(Conversation, "ask", fails)
    page.chat_input[0].set_value("And now?").run()
    asked = [message.children[0].value for message in page.chat_message if message.name == "user"]
    assert asked == ["How many?", "And now?"] * 2 and page.error, "a question is shown before it is answered"


def test_docs_lead_from_page_to_page(folder: Path) -> None:
    def docs() -> None:
        from studio.docs_page import docs_page

        docs_page()

    readme = (project_files() / "README.md").read_text().partition("## Documentation")[2]
    assert [*dict.fromkeys(re.findall(r"\(docs/(\w+)\.md", readme))] == ORDER.split()
    assert {path.stem for path in (project_files() / "docs").glob("*.md")} == {*ORDER.split(), "SKILL"}
    page = AppTest.from_function(docs, default_timeout=60)
    assert page.run().query_params["page"] == "first_run.md"
    page.query_params["page"] = "doctor.md"
    assert page.run().markdown[0].value.startswith("# The doctor")
    page.selectbox[0].set_value("studio.md").run()
    text = page.markdown[0].value
    assert not page.exception and "](pictures" not in text and "](../" not in text
    assert "](?page=flows.md#who-can-reach-what)" in text
    assert page.query_params["page"] == "studio.md" and page.run().markdown[0].value == text


def comparison(*names: str) -> None:
    """The page of several runs, asked for in this order."""
    from studio.run_page import show_comparison
    from studio.runs import find_runs
    from studio.settings import studio_settings

    runs = {run.name: run for run in find_runs(studio_settings([]).checkpoints)}
    show_comparison([runs[name] for name in names], [*runs.values()], studio_settings([]))


def test_the_oldest_run_is_the_baseline_and_every_changed_answer_is_shown(folder: Path) -> None:
    for name, began, right in (("new", 100.0, 5), ("old", 50.0, 0)):
        job = folder / "checkpoints/p" / name
        record_end(job, record_start(job, {"buffer": {"batch_size": right}}, "rft"), RunOutcome.FINISHED)
        write_json(record_path(job), read_json(record_path(job)) | {"began": began})
        MetricsFile(job, "eval").write(4, {"eval/test/accuracy": right / 10})
        tasks = [TaskAnswers(i, str(i), f"test[{i}]", [float(i < right)], "?", ["4"]) for i in range(10)]
        save_answers(job, "test", 4, tasks)
    page = AppTest.from_function(comparison, default_timeout=60, args=("p/new", "p/old")).run()
    assert not page.exception and [*page.dataframe[0].value["run"]] == ["p/old", "p/new"]
    assert page.markdown[0].value.startswith(":green-badge[better]"), "below the table of runs"
    changed = page.dataframe[2].value
    assert len(changed) == 5 and {*changed["baseline"]} == {0.0} and {*changed["score"]} == {1.0}
    assert "--json" not in page.code[0].value and "--all" not in page.code[0].value, "options of a command"


def test_settings_that_are_only_written_in_another_way_are_the_same(folder: Path) -> None:
    for name, path in (("one", "my.yaml"), ("two", str(folder / "my.yaml")), ("other", "elsewhere")):
        record_start(folder / "checkpoints/p" / name, {"model": {"model_path": path}}, "rft")

    for other, tables in (("p/two", 1), ("p/other", 2)):
        page = AppTest.from_function(comparison, default_timeout=60, args=("p/one", other)).run()
        assert not page.exception and len(page.dataframe) == tables


def test_scores_and_rewards_have_a_column_each(tmp_path: Path) -> None:
    for name in ("scored", "rewarded"):
        record_start(tmp_path / "p" / name, {}, "rft")
    for step in (1, 2):
        MetricsFile(tmp_path / "p/scored", "eval").write(step, {"eval/test/accuracy": step / 4})
        MetricsFile(tmp_path / "p/rewarded", "explorer").write(step, {"reward/mean": step / 8})
    rows = {run.name: table_row(run, datetime.now(UTC)) for run in find_runs(tmp_path)}
    curves = {name: (row["scores"], row["rewards"]) for name, row in rows.items()}
    assert curves == {"p/scored": ([0.25, 0.5], []), "p/rewarded": ([], [0.125, 0.25])}
    record_start(tmp_path / "p/whole", {}, "pipeline")
    write_json(JobLayout(tmp_path / "p/whole").stages, {"rft": "rewarded"})
    [whole] = [run for run in find_runs(tmp_path) if run.stages]
    assert table_row(whole, datetime.now(UTC))["rewards"] == [0.125, 0.25], "those of its stage"


def test_that_the_doctor_finds_nothing_is_said(folder: Path) -> None:
    job = folder / "checkpoints/p/one"
    own = record_start(job, {}, "sft")
    findings.clear()

    def shown() -> None:
        from pathlib import Path

        from studio.run_page import show_findings
        from studio.runs import find_runs

        show_findings(find_runs(Path("checkpoints")))

    def caption() -> str:
        page = AppTest.from_function(shown, default_timeout=60).run()
        assert not page.exception and not page.warning
        return page.caption[0].value

    assert "Not checked" in caption()
    MetricsFile(job, "trainer").write(1, {"actor/final_loss": 1.0})
    assert "No findings so far" in caption()
    record_end(job, own, RunOutcome.FINISHED)
    assert "No findings." in caption()


def test_a_checkpoint_that_only_the_next_stage_scored_has_that_score(folder: Path) -> None:
    run_folder(folder / "checkpoints/p/sft", "org/model", {4: 0.0})
    metrics_path(folder / "checkpoints/p/sft").unlink()
    run_folder(
        folder / "checkpoints/p/rft", str(folder / "checkpoints/p/sft/global_step_4/actor/huggingface"), {0: 0.5}
    )
    (folder / "checkpoints/p/all").mkdir()
    write_json(JobLayout(folder / "checkpoints/p/all").stages, {"sft": "sft", "rft": "rft"})

    def shown() -> None:
        import streamlit as st

        from studio.run_page import show_checkpoints
        from studio.runs import find_runs
        from studio.settings import studio_settings

        st.page_link = lambda *_, **__: None
        [sft] = [run for run in find_runs(studio_settings([]).checkpoints) if run.name == "p/sft"]
        show_checkpoints(sft, studio_settings([]))

    page = AppTest.from_function(shown, default_timeout=60).run()
    assert not page.exception and [*page.dataframe[0].value["score"]] == ["0.500"]


def test_the_commands_of_a_pipeline_name_its_last_stage_where_one_is_needed(folder: Path) -> None:
    whole = folder / "checkpoints/p/all"
    own = record_start(whole, {"project": "p", "name": "all"}, "pipeline")
    for stage in ("sft", "rft"):
        record_start(folder / f"checkpoints/p/all_{stage}", {}, stage)
    write_json(JobLayout(whole).stages, {"sft": "all_sft", "rft": "all_rft"})

    def shown() -> None:
        from studio.run_page import show_commands
        from studio.runs import find_runs
        from studio.settings import studio_settings

        pipeline, *stages = find_runs(studio_settings([]).checkpoints)
        show_commands(pipeline, stages[-1], studio_settings([]))

    def asked() -> list[str]:
        return [code.value for code in AppTest.from_function(shown, default_timeout=60).run().code]

    commands = asked()
    assert "trinity doctor --checkpoint-dir checkpoints/p/all" in commands
    assert "trinity log --checkpoint-dir checkpoints/p/all --follow" in commands
    assert any(command.startswith("trinity evaluate") and "--stage rft" in command for command in commands)
    fail_yet = ("trinity chat", "trinity view", "trinity audit")
    assert not [command for command in commands if command.startswith(fail_yet)], "no checkpoint, no rollout"
    run_folder(folder / "checkpoints/p/all_rft", "org/model", {4: 0.5})
    assert "trinity chat --checkpoint-dir checkpoints/p/all" in asked()
    record_end(whole, own, RunOutcome.FINISHED)
    assert "trinity log --checkpoint-dir checkpoints/p/all" in asked(), "--follow would not end"


def test_a_waiting_process_answers_the_next_command(folder: Path) -> None:
    settings = studio_settings([])
    warm_up(settings)
    child = waiting[settings]
    warm_up(settings)
    assert waiting[settings] is child, "one waits"
    asked = ["validate", "--offline", "--json", "--config", "my.yaml"]
    answers = [trinity(asked, settings, 120) for _ in range(2)]
    assert settings not in waiting and child.process.returncode == 0
    assert answers[0] == answers[1] and '"accepted": true' in answers[0], "without one, the command itself is started"


def test_a_refused_run_says_what_to_do(folder: Path) -> None:
    def refused() -> None:
        from pathlib import Path

        from studio.prefect_runs import FlowRunSeen
        from studio.run_page import show_run
        from studio.runs import find_runs
        from studio.settings import studio_settings

        parameters = {"config": "games/my.yaml"}
        seen = FlowRunSeen("1", "odd-name", "rft", "FAILED", "two problems", None, None, "2", parameters)
        show_run(find_runs(Path(), [seen])[0], [], studio_settings([]))

    page = AppTest.from_function(refused, default_timeout=60).run()
    assert not page.exception and page.subheader[0].value == "odd-name (rft games/my.yaml)"
    assert page.text[0].value == "two problems" and "games/my.yaml" in page.info[0].value
    assert not any("Step" in part.proto.body for part in page.get("html"))


@pytest.mark.parametrize("fault", [None, OSError("no space")])
def test_a_retried_run_is_starting_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError | None
) -> None:
    """While its process begins, which takes up to a minute; if it fails, the run is as it was."""
    job = folder / "checkpoints/p/one"
    record_end(job, record_start(job, {"project": "p"}, "rft"), RunOutcome.CANCELLED)
    states: list[str] = []

    def perform(run: Run, _settings: StudioSettings) -> str:
        states.append("asked")
        if fault:
            raise fault
        return "It continues."

    monkeypatch.setattr("studio.run_page.show_state", lambda _, state: states.append(state.value))
    monkeypatch.setattr("studio.run_page.perform", perform)

    def shown() -> None:
        from studio.run_page import show_run
        from studio.runs import find_runs
        from studio.settings import studio_settings

        settings = studio_settings([])
        show_run(find_runs(settings.checkpoints)[0], [], settings)

    page = AppTest.from_function(shown, default_timeout=60).run()
    states.clear()
    press(page, "Retry")
    assert states == ["cancelled", "starting", "asked", "cancelled"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_key_is_named_and_in_no_list_of_processes(
    host: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[dict[str, object]] = []
    monkeypatch.setattr(sys, "argv", ["studio", "--host", host, "--port", "4321"])
    monkeypatch.setattr("streamlit.starlette.App.run", lambda app, config: begun.append(config))
    main()
    [config] = begun
    password, printed = server_key().partition(":")[2], capsys.readouterr().out  # no terminal: the file is named
    assert config["server.address"] == host and config["browser.gatherUsageStats"] is False
    assert f"http://{host}:4321" in printed and str(key_file()) in printed and password not in printed + str(config)
