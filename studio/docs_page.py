"""The docs of this release, one page at a time, at `/docs?page=studio.md`, or at a section (`#runs`)."""

from __future__ import annotations

import re

import streamlit as st

from trinity_core.base.files import project_files

ORDER = (
    "first_run own_data gpus troubleshooting install python flows porting glossary data curricula workflows rewards "
    "environments agents human algorithms training lora async evaluation serving doctor studio view tracking compare "
    "replay checkpoints gate improve configuration explorer store sync mcp architecture"
)
"""Pages as the README lists them."""
HEADING = re.compile(r"^# (.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([\w-]+\.md(?:#[\w-]*)?)\)")
PICTURE_OR_FILE = re.compile(r"!\[[^]]*\]\([^)]*\)|(?<=\])\((?!\w+:|\?page=)[^)]*\)")
"""Matches pictures, which a package leaves out, and the target of links that lead to no page."""


def docs_page() -> None:
    docs = project_files() / "docs"
    pages = {f"{name}.md": (docs / f"{name}.md").read_text(encoding="utf-8") for name in ORDER.split()}
    titles = {name: heading[1] if (heading := HEADING.search(text)) else name for name, text in pages.items()}
    asked = st.query_params.get("page", "")
    name = str(st.selectbox("Page", [*pages], [*pages].index(asked) if asked in pages else 0, titles.__getitem__))
    if name != asked:  # setting it would remove the anchor of a section from the address
        st.query_params["page"] = name
    st.markdown(PICTURE_OR_FILE.sub("", LINK.sub(r"](?page=\1)", pages[name])))
