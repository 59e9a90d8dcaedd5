"""`lagrpo view`: a run as one HTML file that needs no network. docs/inspect.md has more."""
