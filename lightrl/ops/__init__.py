"""The field's maths as pure functions of tensors. Imports torch and nothing else."""
