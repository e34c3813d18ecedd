"""From text to windows: sources -> tokenizer -> store (HDF5) -> windows (a pure order)."""
