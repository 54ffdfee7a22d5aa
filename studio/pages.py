"""The pages of Studio, run by Streamlit at each interaction, with the arguments of `studio.settings`."""

from __future__ import annotations

import sys

import streamlit as st

from studio.chat_page import chat_page
from studio.config_page import config_page
from studio.docs_page import docs_page
from studio.runs_page import runs_page
from studio.settings import studio_settings
from trinity_core.base.plugins import load_plugins

LOGO = """<svg xmlns="http://www.w3.org/2000/svg" width="150" height="24" viewBox="0 0 150 24">
<style>text { fill: #2f6f9f } @media (prefers-color-scheme: dark) { text { fill: #6cb2e6 } }</style>
<text x="0" y="18" font-family="sans-serif" font-size="17" font-weight="600">Trinity Flows</text></svg>"""
STYLE = """<style>
.stMainBlockContainer { padding-top: 4rem; padding-bottom: 2rem }
.stTextArea textarea, .hanging { font-family: "Source Code Pro", monospace; font-size: 0.8rem; white-space: pre }
.hanging { white-space: pre-wrap; line-height: 1.5 }
.st-key-title h3 { padding: 0 }
.fact span { display: block; font-size: 0.8rem; opacity: 0.7 }
.fact b { white-space: nowrap }
a:focus-visible, button:focus-visible, summary:focus-visible { outline: 2px solid currentColor !important }
@media (min-width: 1100px) {
  .stColumn:has(> .stVerticalBlock > .stLayoutWrapper > .st-key-beside), .stColumn:has(.st-key-beside) {
    position: sticky; top: 4rem; align-self: flex-start; max-height: calc(100vh - 5rem); overflow-y: auto }
}
@media (max-width: 1099px) { .stMainBlockContainer { padding: 4rem 1rem 6rem }
  .st-key-actions { position: fixed; bottom: 0; left: 0; right: 0; z-index: 9; padding: .6rem 1rem;
    backdrop-filter: blur(14px); border-top: 1px solid #8885 }
  .stHorizontalBlock:has(.st-key-beside) { flex-direction: column }
  .stHorizontalBlock:has(.st-key-beside) > .stColumn { width: 100%; flex: 1 1 auto } }
</style>"""


def main() -> None:
    # No page icons: a browser would fetch them from other servers for its tab.
    st.set_page_config(page_title="Trinity Studio", layout="wide")
    st.html(STYLE)
    st.logo(LOGO, size="large")
    settings = studio_settings(sys.argv[1:])
    load_plugins(settings.plugin_dir)
    first = st.Page(lambda: config_page(settings), title="Configuration", default=True)
    runs = st.Page(lambda: runs_page(settings), title="Runs", url_path="runs")
    st.session_state["runs page"] = runs
    chat = st.Page(lambda: chat_page(settings), title="Chat", url_path="chat")
    pages = [first, runs, chat, st.Page(docs_page, title="Docs", url_path="docs")]
    st.navigation(pages, position="top").run()


main()
