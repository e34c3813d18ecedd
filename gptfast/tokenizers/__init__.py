"""The tokenizers, one kind a module; `tokenizer` finds them by name, file or definition."""
