"""The configuration page: a file's fields by section, with its problems, plan and text next to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st
import yaml
from ruamel.yaml.error import YAMLError

from studio.config_draft import CheckedDraft, ConfigDraft, by_field, checked, yaml_files
from studio.form import FormField, form_fields, in_sections, matching
from studio.launch import warm_up
from studio.recipes import recipe_of, recipes
from studio.sections import SECTIONS
from studio.settings import StudioSettings
from studio.start_form import OPENED, start_dialog
from studio.texts import escaped, hanging
from trinity_core.config import ConfigError, Finding, to_dict
from trinity_core.config.findings import value_at
from trinity_core.config.yaml_text import dump_line, parse_value

COMMON = "All stages"
DRAFT, AS_OPENED, REFUSED = "draft", "text as opened", "text not used"
"""Keys of the session."""
FAULTS = (ConfigError, YAMLError, yaml.YAMLError, ValueError, OSError)
"""What a change of a file may raise."""


def config_page(settings: StudioSettings) -> None:
    st.session_state.pop(OPENED, None)
    warm_up(settings)
    draft = present_draft(settings)
    text, tree, error = draft.text, {}, ""
    try:
        tree = dict(draft.tree())
    except ConfigError as fault:
        error = str(fault)
    findings = present_findings(text, draft.file) if tree else CheckedDraft([])
    form, beside = st.columns([3, 2], gap="large")
    with form:
        choose_file(draft, settings, offers_recipes=bool(text))
        if error:
            st.error(f"{error}\n\nCorrect the text on the right, or undo the changes.")
        elif not tree:
            recipe_form(settings, draft.file)
        else:
            fill_in(draft, tree, findings.problems)
            for title, draw in SECTIONS.items():
                with st.container(border=True):
                    st.subheader(title)
                    draw(draft)
    with beside, st.container(key="beside"):
        show_actions(draft, text, findings, settings)
        if tree:
            show_findings(findings, settings)
        edit_text(draft, text)


def present_draft(settings: StudioSettings) -> ConfigDraft:
    """Return this session's file: initially that in the address, or of the command line."""
    draft: ConfigDraft | None = st.session_state.get(DRAFT)
    if draft is None:
        file = settings.root / st.query_params.get("file", "")
        draft = open_file(settings.file if fault_of(file, settings) else file)
    # A rerun requested before the address changed restores the old address.
    if st.query_params.get("file") != (shown := settings.shown(draft.file)):
        st.query_params["file"] = shown
    return draft


def open_file(file: Path) -> ConfigDraft:
    """Make a file this session's, and remember its text for *Undo*. Raises OSError, UnicodeDecodeError."""
    draft = ConfigDraft(file)
    st.session_state[AS_OPENED] = draft.text
    st.session_state[DRAFT] = draft
    return draft


present_findings = st.cache_resource(ttl=60, max_entries=64, show_spinner=False)(checked)


def choose_file(draft: ConfigDraft, settings: StudioSettings, offers_recipes: bool) -> None:
    """Choose another file below the root. The page of an empty file shows recipes itself."""
    shown = settings.shown(draft.file)

    def load() -> None:
        try:
            open_file(settings.root / str(st.session_state["file"] or shown))
        except (OSError, UnicodeDecodeError) as error:
            st.toast(f"The file cannot be read: {error}")

    with st.container(horizontal=True, vertical_alignment="bottom"):
        listed = [str(path) for path in yaml_files(settings.root)]
        show_value("file", shown)
        st.selectbox("File", list(dict.fromkeys([shown, *listed])), key="file", on_change=load)
        if st.button("New", icon=":material/add:", help="From this file or a recipe", disabled=not offers_recipes):
            new_dialog(settings, draft.file)


def recipe_form(settings: StudioSettings, present: Path) -> None:
    """Choose a recipe, or the present file, and a name; write and open the new file."""
    by_title = {recipe.title: recipe for recipe in recipes()}
    if copied := recipe_of(present):
        by_title = {f"a copy of {settings.shown(present)}": copied} | by_title
    captions = [f"{recipe.about}  \n{recipe.needs}" for recipe in by_title.values()]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = (present, settings.file, *(settings.root / f"config_{number}.yaml" for number in range(2, 100)))
        free = next((file for file in names if not file.exists()), settings.file)
        name = st.text_input("New file", value=settings.shown(free))
        create = st.button("Create", type="primary", key="create")
    takes = st.container()
    title = str(st.radio("Begin from", list(by_title), captions=captions))
    plan = present_findings(by_title[title].text, by_title[title].file).plan.replace(f"{settings.root}/", "")
    takes.expander(f"What {title} would do and take").html(hanging(plan or "Not known: it has problems here."))
    file = settings.root / name.strip()
    if not create:
        return
    exists = f"`{settings.shown(file)}` already exists. Choose another name." if file.exists() else ""
    if fault := fault_of(file, settings) or exists:
        st.error(fault)
        return
    write(ConfigDraft(file), by_title[title].text_for(file, settings.root))
    if file.exists():
        open_file(file)
        st.rerun()


new_dialog = st.dialog("New configuration", width="large")(recipe_form)


def fault_of(file: Path, settings: StudioSettings) -> str:
    """Return why the list of files could not open a file of this name again, or ""."""
    if file.suffix not in (".yaml", ".yml"):
        return "The name must end in .yaml."
    return "" if file.resolve().is_relative_to(settings.root) else f"The file must be below {settings.root}."


