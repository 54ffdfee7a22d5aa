"""The configuration page, run by Streamlit with the file's path as its argument. What it shows is made in `form`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import streamlit as st
import yaml

from trinity_core.config import ConfigError
from trinity_core.config.source import parse, parse_value
from trinity_core.files import write_atomically
from trinity_core.studio.commented_yaml import changed
from trinity_core.studio.form import FormField, by_field, form_fields, problems_of, value_at

DEFAULT = ""
"""Of a choice: the key is not given."""


def main(file: Path) -> None:
    """Draw the page for a file."""
    state = st.session_state
    if "text" not in state:
        state.text = file.read_text(encoding="utf-8") if file.exists() else ""
    st.set_page_config(page_title="Trinity Studio", layout="wide")
    st.title("Configuration")
    try:
        tree = parse(state.text, str(file)).tree if state.text.strip() else {}
    except ConfigError as error:
        st.error(str(error))
        return
    form, beside = st.columns([3, 2])
    expert = form.toggle("Expert")
    algorithm, mode = value_at(tree, "algorithm.algorithm_type") or "ppo", value_at(tree, "mode") or "both"
    fields = form_fields(str(algorithm), str(mode), expert)
    problems = problems_of(state.text) if tree else []
    found = by_field(problems, (field.key for field in fields))
    with form:
        for field in fields:
            show(field, value_at(tree, field.key))
            for problem in found.get(field.key, []):
                st.error(problem.message)
    with beside:
        count = len(problems)
        st.subheader(f"{count} problem{'s' if count != 1 else ''}" if count else "No problems")
        for problem in found.get("", []):
            st.error(str(problem))
        if st.button("Save"):
            write_atomically(file, state.text.encode())
            st.success(f"Saved as {file}")
        st.code(state.text, language="yaml")


def show(field: FormField, value: Any) -> None:
    """One field; a change of it goes into the file's text."""
    key = f"field {field.key}"
    written = DEFAULT if value is None else value if isinstance(value, str) else yaml.safe_dump(value).split("\n")[0]
    st.session_state[key] = written
    label = f"{field.key} ({field.unit})" if field.unit else field.key
    if field.choices:
        names = [DEFAULT, *dict.fromkeys([*field.choices, *([written] if written else [])])]
        st.selectbox(label, names, key=key, help=field.help, on_change=take, args=(field, key))
    else:
        default = "" if field.default is None else f"default: {field.default}"
        st.text_input(label, key=key, help=field.help, placeholder=default, on_change=take, args=(field, key))


def take(field: FormField, key: str) -> None:
    """Put what was entered into the text; an empty field takes its key away."""
    entered: str = st.session_state[key].strip()
    try:
        value = entered or None if field.kind == "string" else parse_value(entered)
        st.session_state.text = changed(st.session_state.text, field.key, value)
    except (yaml.YAMLError, ValueError) as error:
        st.toast(f"{field.key}: {error}")


main(Path(sys.argv[1]))
