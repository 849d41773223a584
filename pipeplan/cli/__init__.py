"""The command line: one module a command, each parses, calls one typed function and prints."""
