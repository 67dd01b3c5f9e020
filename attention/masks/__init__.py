"""Block masks and element masks: which scores attention computes."""
