"""Dialogs that stay open until they are closed; a full redraw of the page closes them. Those that save a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import streamlit as st

from studio.config_draft import ConfigDraft, checked
from studio.recipes import recipes
from studio.settings import StudioSettings
from studio.texts import hanging
from trinity_core.base.files import project_files

P = ParamSpec("P")
OPEN = "dialog is open"


def dialog(title: str, width: Literal["small", "large"] = "small") -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Show a function as a dialog that `is_open` knows. Closing it redraws the page."""

    def wrap(body: Callable[P, Any]) -> Callable[P, Any]:
        @wraps(body)
        def noted(*args: P.args, **options: P.kwargs) -> Any:
            st.session_state[OPEN] = True
            return body(*args, **options)

        return st.dialog(title, width=width, on_dismiss="rerun")(noted)

    return wrap


def is_open() -> bool:
    return OPEN in st.session_state


def closed() -> None:
    st.session_state.pop(OPEN, None)


def recipe_form(settings: StudioSettings, present: Path) -> None:
    """Choose a recipe and a name; write and open the new file."""
    by_title = {recipe.title: recipe for recipe in recipes()}
    if not by_title:
        st.error(f"There are no recipes in {project_files() / 'configs'}: install Trinity Flows again.")
        return
    captions = [f"{recipe.about}  \n{recipe.needs}" for recipe in by_title.values()]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.text_input("Save as", value=settings.shown(_free_name(settings, present)))
        create = st.button("Create", type="primary", key="create")
    takes = st.container()
    title = str(st.radio("Begin from", list(by_title), captions=captions))
    plan = checked(by_title[title].text, by_title[title].file).plan.replace(f"{settings.root}/", "")
    takes.expander(f"What {title} would do and take").html(hanging(plan or "Not known: it has problems here."))
    file = settings.root / name.strip()
    if not create:
        return
    if fault := fault_of(file, settings):
        st.error(fault)
    elif file.exists():
        st.error(f"`{settings.shown(file)}` already exists. Choose another name.")
    else:
        draft = ConfigDraft.opened(file, settings.drafts)
        if draft.edit("", by_title[title].text_for(file, settings.root)):
            save(draft, file, settings)
        else:
            st.error(f"`{settings.shown(file)}` has unsaved changes. Choose another name.")


new_dialog = dialog("New configuration", width="large")(recipe_form)


def _free_name(settings: StudioSettings, present: Path) -> Path:
    """Return the current file if it does not exist yet, else the first free name."""
    names = (present, settings.file, *(settings.root / f"config_{number}.yaml" for number in range(2, 100)))
    return next((file for file in names if not file.exists()), settings.file)


def fault_of(file: Path, settings: StudioSettings) -> str:
    """Return why the list of files could not open a file of this name again, or ""."""
    if file.suffix not in (".yaml", ".yml"):
        return "The name must end in .yaml."
    return "" if file.resolve().is_relative_to(settings.root) else f"The file must be below {settings.root}."


@dialog("Save as")
def save_as(draft: ConfigDraft, settings: StudioSettings) -> None:
    """Ask for another name, and before a file is overwritten."""
    name = st.text_input("File", value=settings.shown(draft.file), help="Folders that are missing will be created.")
    file = settings.root / name.strip()
    if fault := fault_of(file, settings):
        st.error(fault)
    ask_and_save(draft, file, settings, "Save", not fault)


@dialog("Save over these changes?")
def confirm_save(draft: ConfigDraft, settings: StudioSettings) -> None:
    ask_and_save(draft, draft.file, settings, "Save anyway")


def ask_and_save(draft: ConfigDraft, file: Path, settings: StudioSettings, label: str, enabled: bool = True) -> None:
    objections = draft.objections(file)
    for objection in objections:
        st.warning(objection)
    label = "Overwrite" if objections and file != draft.file else label
    if st.button(label, type="primary", key="confirmed", disabled=not enabled):
        save(draft, file, settings)


def save(draft: ConfigDraft, file: Path, settings: StudioSettings) -> None:
    """Save and open the file; the page then says below the buttons that it is saved."""
    try:
        if file == draft.file:
            draft.save()
        else:
            draft = draft.save_as(file)
    except OSError as error:
        st.error(f"`{settings.shown(file)}` cannot be saved: {error}")
        return
    st.session_state.draft = draft
    st.rerun()
