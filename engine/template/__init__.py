"""The template process: the imports of an engine core, done once; cores are forked from it."""
