"""The tokenizers behind `gptfast.data.tokenizer`, one kind a module."""
