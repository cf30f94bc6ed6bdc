"""The command line: one file per command, no logic in them. Nothing heavy is imported before a command runs."""
