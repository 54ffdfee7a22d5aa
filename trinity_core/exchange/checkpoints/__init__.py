"""Checkpoint folders: writing them atomically, verification, clean-up, resume and conversion."""
