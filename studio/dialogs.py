"""Dialogs that stay open until they are closed; a full redraw of the page closes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec

import streamlit as st

P = ParamSpec("P")
OPEN = "dialog is open"


def dialog(title: str, width: Literal["small", "large"] = "small") -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Show a function as a dialog that `is_open` knows. Closing it redraws the page."""

    def wrap(body: Callable[P, Any]) -> Callable[P, Any]:
        @wraps(body)
        def noted(*args: P.args, **named: P.kwargs) -> Any:
            st.session_state[OPEN] = True
            return body(*args, **named)

        return st.dialog(title, width=width, on_dismiss="rerun")(noted)

    return wrap


def is_open() -> bool:
    return OPEN in st.session_state


def closed() -> None:
    st.session_state.pop(OPEN, None)
