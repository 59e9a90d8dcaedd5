"""The settings of a run: their schema, TOML files and the command line."""
