"""From text to batches: corpora, tokenizers, token shards, packing, order."""
