"""Products and networks on a square grid of simulated ranks."""

from functools import partial

import minidiff as md
import spmd
from collectives import pbroadcast
from collectives.cost import counted
from spmd import P
from spmd.examples.cannon import summa
from spmd.examples.tensor_3d import product_3d
from tests.checks.documented import communicated
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs import grid as programs


@each("q", [2, 3])
def test_the_backward_pass_of_summa_is_the_two_other_products(q):
    """With blocks broadcast again, `md.checkpoint`: as many calls and bytes as dC @ Bᵀ and Aᵀ @ dC by hand."""
    (a, b, weights), on = programs.operands("nn", q), mesh(q, q, names=programs.AXES)

    def again(a, b, axes):
        return md.checkpoint(partial(summa, axes=axes))(a, b)

    both = spmd.communication(lambda a, b: md.vjp(programs.on_grid(again, on), a, b)[1](weights))(a, b)
    by_hand = [
        spmd.communication(programs.on_grid(product, on))(*args)
        for product, args in ((summa, (a, b)), (programs.summa_nt, (weights, b)), (programs.summa_tn, (a, weights)))
    ]
    without_direction = partial(communicated, label=lambda label: label[1:])
    assert without_direction(both) == without_direction(*by_hand)


def test_networks_on_27_simulated_ranks():
    programs.check_cube(mesh(27))


@each("q", [2, 3])
def test_bytes_on_cubes_and_on_deep_grids(q):
    """A product on a cube sends (q-1)(a+b+c) a pass, by rings; on a deep grid, SUMMA has a part of the rows."""
    n, k, m = 36, 72, 108
    t = lambda *shape: md.ShapedArray(shape, "float64")  # noqa: E731

    def sent(body, mesh, a, b, out):
        f = spmd.shard_map(body, mesh, in_specs=(a, b), out_specs=out)
        tape = md.make_tape(f)(t(n, k), t(k, m))
        both = md.make_tape(lambda a, b, ct: md.vjp(f, a, b)[1](ct))(t(n, k), t(k, m), t(n, m))
        return counted(tape).bytes, counted(both).bytes

    cube = spmd.make_mesh((q, q, q), ("i", "j", "k"), backend="simulated")
    one_pass = (q - 1) * 8 * (n * k + k * m + n * m) // q**3
    actual = sent(product_3d, cube, P(("i", "j"), "k"), P(("k", "i"), "j"), P(("i", "k"), "j"))
    assert actual == (one_pass, 2 * one_pass)
    deep = spmd.make_mesh((q, q, q), ("depth", *programs.AXES), backend="simulated")
    rows = P(("depth", "rows"), "cols")
    forward, both = sent(lambda a, b: summa(a, pbroadcast(b, "depth"), programs.AXES), deep, rows, programs.GRID, rows)
    steps = (q - 1).bit_length() * q * 8  # a broadcast to q ranks is sent on log2(q) times, rounded up
    assert forward == steps * (n * k // q**3 + k * m // q**2)
    assert both == 2 * forward + 2 * (q - 1) * 8 * k * m // q**3  # and the weights' gradients, along the depth
