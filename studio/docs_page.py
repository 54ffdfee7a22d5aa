"""The docs of this release, one page at a time, at `/docs?page=studio.md`."""

from __future__ import annotations

import re

import streamlit as st

from trinity_core.base.files import project_files

FIRST = "flows.md"
HEADING = re.compile(r"^# (.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([\w-]+\.md)(?:#[\w-]*)?\)")
PICTURE_OR_FILE = re.compile(r"!\[[^]]*\]\([^)]*\)|(?<=\])\((?!\w+:|\?page=)[^)]*\)")
"""Matches pictures, which a package leaves out, and the target of links that lead to no page."""


def docs_page() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted((project_files() / "docs").glob("*.md"))}
    titles = {name: heading[1] if (heading := HEADING.search(text)) else name for name, text in pages.items()}
    asked = st.query_params.get("page", "")
    first = [*pages].index(asked if asked in pages else FIRST)
    name = str(st.selectbox("Page", [*pages], first, titles.__getitem__))
    st.query_params["page"] = name
    st.markdown(PICTURE_OR_FILE.sub("", LINK.sub(r"](?page=\1)", pages[name])))
