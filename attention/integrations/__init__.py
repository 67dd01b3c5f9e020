"""Integrations of the attention kernels with other libraries. Each module requires the library it is named after."""
