"""The paged KV cache's bookkeeping: blocks, prefix hashes, block tables. No tensors."""
