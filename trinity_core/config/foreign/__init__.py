"""The keys and values of Trinity-RFT and veRL, as they are written, read as this schema's own.

`table` has what becomes of each key; `translate.native` moves what has another place or another spelling here, refuses
what cannot be had, and takes out what has no effect, with a notice that says why.
"""
