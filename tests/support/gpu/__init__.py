"""What the tests on a GPU measure with; it runs without one as far as it can."""
