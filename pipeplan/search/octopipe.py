"""The published three-phase tuner as a named baseline. (Being written by EXACT, not SEARCH.)"""
