"""Backward of selected_attention with gathered KV tiles, on sm_90."""
