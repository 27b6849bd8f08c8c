"""Fast paths for particular machines; none changes a result. `LIGHTRL_CPU_KERNELS=0` turns those of `cpu` off."""
