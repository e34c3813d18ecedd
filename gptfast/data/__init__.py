"""Data files and what is read from them: store (HDF5) -> windows (a pure order) -> batches.

- `prepare` makes a file: a package of its own
- `layout` what a file says about itself; `store` reads it; `foreign` and `nanogpt_meta` those of
  other programs
- `inspection`, `verify` what is in it; `convert`, `export` into ours and out of it
- `windows` which tokens a step sees; `batches` brings them
"""
