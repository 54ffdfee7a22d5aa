"""Translates keys and values of Trinity-RFT and veRL into this schema's.

`table` lists an action for each key; `translate.native` applies them: it moves or respells settings, refuses
unsupported ones, and removes those without effect, with a notice.
"""
