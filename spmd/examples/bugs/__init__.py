"""Bugs of distributed and differentiated programs, as programs of this project.

    mpirun -n 2 python -m spmd.examples.bugs collective_under_if

====================  ===================================================  ==================
program               the bug                                              what catches it
====================  ===================================================  ==================
psum_loss             a summed loss has a gradient that is not summed      the right number
example_gradients     gradients of single examples are summed over ranks   a warning
jacobian_in_body      jacrev fails, or differs from jacfwd                 a warning
custom_gradient       a custom gradient lacks its sum over ranks           an error
tensor_parallel       a bias is added, or a sum taken, once for each rank  an error, if asked
parts_and_back        parts of a sum come back with a different gradient   the right number
redundant_all_reduce  a gradient is summed more often than it must be      a type that says so
collective_under_if   only some ranks call a collective                    an error
recompilation         ranks compile at different times, and one waits      an error
assignment            a derivative is lost by assigning to an array        an error
====================  ===================================================  ==================

Each runs on two ranks: on simulated ones without `mpirun`, within a second. Most end with the error that is their
subject. The page `docs/bugs.md` has the threads where these bugs were reported, and explains each program.
"""
