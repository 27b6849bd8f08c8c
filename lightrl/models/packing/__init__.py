"""Layouts of rows: padded, packed, shared prefix; micro-batches by tokens; attention over them."""
