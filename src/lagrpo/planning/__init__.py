"""`lagrpo plan`: a model of where the time and the memory of a batch go, from measured or stated parts."""
