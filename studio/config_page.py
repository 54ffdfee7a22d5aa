"""The configuration page: a file's fields by section, with its problems, plan and text next to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time_ns
from typing import Any

import streamlit as st
import yaml
from ruamel.yaml.error import YAMLError

from studio.config_draft import CheckedDraft, ConfigDraft, by_field, by_section, checked, yaml_files
from studio.dialogs import closed, confirm_save, new_dialog, recipe_form, save, save_as
from studio.form import FormField, form_fields, in_sections, matching
from studio.sections import SECTIONS
from studio.settings import StudioSettings
from studio.start_form import begin, is_busy, look, measure, show_task, start_dialog, take_outcome
from studio.texts import escaped, hanging
from trinity_core.config import ConfigError, Problem, to_dict
from trinity_core.config.findings import value_at
from trinity_core.config.yaml_text import parse_value

DEFAULT = ""
"""Choice that means that the key is not given."""
COMMON = "All stages"


def config_page(settings: StudioSettings, show_runs: Callable[[str], None]) -> None:
    """Draw the page; `show_runs` opens the page of a run that was started."""
    draft = present_draft(settings)
    closed()
    take_outcome()
    try:
        tree, error = draft.tree(), ""
    except ConfigError as fault:
        tree, error = {}, str(fault)
    checked = present_findings(draft) if tree else CheckedDraft([])
    form, beside = st.columns([3, 2], gap="large")
    with form:
        choose_file(draft, settings, offers_recipes=bool(tree or error))
        if error:
            st.error(f"{error}\n\nCorrect the text on the right, or discard the changes.")
        elif not tree:
            recipe_form(settings, draft.file)
        else:
            fill_in(draft, tree, checked.problems)
            for title, draw in SECTIONS.items():
                with st.container(border=True):
                    st.subheader(title)
                    draw(draft)
    with beside, st.container(key="beside"):
        save_and_start(draft, checked, settings, show_runs)
        if tree:
            show_findings(draft, checked, settings)
        edit_text(draft)


def present_draft(settings: StudioSettings) -> ConfigDraft:
    """Return this session's draft: initially that of the file in the address, or of the command line's."""
    draft: ConfigDraft | None = st.session_state.get("draft")
    if draft is None:
        file = settings.root / st.query_params.get("file", "")
        if file.suffix not in (".yaml", ".yml") or not file.resolve().is_relative_to(settings.root):
            file = settings.file
        draft = st.session_state.draft = ConfigDraft.opened(file, settings.drafts)
    # A rerun requested before the address changed restores the old address.
    if st.query_params.get("file") != (shown := settings.shown(draft.file)):
        st.query_params["file"] = shown
    return draft


def present_findings(draft: ConfigDraft) -> CheckedDraft:
    """Return problems and plan of the text, cached because the page is drawn more often than the text changes."""
    key = (draft.file, text := draft.text)
    checked_key, stored = st.session_state.get("checked", (None, None))
    if checked_key != key or stored is None:
        stored = checked(text, draft.file)
        st.session_state["checked"] = (key, stored)
    return stored


def choose_file(draft: ConfigDraft, settings: StudioSettings, offers_recipes: bool) -> None:
    """Choose another file below the root. Unsaved changes are kept. The page of an empty file shows recipes itself."""
    listed = [str(path) for path in yaml_files(settings.root)]
    shown = settings.shown(draft.file)
    there = presented("file", shown)

    def load() -> None:
        try:
            if (file := there.entered()) is not None:
                there.value = file
                st.session_state.draft = ConfigDraft.opened(settings.root / file, settings.drafts)
        except (OSError, UnicodeDecodeError) as error:
            st.toast(f"The file cannot be read: {error}")

    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox("File", list(dict.fromkeys([shown, *listed])), key=there.key, on_change=load)
        if st.button("New", icon=":material/add:", help="Begin from a recipe", disabled=not offers_recipes):
            new_dialog(settings, draft.file)


def fill_in(draft: ConfigDraft, tree: Any, problems: Sequence[Problem]) -> None:
    """Show the fields: the beginner's in their sections, or the expert's in one section or search result."""
    stages = {str(stage.get("stage_name")): index for index, stage in enumerate(tree.get("stages") or ())}
    stage_title = COMMON
    if stages:
        stage_title = st.segmented_control(
            "Stage", [COMMON, *stages], default=COMMON, required=True, label_visibility="collapsed"
        )
    prefix = f"stages.{stages[stage_title]}." if stage_title in stages else ""
    subtree = value_at(tree, prefix.rstrip(".")) if prefix else tree
    algorithm = value_at(subtree, "algorithm.algorithm_type") or value_at(tree, "algorithm.algorithm_type") or "ppo"
    mode = value_at(subtree, "mode") or value_at(tree, "mode") or "both"
    expert = st.toggle("All settings", help="Include settings that most runs leave at their defaults")
    fields = form_fields(str(algorithm), str(mode), expert)
    if expert:
        fields = narrowed(fields, by_section(problems))
    messages = by_field(problems, (prefix + field.key for field in fields))
    for section, shown in in_sections(fields).items():
        with st.container(border=True):
            st.markdown(f"**{section}**")
            for start in range(0, len(shown), 2):
                for column, field in zip(st.columns(2), shown[start : start + 2], strict=False):
                    key = prefix + field.key
                    with column:
                        show_field(draft, field, prefix, tree, messages.get(key, []))


def narrowed(fields: Sequence[FormField], faults: dict[str, int]) -> list[FormField]:
    words = st.text_input("Find", placeholder="words from a key or its description", icon=":material/search:")
    if words.strip():
        matches = matching(fields, words)
        if not matches:
            st.caption("No setting has all of these words in its key or its description.")
        return matches
    sections = in_sections(fields)
    title = st.pills(
        "Section",
        list(sections),
        default=next(iter(sections)),
        required=True,
        format_func=lambda name: f"{name} :red[{faults[name]}]" if name in faults else name,
        label_visibility="collapsed",
        wrap=True,
    )
    return sections.get(str(title), [])


def show_field(
    draft: ConfigDraft, field: FormField, prefix: str, tree: Mapping[str, Any], problems: Sequence[Problem]
) -> None:
    """Show one field with its problems; changes go into the text. A stage's field shows the common value."""
    key = prefix + field.key
    value, common = value_at(tree, key), value_at(tree, field.key) if prefix else None
    written = _as_yaml(value)
    there = presented(f"{draft.file} {key}", written)
    default = "" if field.default is None else f"default: {_as_yaml(field.default)}"
    default = default if common is None else f"all stages: {_as_yaml(common)}"
    shared: dict[str, Any] = {
        "key": there.key, "help": field.doc, "on_change": take, "args": (draft, field, key, there)
    }  # fmt: skip
    if field.choices:
        choices = list(dict.fromkeys([DEFAULT, *field.choices, written]))
        st.selectbox(
            field.label, choices, choices.index(written), lambda choice: choice or default or "not set",
            accept_new_options=field.open, **shared,
        )  # fmt: skip
    else:
        st.text_input(field.label, written, placeholder=default, **shared)
    for problem in problems:
        st.error(problem.advice)


