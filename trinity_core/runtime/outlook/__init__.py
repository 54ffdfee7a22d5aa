"""What a run will take of the machine, estimated from its configuration and the headers of its models' files.

Each module answers one question by pure arithmetic. Neither torch nor Ray is imported.
"""
