"""The display, tables and text on a terminal."""
