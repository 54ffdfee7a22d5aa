"""Preflight: what a run needs, checked and estimated before anything starts. Neither torch nor Ray is imported.

`checks` finds what would keep a run from starting; `stage_plan` is what `trinity plan` shows; the other
modules estimate.
"""
