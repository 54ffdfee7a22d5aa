"""Preflight: checks and estimates what a run needs before anything starts. Imports neither torch nor Ray.

`checks` finds problems that would prevent a run from starting; `stage_plan` is the output of `trinity plan`; the other
modules estimate.
"""
