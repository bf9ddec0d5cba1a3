"""The kernels: one per algorithm, not one per feature."""
