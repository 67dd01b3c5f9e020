"""Schedules of the sm_90 kernel, one per file: the loops of producers and consumers over work tiles.

cooperative     all consumer warpgroups share each work tile
ping_pong       two consumer groups with alternate tiles: one multiplies while the other stores
two_pipelines   two consumer groups with a pipeline each
split_k         CTAs of a cluster share a tile's K-tiles and reduce their accumulators
overlap_store   the store of a tile overlaps the first WGMMAs of the next
"""
