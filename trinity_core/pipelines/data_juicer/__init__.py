"""Data-Juicer, in its own process and environment: its operators on rows and on experiences."""
