"""A dense product of which only the stored blocks of a pattern are computed: SDDMM."""
