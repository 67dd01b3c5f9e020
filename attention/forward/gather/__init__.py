"""Forward attention whose KV tiles are gathered from the union of a query tile's lists of KV blocks, on sm_90."""
