"""The whole way once, on this machine's CPU: profile, optimize, train, compare."""
