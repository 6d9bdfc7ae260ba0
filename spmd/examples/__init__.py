"""Programs to start with `mpirun`, and to read: mpirun -n 4 python -m spmd.examples.data_parallel"""
