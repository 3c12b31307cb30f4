"""What the tests share: real savers, real leaves, real graphs, real servers."""
