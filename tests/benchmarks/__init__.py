"""The cost of gradients, compared with gradients written by hand and with other libraries: `make bench`."""
