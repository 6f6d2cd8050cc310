"""Sizes that the programs share; tests/rewrites loads the programs with others."""

# All different, so that no axis can be taken for another one by its size.
BATCH, LENGTH, WIDTH, HIDDEN, VOCAB, EXPERTS = 2, 16, 24, 40, 96, 5
HEADS, HEAD = 4, 6  # of WIDTH
