"""The docs of this release, one page at a time, at `/docs?page=studio.md`."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

from trinity_core.base.files import project_files

FIRST = "flows.md"
HEADING = re.compile(r"^# (.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([\w-]+\.md)(?:#[\w-]*)?\)")
PICTURE_OR_FILE = re.compile(r"!\[[^]]*\]\([^)]*\)|(?<=\])\((?!\w+:|\?page=)[^)]*\)")
"""Matches pictures, which a package leaves out, and the target of links that lead to no page."""


@st.cache_data
def titles(folder: Path) -> dict[str, str]:
    """Return file name → first heading of a page."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return {name: heading[1] if (heading := HEADING.search(text)) else name for name, text in pages.items()}


def docs_page() -> None:
    folder = project_files() / "docs"
    names = sorted(path.name for path in folder.glob("*.md"))
    title = titles(folder).__getitem__
    name = str(st.selectbox("Page", names, names.index(FIRST), title, key="page", bind="query-params"))
    text = LINK.sub(r"](?page=\1)", (folder / name).read_text(encoding="utf-8"))
    st.markdown(PICTURE_OR_FILE.sub("", text))
