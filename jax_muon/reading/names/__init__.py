"""Parameters read by their paths and shapes alone, for calls without a function."""
