"""Task selectors: which rows of a task set are drawn next. Importing this registers the built-in ones."""

from trinity_core.data.selectors import difficulty, orders
from trinity_core.data.selectors.selector import SELECTORS, SelectorRows, TaskSelector, check_columns, make_selector

__all__ = ["SELECTORS", "SelectorRows", "TaskSelector", "check_columns", "difficulty", "make_selector", "orders"]
