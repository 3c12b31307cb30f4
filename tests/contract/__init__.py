"""What every implementation of a protocol promises, written once and run on each."""
