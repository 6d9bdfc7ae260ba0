"""Where collectives run: on simulated ranks in this process, or on MPI ranks."""