def take(draft: ConfigDraft, field: FormField, key: str, there: Presented) -> None:
    """Put the entered value into the text; an empty field removes its key."""
    if (entered := there.entered()) is None:
        return
    try:
        value = entered.strip() or None if field.kind == "string" else parse_value(entered.strip())
    except (yaml.YAMLError, ValueError) as error:  # the entered value stays in the field, to be corrected
        st.toast(f"{field.key}: {error}")
        return
    try:
        earlier = _as_yaml(draft.value(key))
        draft.change(key, value)
        if earlier != there.value:
            st.toast(f"{key} was {earlier or 'not set'} by then: it was changed elsewhere.")
        there.value = _as_yaml(draft.value(key))
    except (ConfigError, YAMLError, ValueError) as error:  # the text is at fault: the value may be entered again
        there.forget()
        st.toast(f"{field.key} was not changed: {error}")


def save_and_start(
    draft: ConfigDraft, checked: CheckedDraft, settings: StudioSettings, show_runs: Callable[[str], None]
) -> None:
    """Save the draft, under this or another name, discard its changes, or start a run of it."""
    with st.container(horizontal=True, key="actions"):
        if st.button("Save", icon=":material/save:", disabled=draft.is_saved):
            if draft.objections(draft.file):
                confirm_save(draft, settings)
            else:
                save(draft, draft.file, settings)
        if st.button("Save as", disabled=not draft.text.strip()):
            save_as(draft, settings)
        if st.button("Discard changes", disabled=draft.is_saved):
            draft.discard()
            st.rerun()
        if st.button("Start", icon=":material/play_arrow:", type="primary", disabled=checked.config is None):
            start_dialog(draft, checked, settings, show_runs)
    shown = settings.shown(draft.file)
    if draft.unkept and not draft.is_saved:
        st.caption(f":red[Unsaved changes in `{shown}`], kept only while this page is open: {escaped(draft.unkept)}")
    elif not draft.is_saved:
        st.caption(f":orange[Unsaved changes in `{shown}`], kept until they are saved or discarded.")
    elif draft.file.exists():
        st.caption(f"All changes are saved in `{shown}`.")
    else:
        st.caption(f"`{shown}` does not exist yet.")


