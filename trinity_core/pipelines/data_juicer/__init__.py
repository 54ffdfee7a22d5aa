"""Data-Juicer, in a separate process and environment: its operators on rows and on experiences."""
