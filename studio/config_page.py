"""The configuration page: a file's fields by section; its problems, its plan and its text beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import streamlit as st
import yaml

from studio.checked_draft import CheckedDraft, by_field, by_section, checked
from studio.config_draft import ConfigDraft, value_at, yaml_files
from studio.form import FormField, form_fields, in_sections, matching
from studio.save_form import save, save_as, save_without
from studio.sections import SECTIONS
from studio.settings import StudioSettings
from studio.start_form import start_dialog
from trinity_core.config import ConfigError, Problem, to_dict
from trinity_core.config.yaml_text import parse_value

DEFAULT = ""
"""Of a choice: the key is not given."""


def config_page(settings: StudioSettings, show_runs: Callable[[], None]) -> None:
    """Draw the page; `show_runs` goes to the other one, once a run has been started."""
    draft = present_draft(settings)
    try:
        tree = draft.tree()
    except ConfigError as error:
        choose_file(draft, settings)
        st.error(str(error))
        edit_text(draft)
        return
    found = checked(draft.text) if tree else CheckedDraft([])
    form, beside = st.columns([3, 2], gap="large")
    with form:
        choose_file(draft, settings)
        fill_in(draft, tree, found.problems)
        for title, draw in SECTIONS.items():
            with st.container(border=True):
                st.subheader(title)
                draw(draft)
    with beside:
        save_and_start(draft, found, settings, show_runs)
        show_findings(found, bool(tree), settings)
        with st.expander("YAML", expanded=True, icon=":material/description:"):
            edit_text(draft)


def present_draft(settings: StudioSettings) -> ConfigDraft:
    """The draft of this browser's session; the file of the command line at first."""
    if "draft" not in st.session_state:
        st.session_state.draft = ConfigDraft.opened(settings.file)
    draft: ConfigDraft = st.session_state.draft
    return draft


def choose_file(draft: ConfigDraft, settings: StudioSettings) -> None:
    """Choose another file below the root, or write the name of one."""
    listed = [str(path) for path in yaml_files(settings.root)]
    shown = settings.shown(draft.file)
    put("file", shown)

    def load() -> None:
        try:
            st.session_state.draft = ConfigDraft.opened(settings.root / st.session_state["file"])
        except (OSError, UnicodeDecodeError) as error:
            st.toast(f"It cannot be read: {error}")

    st.selectbox(
        "File",
        list(dict.fromkeys([shown, *listed])),
        key="file",
        accept_new_options=True,
        on_change=load,
        disabled=not draft.is_saved,
        help="Choose a file, or write the name of a new one. Changes must be saved or discarded before.",
    )


def fill_in(draft: ConfigDraft, tree: Any, problems: Sequence[Problem]) -> None:
    """The fields: the beginner's in their sections, or the expert's of one section or of a search."""
    algorithm, mode = value_at(tree, "algorithm.algorithm_type") or "ppo", value_at(tree, "mode") or "both"
    expert = st.toggle("All settings", help="The settings that most runs leave alone, too")
    fields = form_fields(str(algorithm), str(mode), expert)
    if expert:
        fields = narrowed(fields, by_section(problems))
    found = by_field(problems, (field.key for field in fields))
    for section, own in in_sections(fields).items():
        with st.container(border=True):
            st.markdown(f"**{section}**")
            for start in range(0, len(own), 2):
                for column, field in zip(st.columns(2), own[start : start + 2], strict=False):
                    with column:
                        show_field(draft, field, value_at(tree, field.key), found.get(field.key, []))


def narrowed(fields: Sequence[FormField], faults: dict[str, int]) -> list[FormField]:
    """The fields that a search or a chosen section leaves."""
    words = st.text_input("Find", placeholder="words of a key or of what it does", icon=":material/search:")
    if words.strip():
        return matching(fields, words)
    sections = in_sections(fields)
    chosen = st.pills(
        "Section",
        list(sections),
        default=next(iter(sections)),
        required=True,
        format_func=lambda name: f"{name} :red[{faults[name]}]" if name in faults else name,
        label_visibility="collapsed",
    )
    return sections.get(str(chosen), [])


