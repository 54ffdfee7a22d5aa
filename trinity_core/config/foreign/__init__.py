"""Translates keys and values of Trinity-RFT and veRL into this schema's.

`table` has an action for each key that has another place or that is refused; `translate.native` applies them.
"""