def fill_in(draft: ConfigDraft, tree: Any, problems: Sequence[Finding]) -> None:
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
        fields = narrowed(fields)
    messages = by_field(problems)
    for section, shown in in_sections(fields).items():
        with st.container(border=True):
            st.markdown(f"**{section}**")
            for start in range(0, len(shown), 2):
                for column, field in zip(st.columns(2), shown[start : start + 2], strict=False):
                    key = prefix + field.key
                    with column:
                        show_field(draft, field, prefix, tree, messages.get(key, []))


def narrowed(fields: Sequence[FormField]) -> list[FormField]:
    words = st.text_input("Find", placeholder="words from a key or its description", icon=":material/search:")
    if words.strip():
        matches = matching(fields, words)
        if not matches:
            st.caption("No setting has all of these words in its key or its description.")
        return matches
    sections = in_sections(fields)
    title = st.pills(
        "Section", list(sections), default=next(iter(sections)), required=True, label_visibility="collapsed", wrap=True
    )
    return sections.get(str(title), [])


def show_field(
    draft: ConfigDraft, field: FormField, prefix: str, tree: Mapping[str, Any], problems: Sequence[Finding]
) -> None:
    """Show one field with its problems; changes go into the file. A stage's field shows the common value."""
    key = prefix + field.key
    value, common = value_at(tree, key), value_at(tree, field.key) if prefix else None
    written, name = _as_yaml(value), f"{draft.file} {key}"
    default = "" if field.setting.default is None else f"default: {_as_yaml(field.setting.default)}"
    default = default if common is None else f"all stages: {_as_yaml(common)}"
    show_value(name, written)
    shared: dict[str, Any] = {
        "key": name, "help": field.setting.doc, "on_change": take, "args": (draft, field, key, name)
    }  # fmt: skip
    if field.choices:
        choices = list(dict.fromkeys(["", *field.choices, written]))  # "": the key is not given
        st.selectbox(
            field.label, choices, format_func=lambda choice: choice or default or "not set",
            accept_new_options=field.open, **shared,
        )  # fmt: skip
    else:
        st.text_input(field.label, placeholder=default, **shared)
    for problem in problems:
        st.error(problem.advice)


def show_value(name: str, value: str) -> None:
    """Let a widget show a file's value; what is typed into it stays until it is entered."""
    if st.session_state.get(name) != value:
        st.session_state[name] = value


def take(draft: ConfigDraft, field: FormField, key: str, name: str) -> None:
    """Write the entered value into the file; an empty field removes its key."""
    entered = str(st.session_state.get(name) or "").strip()
    try:
        draft.change(key, entered or None if field.setting.kind == "string" else parse_value(entered))
    except FAULTS as error:
        st.toast(f"{field.key} was not changed: {error}")


def show_actions(draft: ConfigDraft, text: str, findings: CheckedDraft, settings: StudioSettings) -> None:
    """Undo all changes since the file was opened, or start a run of it."""
    shown, as_opened = settings.shown(draft.file), st.session_state[AS_OPENED]
    with st.container(horizontal=True, key="actions"):
        help_text = "Back to the text that the file had when this page opened it"
        if st.button("Undo changes", icon=":material/undo:", disabled=text == as_opened, help=help_text):
            write(draft, as_opened)
            st.rerun()
        if st.button("Start", icon=":material/play_arrow:", type="primary", disabled=findings.config is None):
            start_dialog(draft, findings, settings)
    st.caption(f"Each change is written to `{shown}`." if draft.file.exists() else f"`{shown}` does not exist yet.")


def show_findings(findings: CheckedDraft, settings: StudioSettings) -> None:
    """Show the problems, or the plan."""
    if count := len(findings.problems):
        st.error(f"**{count} problem{'s' if count != 1 else ''}**", icon=":material/error:")
        for problem in findings.problems:
            st.markdown(f":red[`{problem.key}`]" if problem.key else ":red[file]")
            st.text(problem.advice)
        return
    if findings.unplaced:
        st.warning(f"**Not on this machine:** {escaped(findings.unplaced)}", icon=":material/memory:")
    else:
        st.info("**The settings are valid.** *Start* opens model and data first.", icon=":material/rule:")
    with st.container(border=True):
        st.html(hanging(findings.plan.replace(f"{settings.root}/", "")))


def edit_text(draft: ConfigDraft, text: str) -> None:
    """Show the text in a field to edit it, the only way to edit lists and maps."""
    if REFUSED in st.session_state:
        st.warning("This text was not written: the file was changed elsewhere while you wrote it.")
        st.code(st.session_state[REFUSED], language="yaml", height=200)
        with st.container(horizontal=True):
            st.button("Use this text", on_click=lambda: write(draft, st.session_state.pop(REFUSED)))
            st.button("Drop this text", on_click=lambda: st.session_state.pop(REFUSED))
    name = f"{draft.file} text"

    def take_text() -> None:
        entered = str(st.session_state[name] or "")
        if draft.text == text:
            write(draft, entered)
        else:
            st.session_state[REFUSED] = entered

    show_value(name, text)
    st.text_area("YAML", height=420, key=name, placeholder="Or write a configuration here", on_change=take_text)


def write(draft: ConfigDraft, text: str) -> None:
    try:
        draft.write(text)
    except OSError as error:
        st.toast(f"The file cannot be written: {error}")


def _as_yaml(value: Any) -> str:
    text = value if isinstance(value, str) else dump_line(to_dict(value))
    return "" if value is None else text
