"""Saving a draft: under its own or another name, never over keys of a file that nobody was asked about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from studio.config_draft import ConfigDraft
from studio.settings import StudioSettings

MOST_NAMED = 10
"""Keys that a question names."""


@st.dialog("Save as")
def save_as(draft: ConfigDraft, settings: StudioSettings) -> None:
    """Ask for another name; a dialog, which a redrawn page does not close."""
    name = st.text_input("File", value=settings.shown(draft.file), help="Folders that are not there yet are made.")
    file = settings.root / name.strip()
    lost = draft.lost_keys(file) if name.strip() else []
    if lost:
        warn_of_lost_keys(file, lost, settings)
    if st.button("Overwrite" if lost else "Save", type="primary", key="save as", disabled=not name.strip()):
        save(draft, file)


@st.dialog("Save with fewer keys?")
def save_without(draft: ConfigDraft, lost: Sequence[str], settings: StudioSettings) -> None:
    """Ask before keys of the file go."""
    warn_of_lost_keys(draft.file, lost, settings)
    if st.button("Save without them", type="primary"):
        save(draft, draft.file)


def warn_of_lost_keys(file: Path, lost: Sequence[str], settings: StudioSettings) -> None:
    """Name the keys that a file has and would lose, the first few of many."""
    more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    names = ", ".join(f"`{key}`" for key in lost[:MOST_NAMED])
    st.warning(f"`{settings.shown(file)}` has these keys, which are not in what you save: {names}{more}.")


def save(draft: ConfigDraft, file: Path) -> None:
    """Save, which the redrawn page then tells below the buttons: a toast would cover them."""
    try:
        draft.save(file)
    except OSError as error:
        st.error(f"It cannot be saved: {error}")
        return
    st.rerun()
