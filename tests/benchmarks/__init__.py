"""What gradients cost, beside the same gradients written by hand and those of other libraries: `make bench`."""
