"""The exact optimum of small instances, with a proof or an honest "not proved". (Being written by EXACT, not SEARCH.)"""
