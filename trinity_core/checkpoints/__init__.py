"""Checkpoint folders: written atomically, verified, cleaned up, resumed from and converted."""
