"""Base: what every room builds on: errors, registry, files, child processes, waits and locks."""
