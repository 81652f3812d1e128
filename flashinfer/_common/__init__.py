"""What families share: loaded kernels, checks of arguments, dtypes, devices."""
