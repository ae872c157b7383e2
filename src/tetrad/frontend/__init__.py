"""What a user sees: text, tokenizer, stop strings, sampling parameters, outputs. It never sees a block or a tensor."""
