"""Integrations of the attention kernels with other libraries. A module requires the library it is named after, except
msa, an interface of MiniMax's kernels."""
