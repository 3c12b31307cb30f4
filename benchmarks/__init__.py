"""What the wrapped saver costs and saves beside the bare one: ``make bench``, ``make demo``."""
