"""Tokenizer, incremental detokenisation with stop strings, chat templates. No torch."""
