"""The keys and values of Trinity-RFT and veRL, as they are written, read as this schema's own.

`native` moves what has another place or another spelling here and refuses what cannot be had; keys that have no effect
here stay in the tree, `without_noted` takes them out, and `notes` says why.
"""

from trinity_core.config.dialects.tables import accepted_keys
from trinity_core.config.dialects.translate import native, noted_keys, notes, without_noted

__all__ = ["accepted_keys", "native", "noted_keys", "notes", "without_noted"]
