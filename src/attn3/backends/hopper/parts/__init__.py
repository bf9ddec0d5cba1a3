"""What the kernels are made of. Every function here is traced into the kernel that calls it."""