def show_findings(draft: ConfigDraft, checked: CheckedDraft, settings: StudioSettings) -> None:
    """Show the problems, or the plan. Green only if model, data and machine were checked."""
    if count := len(checked.problems):
        st.error(f"**{count} problem{'s' if count != 1 else ''}**", icon=":material/error:")
        for problem in checked.problems:
            st.markdown(f":red[`{problem.key}`]" if problem.key else ":red[file]")
            st.text(problem.advice)
        return
    text, refused, notices = st.session_state.get("opened", ("", [], []))
    if text == draft.text and refused:
        st.error("**It cannot start:**\n" + "\n".join(f"- {problem}" for problem in refused), icon=":material/error:")
    elif checked.unplaced:
        st.warning(f"**Not on this machine:** {checked.unplaced}", icon=":material/memory:")
    elif text == draft.text:
        st.success("**Ready to start.** Model, data and machine were checked.", icon=":material/check_circle:")
    else:
        st.info("**The settings are valid.** Model and data have not been opened yet.", icon=":material/rule:")
    for notice in notices if text == draft.text else ():
        st.warning(escaped(notice), icon=":material/info:")
    busy = is_busy()
    with st.container(horizontal=True):
        st.button(
            "Check model and data",
            disabled=busy or (text == draft.text and not refused),
            icon=":material/fact_check:",
            on_click=begin,
            args=("Opening what the configuration names …", look, draft, settings),
        )
        st.button(
            "Measure time",
            help="Runs a few steps of each stage whose time is not known, in a folder that is removed again",
            disabled=busy or not checked.measurable,
            on_click=begin,
            args=("Measuring; a stage takes a minute or more …", measure, draft, settings),
        )
    show_task(draft.text)
    with st.container(border=True):
        plan = checked.plan.replace(f"{settings.root}/", "").replace("`trinity plan --measure`", "Measure time")
        st.html(hanging(plan))


def edit_text(draft: ConfigDraft) -> None:
    """Show the highlighted text and a field to edit it, the only way to edit lists and maps."""
    there, refused = presented(f"{draft.file} text", draft.text), f"{draft.file} refused text"

    def take_text() -> None:
        if (entered := there.entered()) is None:
            return
        if draft.edit(there.value, entered):
            there.value = entered
        else:
            st.session_state[refused] = entered

    def use() -> None:
        draft.edit(draft.text, st.session_state.pop(refused))

    if refused in st.session_state:  # it may be empty
        st.warning("This text is not used yet: the configuration was changed elsewhere while it was written.")
        st.code(st.session_state[refused], language="yaml", height=200)
        with st.container(horizontal=True):
            st.button("Use this text", on_click=use)
            st.button("Drop this text", on_click=lambda: st.session_state.pop(refused))
    edited = st.container()
    if draft.text.strip():
        coloured, edited = st.tabs(["YAML", "Edit as text"], key="text tabs")
        with coloured:
            st.code(draft.text, language="yaml", line_numbers=True, height=420)
    hint = "Or write a configuration here, as YAML"
    edited.text_area(
        "YAML", there.value, 420, key=there.key, placeholder=hint, on_change=take_text, label_visibility="collapsed"
    )


@dataclass(slots=True)
class Presented:
    """A widget with the values that a browser may send for it.

    With each click a browser sends the values of all its widgets, even of removed ones, and Streamlit treats these as
    changes. Only a value that the widget has not shown is an edit by a person.
    """

    name: str
    value: str
    """The draft's value; the browser's may be spelled differently (`1e-5`)."""
    sent: str
    key: str

    def entered(self) -> str | None:
        """Return what a person entered instead of the shown value; None if nothing."""
        value = str(st.session_state.get(self.key, self.sent) or "")
        if value in (self.value, self.sent):
            return None
        self.sent = value
        return value

    def forget(self) -> None:
        st.session_state.pop(f"presented {self.name}", None)


def presented(name: str, value: str) -> Presented:
    """Return the widget of that name with this value, a new one if the last had another value that a browser may still
    send."""
    last: Presented | None = st.session_state.get(f"presented {name}")
    if last is None or last.value != value:
        last = st.session_state[f"presented {name}"] = Presented(name, value, value, f"{name} {time_ns()}")
    return last


def _as_yaml(value: Any) -> str:
    if value is None:
        return DEFAULT
    return value if isinstance(value, str) else yaml.safe_dump(to_dict(value), default_flow_style=True).split("\n")[0]
