"""Pure functions of tensors. Depends only on torch."""
