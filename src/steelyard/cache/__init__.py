"""Who holds which KV block: pools, prefix lookup, one block table per request and KV group. No torch, no clock."""
