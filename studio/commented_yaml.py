"""YAML text changed at a key; comments, order and quotes of all else stay."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap


def changed(text: str, key: str, value: Any) -> str:
    """The text with `value` at a dotted key; None takes the key away. Sections that are not there are made.

    Raises ruamel.yaml.error.YAMLError if the text is no YAML, ValueError if a section on the way holds no keys.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    tree = yaml.load(text)
    tree = CommentedMap() if tree is None else tree
    *path, name = key.split(".")
    section = tree
    for each in path:
        if section.get(each) is None:
            if value is None:
                return text
            section[each] = CommentedMap()
        section = section[each]
        if not isinstance(section, CommentedMap):
            raise ValueError(f"{key}: '{each}' holds no keys in this file.")
    if value is None:
        section.pop(name, None)
    else:
        section[name] = value
    out = StringIO()
    yaml.dump(tree, out)
    return out.getvalue()
