"""Fast paths that change no result beyond rounding. `LIGHTRL_CPU_KERNELS=0` turns those of `cpu` off."""
