"""The keys and values of Trinity-RFT and veRL, as they are written, read as this schema's own.

`table` has what becomes of each key; `translate.native` moves what has another place or another spelling here and
refuses what cannot be had. Keys that have no effect here stay in the tree: `without_noted` takes them out, and `notes`
says why.
"""
