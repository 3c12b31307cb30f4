"""The tests of retaining-saver, and what they share in ``tests.support``."""
