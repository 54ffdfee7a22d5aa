"""All verdicts, by the section in which a key stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from trinity_core.config.annotations import types_of
from trinity_core.config.dialects import data_keys, rollout_keys, run_keys, training_keys, verl_keys
from trinity_core.config.dialects.verdict import Below, Cases, Keys, Moved, Noted, Refused, Rewritten, Verdict

KEYS: Mapping[type[Any], Keys] = {
    **run_keys.KEYS,
    **data_keys.KEYS,
    **rollout_keys.KEYS,
    **training_keys.KEYS,
    **verl_keys.KEYS,
}


def accepted_keys(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """The keys of a section that are accepted beside its settings, each with a sentence."""
    for name, verdict in KEYS.get(section, {}).items():
        if name not in types_of(section) and not isinstance(verdict, Refused):
            yield name, _sentence(verdict)


def _sentence(verdict: Verdict) -> str:
    match verdict:
        case Noted(why=why) | Refused(why=why):
            return f"Without effect. {why}".rstrip()
        case Moved(to=to):
            return f"Same as `{to[0].lstrip('./')}`."
        case Below(rest=rest):
            return _sentence(rest) if rest is not None else "A section of another version."
        case Cases(rest=rest):
            return _sentence(rest)
        case Rewritten():
            return "Written in other keys here."
    return ""
