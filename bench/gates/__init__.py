"""Whether this state of the code may be shipped: gates, each of which passes, fails or is skipped with a reason."""
