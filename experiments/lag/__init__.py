"""A benchmark of losses against staleness: many small runs with the losses that lagrpo ships."""
