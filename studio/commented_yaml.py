"""YAML text changed at a key; comments, order and quotes of all else stay."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

INDENTED_LIST = re.compile(r"^( *)[^\s#-][^\n]*:[^\n]*\n\1  - ", re.MULTILINE)
"""Entries of a list that stand further in than its key."""


def changed(text: str, key: str, value: Any) -> str:
    """The text with `value` at a dotted key; None takes the key away. Sections that are not there are made.

    A number in the key is a place in a list, at most one after the last. Raises ruamel.yaml.error.YAMLError if the text
    is no YAML, ValueError if a section on the way holds no keys.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    if INDENTED_LIST.search(text):
        yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load(text)
    tree = CommentedMap() if tree is None else tree
    *path, name = key.split(".")
    section = tree
    for part, following in zip(path, key.split(".")[1:], strict=True):
        node = _at(section, part)
        if node is None:
            if value is None:
                return text
            node = CommentedSeq() if following.isdigit() else CommentedMap()
            if isinstance(section, CommentedSeq):
                section.append(node)
            else:
                section[part] = node
        if not isinstance(node, CommentedSeq if following.isdigit() else CommentedMap):
            raise ValueError(f"{key}: '{part}' holds no keys in this file.")
        section = node
    if value is None:
        section.pop(name, None)
    else:
        section[name] = value
    out = StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def _at(section: CommentedMap | CommentedSeq, part: str) -> Any:
    if isinstance(section, CommentedMap):
        return section.get(part)
    return section[int(part)] if int(part) < len(section) else None
