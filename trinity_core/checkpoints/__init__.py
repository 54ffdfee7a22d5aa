"""Checkpoint folders: their layout, how they are written whole, found again, cleaned up and converted."""