def show_field(draft: ConfigDraft, field: FormField, value: Any, problems: Sequence[Problem]) -> None:
    """One field with its problems; a change of it goes into the text."""
    key = f"field {field.key}"
    written = DEFAULT if value is None else _as_yaml(value)
    put(key, written)
    default = "" if field.default is None else f"default: {_as_yaml(field.default)}"
    if field.choices:
        st.selectbox(
            field.label,
            list(dict.fromkeys([DEFAULT, *field.choices, written])),
            key=key,
            help=field.doc,
            format_func=lambda choice: choice or default or "not set",
            accept_new_options=field.open,
            on_change=take,
            args=(draft, field, key),
        )
    else:
        st.text_input(
            field.label, key=key, help=field.doc, placeholder=default, on_change=take, args=(draft, field, key)
        )
    for problem in problems:
        st.error(problem.message)


def take(draft: ConfigDraft, field: FormField, key: str) -> None:
    """Put what was entered into the text; an empty field takes its key away."""
    entered = str(st.session_state[key] or "").strip()
    try:
        draft.change(field.key, entered or None if field.kind == "string" else parse_value(entered))
    except (yaml.YAMLError, ValueError) as error:
        st.toast(f"{field.key}: {error}")


def save_and_start(
    draft: ConfigDraft, found: CheckedDraft, settings: StudioSettings, show_runs: Callable[[], None]
) -> None:
    """Save the draft, under this or another name, discard its changes, or start a run of it."""
    with st.container(horizontal=True):
        if st.button("Save", icon=":material/save:", disabled=draft.is_saved):
            if lost := draft.lost_keys(draft.file):
                save_without(draft, lost, settings)
            else:
                save(draft, draft.file)
        if st.button("Save as"):
            save_as(draft, settings)
        if st.button("Discard changes", disabled=draft.is_saved):
            draft.text = draft.saved
            st.rerun()
        if st.button("Start", icon=":material/play_arrow:", type="primary", disabled=found.config is None):
            start_dialog(draft, found, settings, show_runs)
    shown = settings.shown(draft.file)
    st.caption(f"All changes are saved in `{shown}`." if draft.is_saved else f"`{shown}` lacks the latest changes.")


def show_findings(found: CheckedDraft, begun: bool, settings: StudioSettings) -> None:
    """The problems that there are, or the plan."""
    if not begun:
        st.info("The configuration is empty. Fill in the model and the data, or choose a file.")
    elif count := len(found.problems):
        st.error(f"**{count} problem{'s' if count != 1 else ''}**", icon=":material/error:")
        for problem in found.problems:
            st.markdown(f":red[`{problem.key}`]" if problem.key else ":red[file]")
            st.text(problem.message)
    else:
        st.success("**No problems.** What a run would do:", icon=":material/check_circle:")
        with st.container(border=True):
            st.html(hanging(found.plan.replace(f"{settings.root}/", "")))


def edit_text(draft: ConfigDraft) -> None:
    """The text itself, for lists and maps, which have no field."""
    # A field that has shown another text may still send it: it has a number of its own, and is not listened to.
    shown = st.session_state.setdefault("shown text", ShownText())
    if shown.text != draft.text:
        shown.text, shown.number = draft.text, shown.number + 1
    key = f"text {shown.number}"

    def take_text() -> None:
        draft.text = shown.text = st.session_state[key]

    st.text_area("YAML", draft.text, key=key, height=420, on_change=take_text, label_visibility="collapsed")


@dataclass(slots=True)
class ShownText:
    """The text that the YAML field shows, and how many other texts it has shown before."""

    text: str = ""
    number: int = 0


def put(key: str, value: str) -> None:
    """Let a field show a value. One that it shows already is not put: that would take away what is being typed."""
    if st.session_state.get(key) != value:
        st.session_state[key] = value


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(to_dict(value), default_flow_style=True).split("\n")[0]


LAST_COLUMN = re.compile(r"^ *(?:\S+(?: \S+)? {2,})?")
"""What stands before it: the indent, and a name or a size, which may have one space amid it."""


def hanging(text: str) -> str:
    """The text in a fixed-width font, each line with the indent of its last column where it is broken."""
    return f'<div class="hanging">{"".join(_line(line) for line in text.splitlines())}</div>'


def _line(line: str) -> str:
    found = LAST_COLUMN.match(line)
    indent = len(found[0]) if found is not None else 0
    return f'<div style="padding-left: {indent}ch; text-indent: -{indent}ch">{escape(line)}</div>'
