"""What tests share: the source as a graph of imports, and what a test may not leave behind."""
