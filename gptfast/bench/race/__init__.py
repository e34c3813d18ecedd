"""How soon recipes reach a loss: `race` runs them, `record` is the JSON, `table` the text."""
