"""Tables of selected blocks: kernels that make the bits, block lists and tile order that attention kernels read."""
