"""Functions that users write, as programs that torch and the compiler both run: one front for epilogues and masks."""
