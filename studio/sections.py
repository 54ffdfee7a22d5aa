"""Sections that modules in `--plugin-dir` add to the configuration page: functions that get the draft, may draw with
Streamlit, and change keys through the draft."""

from __future__ import annotations

from collections.abc import Callable

from studio.config_draft import ConfigDraft
from trinity_core.base.registry import Registry

SECTIONS: Registry[Callable[[ConfigDraft], None]] = Registry("section of Studio")
"""Title → function that draws the section below the form."""
