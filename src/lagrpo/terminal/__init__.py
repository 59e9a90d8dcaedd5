"""What a person sees: the display, tables, text."""
