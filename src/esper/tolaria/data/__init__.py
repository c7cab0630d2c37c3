"""Data of tasks: three real splits each, read from what is installed or brought by the user."""
