"""Layouts of rows: padded, packed, tree; micro-batches by tokens; attention over them."""
