"""Patterns that change in place: which blocks are stored next, and their values at their new places."""
